"""The life of a process that carries one stream: what it is told, what it says, and when the next one is started."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.descendants import descendants
from support.lane_process import LANE, Staging, lane_process
from support.waiting import wait_until
from transport.fake_ingest import FakeIngest, Peer
from transport.recorder import Recorder

from slotstream.connector.sending.process import lane, lane_main
from slotstream.connector.sending.process.lane import LaneProcess
from slotstream.connector.sending.process.lane_messages import Settled
from slotstream.transport.base import Acked, Failed, LinkDown, LinkUp, RowChunk
from slotstream.transport.spread import Spread
from slotstream.v1 import ingest_pb2

MakeLane = Callable[..., tuple[LaneProcess, Recorder]]


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="slotstream-") as short:
        yield f"unix:{short}/s"


@pytest.fixture
def server(address: str) -> Iterator[FakeIngest]:
    with FakeIngest(address) as fake:
        yield fake


@pytest.fixture
def staging() -> Iterator[Staging]:
    memory = Staging()
    yield memory
    memory.close()


@pytest.fixture
def make_lane(address: str, staging: Staging, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLane]:
    """Makes lanes that are started, and ends them."""
    monkeypatch.setattr(lane, "_RETRY_S", 0.01)
    lanes: list[LaneProcess] = []

    def make(**options: Any) -> tuple[LaneProcess, Recorder]:
        made, recorder = lane_process(address, staging, **options), Recorder()
        made.use_staging(staging.memory, staging.shape.slot_bytes)
        lanes.append(made)
        made.start(recorder)
        return made, recorder

    yield make
    for made in lanes:
        made.close(5.0)
    assert not _pids()


def _pids() -> list[int]:
    return descendants(os.getpid(), LANE)


def _pid() -> int:
    wait_until(lambda: len(_pids()) == 1, "a process")
    (pid,) = _pids()
    return pid


def _up(server: FakeIngest, recorder: Recorder, times: int = 1) -> Peer:
    peer = server.accept()
    peer.welcome()
    recorder.wait(LinkUp, times)
    return peer


def _opening(sample: int) -> ingest_pb2.OpenSample:
    return ingest_pb2.OpenSample(sample=sample, namespace="default", sample_id=f"s-{sample}")


def _patched(directory: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Processes that start from here on run this first."""
    (directory / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(directory)


def test_rows_are_read_out_of_the_memory_that_both_have(server: FakeIngest, make_lane: MakeLane, staging: Staging) -> None:
    made, recorder = make_lane()
    peer = _up(server, recorder)
    slot = staging.memory[3 * 4096 : 3 * 4096 + 100]
    slot[:] = bytes(range(100))
    made.open_sample(_opening(1))
    made.submit(RowChunk(1, 7, 0, 1, slot, 99))
    assert peer.next("open").sample_id == "s-1"
    request = peer.next("chunk")
    assert (request.data, request.chunk.chunk, request.chunk.xxh3) == (bytes(range(100)), 7, 99)
    peer.ack(7)
    assert recorder.wait(Acked) == [Acked((7,))]
    made.abort(ingest_pb2.AbortSample(sample=1, code="ABORTED", message="why"))
    assert peer.next("abort").message == "why"
    peer.say(failed=ingest_pb2.Failed(sample=1, code="ABORTED", message="why"))
    assert recorder.wait(Failed) == [Failed(1, "ABORTED", "why")]


def test_signals_to_a_whole_group_of_processes_do_not_end_it(server: FakeIngest, make_lane: MakeLane) -> None:
    """vLLM's group gets Ctrl-C: what is on its way is still sent."""
    made, recorder = make_lane()
    peer, pid = _up(server, recorder), _pid()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    made.open_sample(_opening(1))
    assert peer.next("open").sample == 1
    assert _pid() == pid


def test_a_process_that_was_killed_is_a_link_that_is_down(
    server: FakeIngest, make_lane: MakeLane, caplog: pytest.LogCaptureFixture
) -> None:
    made, recorder = make_lane()
    _up(server, recorder)
    os.kill(_pid(), signal.SIGKILL)
    (down,) = recorder.wait(LinkDown)
    assert down.code == "INTERNAL"
    made.reset()
    _up(server, recorder, 2)
    assert [line for line in caplog.messages if "the process of stream 0 ended (-9)" in line]


def test_no_process_is_started_before_the_reset_and_none_gets_what_was_said_before_it(
    server: FakeIngest, make_lane: MakeLane, staging: Staging
) -> None:
    """The slot of that chunk may have other rows by then. So it is where the stream broke first, and its process died then."""
    made, recorder = make_lane()
    peer = _up(server, recorder)
    pid = _pid()
    peer.end()
    recorder.wait(LinkDown)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: made._child is None and not _pids(), "the end of the process")
    made.open_sample(_opening(1))
    made.submit(RowChunk(1, 1, 0, 1, staging.memory[:100], 1))
    assert not made._reset.is_set()
    assert not _pids()
    made.reset()
    peer = _up(server, recorder, 2)
    made.open_sample(_opening(3))
    assert peer.next("open").sample == 3
    assert len(recorder.of(LinkDown)) == 1


