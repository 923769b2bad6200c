"""GrpcSink and its link: when it is up, when it is given up, what goes out in which order, and what is left behind."""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from transport.fake_ingest import THREADS, FakeIngest, Peer
from transport.recorder import WAIT_S, Recorder

from slotstream.demo.processes import free_port
from slotstream.transport.base import Acked, Committed, Failed, LinkDown, LinkUp, RowChunk
from slotstream.transport.grpc import GrpcSink
from slotstream.transport.spread import Spread
from slotstream.v1 import ingest_pb2
from slotstream.wire.names import CONTROL_BYTES_MAX, PROTOCOL_VERSION

HELLO = ingest_pb2.Hello(
    protocol=PROTOCOL_VERSION, engine_id="an-engine", worker_rank=3, vllm_version="1", slotstream_version="2"
)
SAID = ingest_pb2.Hello.FromString(HELLO.SerializeToString())
SAID.batches = True
MakeSink = Callable[..., tuple[GrpcSink, Recorder]]


@pytest.fixture(autouse=True)
def _short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.transport.grpc._RETRY_S", 0.01)
    monkeypatch.setattr("slotstream.transport.grpc._RETRY_S_MAX", 0.05)


@pytest.fixture
def address() -> Iterator[str]:
    """A socket of the test's own, which a server can leave and another one take over."""
    with tempfile.TemporaryDirectory(prefix="slotstream-") as short:
        yield f"unix:{short}/s"


@pytest.fixture
def make_sink(address: str) -> Iterator[MakeSink]:
    """Makes started sinks to `address`; those that never give a stream up on their own unless told otherwise."""
    sinks: list[GrpcSink] = []

    def make(**options: Any) -> tuple[GrpcSink, Recorder]:
        sink, recorder = GrpcSink(address, HELLO, **{"ack_timeout_s": math.inf, **options}), Recorder()
        sinks.append(sink)
        sink.start(recorder)
        return sink, recorder

    yield make
    for sink in sinks:
        sink.close(WAIT_S)


@pytest.fixture
def server(address: str) -> Iterator[FakeIngest]:
    with FakeIngest(address) as fake:
        yield fake


