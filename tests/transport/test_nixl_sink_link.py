"""What a sender says to a server that may read over NIXL: offers, announcements, frames where those were refused."""

from __future__ import annotations

import ctypes
import math
import mmap
import tempfile
from collections.abc import Callable, Iterator

import pytest
from transport.fake_ingest import FakeIngest, Peer
from transport.recorder import WAIT_S, Recorder

from slotstream.connector.options import ConnectorOptions
from slotstream.transport.base import Acked, FellBack, LinkDown, LinkUp, RowChunk
from slotstream.transport.grpc import Frames, GrpcSink
from slotstream.transport.nixl import NixlPlane, planes_for
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import PROTOCOL_VERSION
from slotstream.wire.nixl import is_installed

SLOT_BYTES = 4096
HERE, THERE = "127.0.0.1:50151", "store.example:50151"
SLOTS = 8
HELLO = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="an-engine")
needs_nixl = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")


class Worker:
    """A started sink over NIXL, and its staging."""

    def __init__(self, address: str) -> None:
        self.staging = memoryview(mmap.mmap(-1, SLOTS * SLOT_BYTES))
        self.recorder = Recorder()
        plane = NixlPlane(required=True)
        self.sink = GrpcSink(address, HELLO, ack_timeout_s=math.inf, plane=plane)
        self.sink.use_staging(self.staging, SLOT_BYTES)
        self.sink.start(self.recorder)

    def submit(self, number: int, slot: int = 0, at: int = 0) -> None:
        buffer = self.staging[slot * SLOT_BYTES + at :][:100]
        buffer[:] = bytes((number,)) * 100
        self.sink.submit(RowChunk(1, number, number, 1, buffer, number))


@pytest.fixture(autouse=True)
def _short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.transport.grpc._RETRY_S", 0.01)
    monkeypatch.setattr("slotstream.transport.grpc._RETRY_S_MAX", 0.05)


@pytest.fixture
def server() -> Iterator[FakeIngest]:
    with tempfile.TemporaryDirectory(prefix="slotstream-") as short, FakeIngest(f"unix:{short}/s") as fake:
        yield fake


@pytest.fixture
def make_worker(server: FakeIngest) -> Iterator[Callable[[], Worker]]:
    workers: list[Worker] = []

    def make() -> Worker:
        workers.append(Worker(server.address))
        return workers[-1]

    yield make
    for worker in workers:
        worker.sink.close(WAIT_S)


@pytest.fixture
def worker(make_worker: Callable[[], Worker]) -> Worker:
    return make_worker()


def welcomed(server: FakeIngest, *, nixl: bool = True) -> Peer:
    """The server's side of the next stream, past its welcome."""
    peer = server.accept()
    assert peer.next("hello").nixl.agent
    peer.say(welcome=ingest_pb2.Welcome(protocol=1, server_version="fake", window_bytes=1 << 20, nixl=nixl))
    return peer


def refuse(peer: Peer, *chunks: int) -> None:
    peer.say(resend=ingest_pb2.Resend(chunks=chunks))


@needs_nixl
def test_every_sender_offers_its_staging_under_a_name_of_its_own(server: FakeIngest, make_worker: Callable[[], Worker]) -> None:
    make_worker()
    first: ingest_pb2.Hello = server.accept().next("hello")
    make_worker()
    second: ingest_pb2.Hello = server.accept().next("hello")
    assert (first.protocol, first.engine_id) == (PROTOCOL_VERSION, "an-engine")
    assert first.nixl.agent != second.nixl.agent
    assert first.nixl.metadata
    assert (first.nixl.slots, first.nixl.slot_bytes) == (SLOTS, SLOT_BYTES)


@needs_nixl
def test_an_announcement_says_where_the_rows_are(server: FakeIngest, worker: Worker) -> None:
    peer = welcomed(server)
    worker.submit(1, slot=3, at=64)
    said = peer.next_announced()
    assert said.header == ingest_pb2.ChunkHeader(sample=1, chunk=1, first_row=1, rows=1, xxh3=1)
    assert (said.slot, said.generation, said.length) == (3, 1, 100)
    assert ctypes.string_at(said.address, said.length) == b"\1" * 100
    peer.ack(1)
    assert worker.recorder.wait(Acked) == [Acked((1,))]
    worker.submit(2, slot=3)
    worker.submit(3, slot=0)
    assert [(a.slot, a.generation) for a in (peer.next_announced(), peer.next_announced())] == [(3, 2), (0, 1)]


@needs_nixl
def test_chunks_that_wait_are_announced_together(server: FakeIngest, worker: Worker) -> None:
    peer = server.accept()
    peer.next("hello")
    for number in range(1, 5):
        worker.submit(number, slot=number, at=SLOT_BYTES - 50 if number == 2 else 0)  # The second lies across two slots.
    worker.sink.commit(ingest_pb2.CommitSample(sample=1))
    worker.submit(5, slot=5)
    peer.say(welcome=ingest_pb2.Welcome(protocol=1, server_version="fake", window_bytes=1 << 20, nixl=True))
    assert [announce.header.chunk for announce in peer.next("announcements").chunks] == [1, 3, 4]
    assert peer.next("chunk").chunk.chunk == 2
    peer.next("commit")  # Nothing that was said after it goes before it.
    assert [announce.header.chunk for announce in peer.next("announcements").chunks] == [5]


@needs_nixl
def test_chunks_announced_together_leave_room_in_the_window(server: FakeIngest, worker: Worker) -> None:
    peer = server.accept()
    peer.next("hello")
    for number in range(1, 6):
        worker.submit(number, slot=number)
    peer.say(welcome=ingest_pb2.Welcome(protocol=1, server_version="fake", window_bytes=250, nixl=True))
    assert [announce.header.chunk for announce in peer.next("announcements").chunks] == [1, 2]
    peer.ack(1)
    assert [announce.header.chunk for announce in peer.next("announcements").chunks] == [3]