@pytest.mark.parametrize("what", ["calls", "process"])
def test_a_process_that_hangs_is_killed(
    server: FakeIngest, make_lane: MakeLane, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Also where only the thread that does the calls hangs: then nobody would look at deadlines any more."""
    monkeypatch.setattr(lane, "_SILENT_S", 2.5)
    monkeypatch.setattr(lane, "_GRACE_S", 0.5)
    if what == "calls":
        hang = "GrpcSink.open_sample = lambda self, request: time.sleep(600)"
        _patched(tmp_path, monkeypatch, f"import time\nfrom slotstream.transport.grpc import GrpcSink\n{hang}\n")
    made, recorder = make_lane()
    _up(server, recorder)
    hung = _pid()
    if what == "process":
        os.kill(hung, signal.SIGSTOP)
    made.open_sample(_opening(1))
    recorder.wait(LinkDown)
    assert hung not in _pids()
    made.reset()
    _up(server, recorder, 2)


def test_a_call_that_fails_ends_the_process_and_the_log_says_why(
    server: FakeIngest, make_lane: MakeLane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail = "def fail(self, request): raise RuntimeError('a bug')\nGrpcSink.open_sample = fail"
    _patched(tmp_path, monkeypatch, f"from slotstream.transport.grpc import GrpcSink\n{fail}\n")
    made, recorder = make_lane()
    _up(server, recorder)
    made.open_sample(_opening(1))
    recorder.wait(LinkDown)
    assert "RuntimeError: a bug" in caplog.text
    assert "the process of stream 0 ended (1)" in caplog.text


def test_news_that_cannot_be_understood_costs_the_stream_alone(
    server: FakeIngest, make_lane: MakeLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, recorder = make_lane()
    peer = _up(server, recorder)
    say = made._say
    monkeypatch.setattr(made, "_say", lambda event: 1 // 0 if isinstance(event, Failed) else say(event))
    made.open_sample(_opening(1))
    peer.next("open")
    peer.say(failed=ingest_pb2.Failed(sample=1, code="ABORTED"))
    recorder.wait(LinkDown)
    made.reset()
    _up(server, recorder, 2)


@pytest.mark.parametrize("command", ["/bin/false", "/nowhere"])
def test_a_process_that_cannot_start_is_tried_again(
    server: FakeIngest,
    make_lane: MakeLane,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", command)
        _, recorder = make_lane()
        wait_until(lambda: len([line for line in caplog.messages if "the process of stream 0" in line]) >= 3)
    _up(server, recorder)
    assert recorder.of(LinkDown) == []


def _check_until_down(made: LaneProcess, recorder: Recorder) -> None:
    """As the pump does, but more often."""

    def checked() -> bool:
        made.check_deadlines()
        return bool(recorder.of(LinkDown))

    wait_until(checked, "the end of the stream")


def test_lines_of_its_log_are_ours_from_the_level_on_that_was_asked_for(
    server: FakeIngest, make_lane: MakeLane, caplog: pytest.LogCaptureFixture
) -> None:
    for level, said in ((40, 0), (30, 1)):
        made, recorder = make_lane(level=level, ack_timeout_s=0.1)
        _up(server, recorder)
        made.open_sample(_opening(1))
        made.commit(ingest_pb2.CommitSample(sample=1))
        _check_until_down(made, recorder)
        made.close(5.0)
        lines = [record.name for record in caplog.records if "no answer from" in record.getMessage()]
        assert lines == ["vllm.slotstream.transport.grpc"] * said


def test_a_lane_that_is_closed_at_once_leaves_no_process(make_lane: MakeLane) -> None:
    for _ in range(3):
        made, recorder = make_lane()
        made.close(5.0)
        assert not _pids()
        assert recorder.events == []


def test_a_lane_that_waits_for_its_reset_can_be_closed(server: FakeIngest, make_lane: MakeLane) -> None:
    made, recorder = make_lane()
    _up(server, recorder)
    os.kill(_pid(), signal.SIGKILL)
    recorder.wait(LinkDown)
    made.close(5.0)
    assert not made._thread.is_alive()


def test_a_process_that_stands_still_does_not_keep_its_lane_from_closing(server: FakeIngest, make_lane: MakeLane) -> None:
    made, recorder = make_lane()
    _up(server, recorder)
    os.kill(_pid(), signal.SIGSTOP)
    made.close(0.1)
    assert not made._thread.is_alive()
    assert not _pids()


def test_of_a_server_of_an_earlier_version_a_further_lane_keeps_no_process(
    server: FakeIngest, make_lane: MakeLane, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes one stream, and hears of no other, though a newer one was there before."""
    spread = Spread(2)
    newer = ingest_pb2.Welcome(processes=2, process=1)
    made, recorder = make_lane(spread=spread, stream=1)
    assert not _pids()
    assert spread.settles(0, newer)
    peer = server.accept()
    peer.next("hello")
    assert spread.settles(0, ingest_pb2.Welcome())  # The first lane has met it, too.
    peer.say(welcome=ingest_pb2.Welcome(protocol=1, server_version="0.1.0", window_bytes=1 << 20))
    wait_until(lambda: made._child is None and not _pids(), "the end of the process")
    assert recorder.events == []
    assert caplog.messages == []
    assert spread.settles(0, newer)
    peer = server.accept()
    peer.next("hello")
    peer.say(welcome=ingest_pb2.Welcome(protocol=1, server_version="9", window_bytes=1 << 20, processes=2, process=2))
    recorder.wait(LinkUp)


class _Unheard:
    """News that nobody hears."""

    def add(self, news: object) -> None:
        pass


def test_an_answer_that_comes_late_answers_no_later_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_main, "_ANSWER_S", 0.01)
    asked: Any = lane_main._AskedSpread(2, _Unheard())  # type: ignore[arg-type]
    welcome = ingest_pb2.Welcome(processes=2, process=1)
    assert not asked.settles(1, welcome)
    asked.answers.put(Settled(1, True))
    assert not asked.settles(1, welcome)
    asked.answers.put(Settled(2, True))
    asked.answers.put(Settled(3, True))
    assert asked.settles(1, welcome)