class Attempts:
    """Counts the channels that sinks make: one an attempt to connect, the next once the one before has failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made = threading.Semaphore(0)
        make = grpc.insecure_channel

        def insecure_channel(*arguments: Any, **options: Any) -> grpc.Channel:
            self._made.release()
            return make(*arguments, **options)

        monkeypatch.setattr(grpc, "insecure_channel", insecure_channel)

    def wait_for_next(self) -> None:
        assert self._made.acquire(timeout=WAIT_S)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(monkeypatch)


def opening(sample: int) -> ingest_pb2.OpenSample:
    return ingest_pb2.OpenSample(sample=sample, namespace="default", sample_id=f"s-{sample}")


def chunk(number: int, nbytes: int = 100) -> RowChunk:
    return RowChunk(1, number, number, 1, memoryview(bytes((number,)) * nbytes), number)


def commit(sample: int) -> ingest_pb2.CommitSample:
    return ingest_pb2.CommitSample(sample=sample, row_count=1, token_ids=[1])


# The link.


def test_the_link_is_up_once_the_server_welcomes(server: FakeIngest, make_sink: MakeSink) -> None:
    _, recorder = make_sink()
    peer = server.accept()
    assert peer.next("hello") == SAID
    assert recorder.events == []
    peer.say(welcome=ingest_pb2.Welcome(protocol=1, server_version="7.8", window_bytes=1))
    assert recorder.wait(LinkUp) == [LinkUp("7.8")]


def _welcome(**more: Any) -> ingest_pb2.Welcome:
    return ingest_pb2.Welcome(protocol=1, server_version="7.8", window_bytes=1 << 20, **more)


@pytest.mark.parametrize("batches", [False, True])
def test_the_latest_report_goes_out_where_the_server_takes_it(
    server: FakeIngest, make_sink: MakeSink, *, batches: bool
) -> None:
    sink, recorder = make_sink()
    sink.report(ingest_pb2.EngineReport(host="before the link"))
    peer = server.accept()
    peer.next("hello")
    peer.say(welcome=_welcome(reports=True, batches=batches))
    recorder.wait(LinkUp)
    sink.report(ingest_pb2.EngineReport(host="first"))
    assert peer.next("report").host == "first"
    sink.report(ingest_pb2.EngineReport(host="second"))
    assert peer.next("report").host == "second"


def test_a_server_of_an_earlier_version_gets_no_report(server: FakeIngest, make_sink: MakeSink) -> None:
    """Also one that takes over from a later one."""
    sink, recorder = make_sink()
    peer = server.accept()
    peer.next("hello")
    peer.say(welcome=_welcome(reports=True))
    recorder.wait(LinkUp)
    peer.end()
    recorder.wait(LinkDown)
    sink.report(ingest_pb2.EngineReport(host="meanwhile"))
    sink.reset()
    peer = server.accept()
    peer.next("hello")
    peer.say(welcome=_welcome())
    recorder.wait(LinkUp, 2)
    sink.report(ingest_pb2.EngineReport(host="unwanted"))
    sink.open_sample(opening(1))
    peer.next("open")


def test_a_web_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with FakeIngest(f"127.0.0.1:{free_port()}") as server:
        sink = GrpcSink(server.address, HELLO)
        sink.start(Recorder())
        try:
            assert server.accept().next("hello") == SAID
        finally:
            sink.close(WAIT_S)


def test_nothing_goes_out_before_the_welcome(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, _ = make_sink()
    sink.open_sample(opening(1))
    sink.submit(chunk(1))
    sink.commit(commit(1))
    peer = server.accept()
    assert peer.next("hello") == SAID
    peer.end()
    assert peer.rest() == []


def test_requests_share_messages_where_the_server_takes_that(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, recorder = make_sink()
    for sample in (1, 2):
        sink.open_sample(opening(sample))
    sink.submit(chunk(1))
    sink.commit(commit(1))
    sink.abort(ingest_pb2.AbortSample(sample=2, code="ABORTED"))
    peer = server.accept()
    peer.welcome(batches=True)
    assert [one.open for one in peer.next("batch").requests] == [opening(1), opening(2)]
    assert peer.next("chunk").chunk.chunk == 1
    first, second = peer.next("batch").requests
    assert (first.commit, second.abort.sample) == (commit(1), 2)
    acked, committed = ingest_pb2.Ack(chunks=[1]), ingest_pb2.Committed(sample=1)
    failed = ingest_pb2.Failed(sample=2, code="ABORTED", message="why")
    replies = [ingest_pb2.IngestReply(**one) for one in ({"ack": acked}, {"committed": committed}, {"failed": failed})]
    peer.say(batch=ingest_pb2.ReplyBatch(replies=replies))
    recorder.wait(Failed)
    assert recorder.events[1:] == [Acked((1,)), Committed(1, duplicate=False), Failed(2, "ABORTED", "why")]


def test_a_message_of_requests_is_never_longer_than_a_server_takes(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, _ = make_sink()
    token_ids = [1 << 40] * 5000  # Of 6 bytes each.
    commits = [ingest_pb2.CommitSample(sample=sample, token_ids=token_ids) for sample in range(1, 41)]
    commits[6].token_ids.extend(token_ids * 10)  # Too long for a batch.
    for commit in commits:
        sink.commit(commit)
    peer = server.accept()
    peer.welcome(batches=True)
    heard: list[ingest_pb2.CommitSample] = []
    while len(heard) < len(commits):
        request = peer.next_of("batch", "commit")
        assert request.HasField("commit") or request.ByteSize() <= CONTROL_BYTES_MAX
        heard += [one.commit for one in request.batch.requests] or [request.commit]
    assert heard == commits


def test_everything_goes_out_as_it_was_given(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, _ = make_sink()
    sink.open_sample(opening(1))
    sink.submit(chunk(1))
    sink.commit(commit(1))
    sink.abort(ingest_pb2.AbortSample(sample=2, code="ABORTED", message="why"))
    peer = server.accept()
    peer.welcome()
    assert peer.next("open") == opening(1)
    sent = peer.next("chunk")
    assert sent.chunk == ingest_pb2.ChunkHeader(sample=1, chunk=1, first_row=1, rows=1, xxh3=1)
    assert sent.data == b"\1" * 100
    assert peer.next("commit") == commit(1)
    assert peer.next("abort") == ingest_pb2.AbortSample(sample=2, code="ABORTED", message="why")


def test_a_server_that_ends_the_stream_takes_the_link_down(server: FakeIngest, make_sink: MakeSink) -> None:
    _, recorder = make_sink()
    peer = server.accept()
    peer.welcome()
    recorder.wait(LinkUp)
    peer.end()
    recorder.wait(LinkDown)
    assert [type(event) for event in recorder.events] == [LinkUp, LinkDown]


@pytest.mark.parametrize("reply", [b"\xff\xff\xff", b""], ids=["not protobuf", "of no kind"])
def test_a_reply_that_means_nothing_does_no_harm(server: FakeIngest, make_sink: MakeSink, reply: bytes) -> None:
    sink, recorder = make_sink()
    peer = server.accept()
    peer.welcome()
    peer.say_bytes(reply)
    if reply:
        recorder.wait(LinkDown)
        sink.reset()
        peer = server.accept()
        peer.welcome()
    sink.submit(chunk(1))
    peer.next("chunk")
    peer.ack(1)
    recorder.wait(Acked)


def test_answers_to_nothing_do_no_harm(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, recorder = make_sink()
    peer = server.accept()
    peer.welcome(window_bytes=100)
    for _ in range(3):
        peer.ack(7)
    peer.say(committed=ingest_pb2.Committed(sample=9))
    peer.say(draining=ingest_pb2.Draining())
    peer.say(welcome=ingest_pb2.Welcome(protocol=1, server_version="again", window_bytes=1 << 20))
    for number in (1, 2):  # The window has not grown by what was acked and never sent.
        sink.submit(chunk(number))
    peer.next("chunk")
    sink.open_sample(opening(5))
    peer.next("open")
    peer.ack(1)
    peer.next("chunk")
    assert recorder.wait(Acked, 4)[-1] == Acked((1,))
    assert recorder.of(LinkUp) == [LinkUp("fake")]


# No server yet, or no longer.


def test_samples_wait_for_a_server(make_sink: MakeSink, address: str, attempts: Attempts) -> None:
    sink, recorder = make_sink(ack_timeout_s=0)
    sink.open_sample(opening(1))
    for _ in range(3):
        attempts.wait_for_next()
        sink.check_deadlines()
    with FakeIngest(address) as server:
        peer = server.accept()
        peer.welcome()
        assert peer.next("open") == opening(1)
        assert recorder.events == [LinkUp("fake")]


def test_after_a_reset_it_reaches_a_server_that_appears_later(make_sink: MakeSink, address: str, attempts: Attempts) -> None:
    sink, recorder = make_sink()
    with FakeIngest(address) as server:
        server.accept().welcome()
        recorder.wait(LinkUp)
        attempts.wait_for_next()
    recorder.wait(LinkDown)
    for number in (1, 2):
        sink.open_sample(opening(number))
        sink.submit(chunk(number))
        sink.commit(commit(number))
    sink.reset()
    for _ in range(3):
        attempts.wait_for_next()
    with FakeIngest(address) as server:
        peer = server.accept()
        peer.welcome()
        recorder.wait(LinkUp, 2)
        sink.open_sample(opening(3))
        assert peer.next("open") == opening(3)  # And nothing of what was forgotten.
    assert len(recorder.wait(LinkDown, 2)) == 2  # Attempts that fail are none.


def test_a_link_that_broke_stays_down_until_reset(make_sink: MakeSink, address: str, attempts: Attempts) -> None:
    sink, recorder = make_sink()
    with FakeIngest(address) as server:
        server.accept().welcome(window_bytes=1)
        recorder.wait(LinkUp)
        attempts.wait_for_next()
        sink.open_sample(opening(1))
        sink.submit(chunk(1))
        sink.submit(chunk(2))
    recorder.wait(LinkDown)
    sink.submit(chunk(3))
    with FakeIngest(address) as server:
        sink.check_deadlines()
        sink.reset()
        attempts.wait_for_next()
        peer = server.accept()
        peer.welcome(window_bytes=1)
        recorder.wait(LinkUp, 2)
        sink.submit(chunk(4))
        assert peer.next("chunk").chunk.chunk == 4
        peer.ack(4)
        recorder.wait(Acked)
    assert [type(event) for event in recorder.events[:4]] == [LinkUp, LinkDown, LinkUp, Acked]


def test_a_server_that_refuses_the_stream_is_tried_again(make_sink: MakeSink, address: str) -> None:
    """A server without the service, as behind a proxy that starts before it does."""
    sink, recorder = make_sink()
    sink.open_sample(opening(1))
    with FakeIngest(address) as server:
        server.accept().end()
        server.accept().end()
        peer = server.accept()
        peer.welcome()
        assert peer.next("open") == opening(1)
    assert recorder.events[0] == LinkUp("fake")


# Deadlines.


def _sent_one_chunk(server: FakeIngest, sink: GrpcSink) -> Peer:
    peer = server.accept()
    peer.welcome()
    sink.submit(chunk(1))
    peer.next("chunk")
    return peer


def test_a_server_that_never_acks_is_given_up(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, recorder = make_sink(ack_timeout_s=0)
    _sent_one_chunk(server, sink)
    sink.check_deadlines()
    recorder.wait(LinkDown)
    sink.reset()
    server.accept().welcome()
    recorder.wait(LinkUp, 2)


def test_a_server_that_never_answers_a_commit_is_given_up(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, recorder = make_sink(ack_timeout_s=0)
    peer = _sent_one_chunk(server, sink)
    sink.commit(commit(1))
    peer.next("commit")
    peer.ack(1)
    recorder.wait(Acked)
    sink.check_deadlines()
    recorder.wait(LinkDown)


def test_a_stream_that_is_never_welcomed_is_given_up_and_the_next_one_tried(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, recorder = make_sink(ack_timeout_s=0)
    sink.open_sample(opening(1))
    for _ in range(2):
        peer = server.accept()
        peer.next("hello")
        while not peer.ended.wait(0.05):
            sink.check_deadlines()
    assert recorder.events == []


def test_a_server_within_its_time_is_not_given_up(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, recorder = make_sink(ack_timeout_s=1e9)
    peer = _sent_one_chunk(server, sink)
    sink.check_deadlines()
    peer.ack(1)
    recorder.wait(Acked)
    assert recorder.of(LinkDown) == []


def test_a_server_that_owes_nothing_is_not_given_up(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, recorder = make_sink(ack_timeout_s=0)
    peer = _sent_one_chunk(server, sink)
    sink.commit(commit(1))
    peer.next("commit")
    peer.ack(1)
    peer.say(committed=ingest_pb2.Committed(sample=1))
    recorder.wait(Committed)
    sink.check_deadlines()
    sink.submit(chunk(2))
    peer.next("chunk")
    peer.ack(2)
    recorder.wait(Acked, 2)
    assert recorder.of(LinkDown) == []


# The window, and what goes ahead.


@pytest.mark.parametrize("fitting", [1, 3])
def test_the_window_is_never_exceeded(server: FakeIngest, make_sink: MakeSink, fitting: int) -> None:
    sink, recorder = make_sink()
    peer = server.accept()
    peer.welcome(window_bytes=100 * fitting + 99)
    recorder.wait(LinkUp)
    last = 12
    for number in range(1, last + 1):
        sink.submit(chunk(number))
    for number in range(1, fitting + 1):
        assert peer.next("chunk").chunk.chunk == number
    for acked in range(1, last - fitting + 1):
        # What is sent is sent in order: had another chunk gone out, it would come before the open.
        sink.open_sample(opening(acked))
        assert peer.next("open") == opening(acked)
        peer.ack(acked)
        assert peer.next("chunk").chunk.chunk == acked + fitting


@pytest.mark.parametrize(("processes", "fitting"), [(2, 1), (0, 4)], ids=["shared", "one stream to an earlier version"])
def test_the_streams_of_a_sender_share_a_window(server: FakeIngest, make_sink: MakeSink, processes: int, fitting: int) -> None:
    sink, recorder = make_sink(spread=Spread(4))
    peer = server.accept()
    peer.next("hello")
    peer.say(welcome=ingest_pb2.Welcome(protocol=1, server_version="7.8", window_bytes=400, processes=processes, process=1))
    recorder.wait(LinkUp)
    for number in range(1, 6):
        sink.submit(chunk(number))
    for _ in range(fitting):
        peer.next("chunk")
    sink.open_sample(opening(1))
    assert peer.next("open") == opening(1)


def test_a_chunk_larger_than_the_window_goes_alone(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, _ = make_sink()
    peer = server.accept()
    peer.welcome(window_bytes=50)
    for number in (1, 2):
        sink.submit(chunk(number))
    peer.next("chunk")
    sink.open_sample(opening(1))
    peer.next("open")
    peer.ack(1)
    assert peer.next("chunk").chunk.chunk == 2


def test_commits_and_aborts_keep_their_place_behind_waiting_chunks(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, _ = make_sink()
    peer = server.accept()
    peer.welcome(window_bytes=100)
    sink.submit(chunk(1))
    sink.submit(chunk(2))
    sink.commit(commit(1))
    peer.next("chunk")
    sink.open_sample(opening(2))
    sink.open_sample(opening(3))
    assert [peer.next("open").sample for _ in range(2)] == [2, 3]
    peer.ack(1)
    assert peer.next("chunk").chunk.chunk == 2
    assert peer.next("commit").sample == 1  # Not held back: only chunks count.


def test_the_window_of_a_new_stream_starts_empty(server: FakeIngest, make_sink: MakeSink) -> None:
    sink, recorder = make_sink()
    for stream in (1, 2, 3):
        peer = server.accept()
        peer.welcome(window_bytes=200)
        recorder.wait(LinkUp, stream)
        for number in (1, 2):
            sink.submit(chunk(number))
            peer.next("chunk")
        peer.end()
        recorder.wait(LinkDown, stream)
        sink.reset()


# The end.


def _own_threads() -> set[threading.Thread]:
    """Threads that are not of the fake server's own pool."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith(THREADS)}