@needs_nixl
def test_a_chunk_across_slots_or_outside_of_them_is_sent(server: FakeIngest, worker: Worker) -> None:
    peer = welcomed(server)
    worker.submit(1, slot=0, at=SLOT_BYTES - 50)
    worker.sink.submit(RowChunk(1, 2, 2, 1, memoryview(b"\2" * 100), 2))
    assert [peer.next("chunk").data for _ in range(2)] == [b"\1" * 100, b"\2" * 100]


@needs_nixl
def test_a_server_that_does_not_take_the_offer_gets_frames(server: FakeIngest, worker: Worker) -> None:
    peer = welcomed(server, nixl=False)
    worker.submit(1)
    assert peer.next("chunk").data == b"\1" * 100
    assert worker.recorder.of(FellBack) == []


@needs_nixl
def test_refused_chunks_follow_as_frames_and_so_does_what_comes_after(server: FakeIngest, worker: Worker) -> None:
    peer = welcomed(server)
    for number in (1, 2, 3):
        worker.submit(number, slot=number)
        peer.next_announced()
    peer.ack(1)
    refuse(peer, 1, 2, 77, 3)
    frames = [peer.next("chunk"), peer.next("chunk")]
    assert [(f.chunk.chunk, f.chunk.xxh3, f.data) for f in frames] == [(2, 2, b"\2" * 100), (3, 3, b"\3" * 100)]
    worker.submit(4)
    assert peer.next("chunk").chunk.chunk == 4
    peer.say(ack=ingest_pb2.Ack(chunks=[2, 3, 4]))
    assert worker.recorder.wait(Acked, 4) == [Acked((1,)), Acked((2,)), Acked((3,)), Acked((4,))]
    assert len(worker.recorder.of(FellBack)) == 1


@needs_nixl
def test_after_a_while_one_chunk_tries_nixl_again(server: FakeIngest, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("slotstream.transport.nixl._now", lambda: clock[0])
    peer = welcomed(server)
    worker.submit(1, slot=1)
    peer.next_announced()
    for pause_s in (5, 10, 20):  # Each try that is refused makes the next pause longer.
        refuse(peer, 1)
        peer.next("chunk")
        clock[0] += pause_s - 0.1
        worker.submit(2, slot=2)
        peer.next("chunk")
        clock[0] += 0.2
        worker.submit(1, slot=1)
        peer.next_announced()
        worker.submit(3, slot=3)
        peer.next("chunk")
    peer.ack(1)
    worker.recorder.wait(Acked)
    worker.submit(4, slot=4)
    worker.submit(5, slot=5)
    assert [peer.next_announced().header.chunk for _ in range(2)] == [4, 5]
    assert len(worker.recorder.of(FellBack)) == 3
    refuse(peer, 4, 5)
    assert [peer.next("chunk").chunk.chunk for _ in range(2)] == [4, 5]
    clock[0] += 5.1  # The pause is short again.
    worker.submit(6, slot=6)
    peer.next_announced()


@needs_nixl
def test_a_new_stream_offers_the_same_memory_again(server: FakeIngest, worker: Worker) -> None:
    peer = server.accept()
    first = peer.next("hello").nixl
    peer.say(welcome=ingest_pb2.Welcome(protocol=1, server_version="fake", window_bytes=1 << 20, nixl=True))
    worker.submit(1, slot=1)
    peer.next_announced()
    peer.end()
    worker.recorder.wait(LinkDown)
    worker.sink.reset()
    peer = server.accept()
    assert peer.next("hello").nixl == first
    worker.submit(2, slot=1)
    peer.say(welcome=ingest_pb2.Welcome(protocol=1, server_version="fake", window_bytes=1 << 20, nixl=True))
    assert peer.next_announced().generation == 2
    worker.recorder.wait(LinkUp, 2)


def test_the_option_chooses_the_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(planes_for("grpc", [HERE])[0], Frames)
    monkeypatch.setattr("slotstream.transport.nixl.has_rdma", lambda: False)
    assert isinstance(planes_for("auto", [THERE])[0], Frames)
    if is_installed():
        assert isinstance(planes_for("auto", ["unix:/run/slotstream.sock"])[0], NixlPlane)
        monkeypatch.setattr("slotstream.transport.nixl.has_rdma", lambda: True)
        assert isinstance(planes_for("auto", [THERE])[0], NixlPlane)
        assert isinstance(planes_for("auto", [HERE])[0], NixlPlane)
        assert isinstance(planes_for("nixl", [THERE])[0], NixlPlane)


def test_without_nixl_auto_means_grpc_and_nixl_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.wire.nixl._PACKAGES", ("a_package_that_nobody_has",))
    assert isinstance(planes_for("auto", [HERE])[0], Frames)
    assert ConnectorOptions().transport == "auto"
    with pytest.raises(ConfigError, match=r"connector option transport is nixl.*pip install 'slotstream\[nixl\]'"):
        ConnectorOptions(transport="nixl")


def test_a_nixl_that_does_not_work_is_refused_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.wire.nixl._PACKAGES", ("json",))  # Found, but no NIXL.
    staging = memoryview(bytearray(SLOT_BYTES))
    with pytest.raises(ConfigError, match="connector option transport is nixl: "):
        planes_for("nixl", [THERE])[0].use_staging(staging, SLOT_BYTES)
    plane = planes_for("auto", [HERE])[0]
    plane.use_staging(staging, SLOT_BYTES)
    assert plane.hello(HELLO) == HELLO