def _join(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WAIT_S)
    assert not [thread for thread in threads if thread.is_alive()]


@pytest.mark.parametrize("state", ["nobody there", "not welcomed", "window full", "never read", "down"])
def test_close_ends_every_thread(address: str, state: str) -> None:
    before = _own_threads()
    sink, recorder = GrpcSink(address, HELLO, ack_timeout_s=0), Recorder()
    sink.start(recorder)
    if state == "down":
        with FakeIngest(address) as server:
            server.accept().welcome()
            recorder.wait(LinkUp)
        recorder.wait(LinkDown)
    sink.open_sample(opening(1))
    for number in range(1, 20):
        sink.submit(chunk(number, nbytes=1 << 20))
    if state in ("nobody there", "down"):
        sink.close(WAIT_S)
        _join(_own_threads() - before)
        return
    with FakeIngest(address) as server:
        running = _own_threads()
        peer = server.accept()
        if state == "not welcomed":
            peer.next("hello")
        else:
            peer.welcome(window_bytes=2 << 20 if state == "window full" else 1 << 30)
            peer.next("open")
            peer.next("chunk")
        sink.close(WAIT_S)
        _join({thread for thread in running - before if thread.name == "slotstream-grpc"})
    _join(_own_threads() - before)


def test_close_before_start_and_twice(address: str) -> None:
    sink = GrpcSink(address, HELLO)
    sink.close(WAIT_S)
    sink.close(WAIT_S)


def test_close_right_after_start(server: FakeIngest, address: str) -> None:
    before = _own_threads()
    for _ in range(20):
        sink = GrpcSink(address, HELLO)
        sink.start(Recorder())
        sink.close(WAIT_S)
        _join({thread for thread in _own_threads() - before if thread.name == "slotstream-grpc"})
    _join(_own_threads() - before)


@pytest.mark.parametrize("breaks", [True, False], ids=["one sink whose link breaks", "one sink after another"])
def test_twenty_links_leave_no_thread_behind(server: FakeIngest, address: str, breaks: bool) -> None:
    before = _own_threads()
    sink, recorder = GrpcSink(address, HELLO), Recorder()
    sink.start(recorder)
    for link in range(1, 21):
        peer = server.accept()
        peer.welcome(window_bytes=100)
        recorder.wait(LinkUp, link if breaks else 1)
        for number in (1, 2, 3):
            sink.submit(chunk(number))
        peer.next("chunk")
        if breaks:
            peer.end()
            recorder.wait(LinkDown, link)
            sink.reset()
        else:
            sink.close(WAIT_S)
            sink, recorder = GrpcSink(address, HELLO), Recorder()
            sink.start(recorder)
    sink.close(WAIT_S)
    _join(_own_threads() - before)


def test_a_path_that_is_no_socket_is_a_link_that_does_not_come_up(tmp_path: Path, attempts: Attempts) -> None:
    (tmp_path / "s").touch()
    sink, recorder = GrpcSink(f"unix:{tmp_path}/s", HELLO), Recorder()
    sink.start(recorder)
    sink.open_sample(opening(1))
    for _ in range(3):
        attempts.wait_for_next()
    sink.close(WAIT_S)
    assert recorder.events == []
