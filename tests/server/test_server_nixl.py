"""Chunks that a server reads over NIXL: from senders that lie, die, stop, and come back."""

from __future__ import annotations

import asyncio
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from server.server_kit import TIMEOUT_S, Peer, Reader, RunningServer, Sample, batch
from support.descendants import descendants
from support.half_open import HalfOpenRelay
from support.nixl_sender import sample_of
from support.server import ServerProcess
from support.waiting import wait_until

from slotstream.client import connect
from slotstream.server.ingest.sample_writer import SampleWriter
from slotstream.store.sample.upload import Upload
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.hashing import xxh3
from slotstream.wire.names import CHUNK_BYTES_MAX
from slotstream.wire.nixl import ANNOUNCEMENTS_MAX, NixlAgent, is_installed, memory_address

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")

SLOT_BYTES = 1 << 16
SLOTS = 8


class Owner:
    """An agent with memory that it registered, polled by a thread, and what it offers."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, SLOTS * SLOT_BYTES))
        self.address = memory_address(self.memory)
        self._ended = threading.Event()
        self._busy = threading.Lock()
        self._paused = False
        ready: queue.SimpleQueue[pb.NixlOffer] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._own, args=(ready,))
        self._thread.start()
        self.offer = ready.get(timeout=TIMEOUT_S)

    def _own(self, ready: queue.SimpleQueue[pb.NixlOffer]) -> None:
        agent = NixlAgent(lambda line: None)
        metadata = agent.register(self.address, self.memory.nbytes)
        ready.put(pb.NixlOffer(agent=agent.name, metadata=metadata, address=self.address, slot_bytes=SLOT_BYTES, slots=SLOTS))
        while not self._ended.wait(0.001):
            with self._busy:
                agent.progress()

    def pause(self) -> None:
        """Take part in nothing; returns once that is so."""
        self._busy.acquire()
        self._paused = True

    def go_on(self) -> None:
        if self._paused:
            self._paused = False
            self._busy.release()

    def close(self) -> None:
        self.go_on()
        self._ended.set()
        self._thread.join()

    def announce(self, sample: Sample, number: int, chunk: int, start: int, stop: int, slot: int = 0) -> pb.IngestRequest:
        """Stage rows [start, stop) in a slot, and say so."""
        data = sample.part(start, stop)
        self.memory[slot * SLOT_BYTES :][: len(data)] = data
        header = pb.ChunkHeader(sample=number, chunk=chunk, first_row=start, rows=stop - start, xxh3=xxh3(data))
        address = self.address + slot * SLOT_BYTES
        announce = pb.Announce(header=header, slot=slot, generation=chunk, address=address, length=len(data))
        return pb.IngestRequest(announcements=pb.Announcements(chunks=[announce]))


def chunk_of(request: pb.IngestRequest) -> pb.Announce:
    """The one chunk that a request announces."""
    (announce,) = request.announcements.chunks
    return announce


def announce_again_and_again(peer: Peer, owner: Owner, sample: Sample) -> None:
    """Say that all 256 rows of sample 1 are there, 80 times: 640 chunks, more than the smallest pool has slots for."""
    requests = [owner.announce(sample, 1, 1 + at, at * 32, (at + 1) * 32, slot=at) for at in range(8)]
    for again in range(80):
        for at, request in enumerate(requests):
            announce = chunk_of(request)
            announce.header.chunk = announce.generation = 1 + at + 8 * again
            peer.say(request)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


def greeted(address: str, offer: pb.NixlOffer) -> Peer:
    """A stream that has offered NIXL."""
    peer = Peer(address, greet=False)
    peer.say(pb.IngestRequest(hello=pb.Hello(protocol=1, engine_id="test", nixl=offer)))
    peer.welcome = peer.hear().welcome
    return peer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for all peers that it hangs up on."""
    with RunningServer(tmp_path_factory.mktemp("data"), transport="auto") as server:
        yield server


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    with RunningServer(tmp_path / "data", transport="auto") as server:
        yield server


@pytest.fixture
def offering(running: RunningServer, owner: Owner) -> Iterator[Peer]:
    with greeted(running.address, owner.offer) as peer:
        assert peer.welcome.nixl
        yield peer


def test_the_reader_starts_with_the_server(running: RunningServer) -> None:
    """A first sender need not wait until NIXL is loaded."""
    readers = running.server._ingest._shared.readers
    assert readers is not None
    processes = [reader._reader for reader in readers._readers]
    for process in processes:
        assert process is not None
        process.ready.result(30.0)


# What is announced is read, in order, and counts like what was sent.


def test_announced_and_sent_chunks_make_one_sample(
    running: RunningServer, offering: Peer, owner: Owner, reader: Reader
) -> None:
    sample = Sample(rows=40)
    offering.say(sample.open(1), owner.announce(sample, 1, 1, 0, 16), sample.chunk(1, 2, 16, 32))
    offering.say(owner.announce(sample, 1, 3, 32, 40, slot=1), sample.commit(1))
    assert offering.acks(3) == [1, 2, 3]
    offering.committed()
    assert reader.read("s")[1] == sample.data
    assert running.metric("chunks_total", transport="nixl") == 2
    assert running.metric("chunks_total", transport="grpc") == 1


def test_a_wrong_hash_fails_the_sample(offering: Peer, owner: Owner) -> None:
    sample = Sample(rows=8)
    announce = owner.announce(sample, 1, 1, 0, 8)
    chunk_of(announce).header.xxh3 ^= 1
    offering.say(sample.open(1), announce, sample.commit(1))
    assert offering.failed().code == "HASH_MISMATCH"


def test_a_half_closed_stream_still_gets_its_committed_samples(offering: Peer, owner: Owner, reader: Reader) -> None:
    whole, cut = Sample("whole", rows=8), Sample("cut", rows=8)
    offering.say(whole.open(1), owner.announce(whole, 1, 1, 0, 8), whole.commit(1))
    offering.say(cut.open(2), owner.announce(cut, 2, 2, 0, 4, slot=1))
    offering.half_close()
    verdicts = [offering.hear_until("committed", "failed") for _ in range(2)]
    assert {v.WhichOneof("kind"): getattr(v, v.WhichOneof("kind") or "").sample for v in verdicts} == {
        "committed": 1,
        "failed": 2,
    }
    assert reader.read("whole")[1] == whole.data


def test_chunks_announced_together_are_read_like_those_announced_alone(
    running: RunningServer, offering: Peer, owner: Owner, reader: Reader
) -> None:
    samples = [Sample(f"together-{number}", rows=24, seed=number) for number in (1, 2)]
    chunks = [
        chunk_of(owner.announce(sample, number, number * 3 + part, part * 8, part * 8 + 8, slot=number * 3 + part - 3))
        for number, sample in enumerate(samples, 1)
        for part in range(3)
    ]
    offering.say(*(sample.open(number) for number, sample in enumerate(samples, 1)))
    before = running.metric("chunks_total", transport="nixl")
    offering.say(pb.IngestRequest(announcements=pb.Announcements(chunks=chunks)))
    offering.say(*(sample.commit(number) for number, sample in enumerate(samples, 1)))
    for _ in samples:
        offering.committed()
    assert running.metric("chunks_total", transport="nixl") == before + 6
    for sample in samples:
        assert reader.read(sample.sample_id)[1] == sample.data


@pytest.mark.parametrize("count", [0, ANNOUNCEMENTS_MAX + 1])
def test_so_many_chunks_at_a_time_are_a_violation(shared: RunningServer, owner: Owner, count: int) -> None:
    sample = Sample(rows=8)
    announce = chunk_of(owner.announce(sample, 1, 1, 0, 8))
    with greeted(shared.address, owner.offer) as peer:
        peer.say(sample.open(1), pb.IngestRequest(announcements=pb.Announcements(chunks=[announce] * count)))
        assert peer.ending()[1] == "PROTOCOL"


@pytest.mark.parametrize("split", [False, True], ids=["one announcement", "a batch of two"])
def test_more_at_a_time_than_the_window_holds_is_a_violation(tmp_path: Path, owner: Owner, split: bool) -> None:
    sample = Sample(rows=8)
    chunks = []
    for number in range(1, CHUNK_BYTES_MAX // SLOT_BYTES + 2):
        announce = chunk_of(owner.announce(sample, 1, number, 0, 8))
        announce.length = SLOT_BYTES
        chunks.append(announce)
    small: dict[str, Any] = {"window_bytes": CHUNK_BYTES_MAX, "ingest_bytes_max": CHUNK_BYTES_MAX}
    with RunningServer(tmp_path, transport="auto", **small) as running, greeted(running.address, owner.offer) as peer:
        parts = (chunks[:1], chunks[1:]) if split else (chunks,)
        said = [pb.IngestRequest(announcements=pb.Announcements(chunks=part)) for part in parts]
        peer.say(sample.open(1), batch(*said) if split else said[0])
        assert peer.ending()[1] == "PROTOCOL"


def test_chunks_that_arrive_together_leave_the_event_loop_to_others(
    tmp_path: Path, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes them itself where there are few cores."""
    monkeypatch.setattr("slotstream.server.disk_threads.for_cores", lambda most: 1)
    monkeypatch.setattr("slotstream.server.ingest.open_samples._TURN_BYTES", 1)
    turns: list[int] = []
    turn = 0
    write_chunk = Upload.write_chunk

    def noted(*arguments: Any) -> None:
        def turned() -> None:
            nonlocal turn
            turn += 1

        turns.append(turn)
        asyncio.get_running_loop().call_soon(turned)
        write_chunk(*arguments)

    opened = threading.Event()
    run = SampleWriter._run

    def noted_run(writer: SampleWriter) -> None:
        run(writer)
        opened.set()  # A chunk that comes before this is written by the thread that opened the sample.

    monkeypatch.setattr(Upload, "write_chunk", noted)
    monkeypatch.setattr(SampleWriter, "_run", noted_run)
    sample = Sample(rows=SLOTS)
    together = [chunk_of(owner.announce(sample, 1, 1 + row, row, row + 1, slot=row)) for row in range(SLOTS)]
    with RunningServer(tmp_path, transport="auto") as server, greeted(server.address, owner.offer) as peer:
        peer.say(sample.open(1))
        assert opened.wait(TIMEOUT_S)
        peer.say(pb.IngestRequest(announcements=pb.Announcements(chunks=together)), sample.commit(1))
        assert peer.acks(SLOTS) == list(range(1, SLOTS + 1))
        peer.committed()
    assert len(turns) == SLOTS
    assert len(set(turns)) >= SLOTS - 2  # A frame that arrives, or a look at what is done, takes one more in a turn.


def test_read_requests_wait_for_slots(tmp_path: Path, owner: Owner) -> None:
    """Far more chunks than the pool has slots, all at once."""
    sample = Sample(rows=256)
    with (
        RunningServer(tmp_path, transport="auto", nixl_pool_bytes=32 << 20) as running,
        greeted(running.address, owner.offer) as peer,
    ):
        peer.say(sample.open(1))
        announce_again_and_again(peer, owner, sample)
        peer.say(sample.commit(1))
        assert peer.acks(640) == list(range(1, 641))
        peer.committed()


def test_reads_that_wait_for_a_slow_disk_are_no_fault_of_nixl(
    tmp_path: Path, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are all with the server for longer than a read may take, and than a reader may be silent."""
    monkeypatch.setattr("slotstream.server.disk_threads.for_cores", lambda most: most)  # Threads write, not the event loop.
    monkeypatch.setattr("slotstream.server.nixl.reader.READ_S", 0.3)
    monkeypatch.setattr("slotstream.server.nixl.reader._STUCK_S", 1.5)
    written = threading.Event()
    write_chunk = Upload.write_chunk

    def late(*arguments: Any) -> None:
        assert written.wait(TIMEOUT_S)
        write_chunk(*arguments)

    monkeypatch.setattr(Upload, "write_chunk", late)
    sample = Sample(rows=256)
    with (
        RunningServer(tmp_path, transport="auto", nixl_pool_bytes=32 << 20) as running,
        greeted(running.address, owner.offer) as peer,
    ):
        peer.say(sample.open(1))
        announce_again_and_again(peer, owner, sample)
        peer.say(sample.commit(1))
        time.sleep(4.0)
        written.set()
        assert peer.acks(640) == list(range(1, 641))
        peer.committed()
    assert running.metric("nixl_fallbacks_total") == 0
    assert running.metric("nixl_reader_deaths_total") == 0


# What cannot be read is asked for again, and waited for.


def test_unreadable_memory_is_asked_for_in_frames(running: RunningServer, owner: Owner, reader: Reader) -> None:
    """The offer names slots that the agent never registered."""
    owner.offer.slots += 1
    sample = Sample(rows=16)
    with greeted(running.address, owner.offer) as peer:
        announce = owner.announce(sample, 1, 1, 0, 8)
        chunk_of(announce).slot = SLOTS
        chunk_of(announce).address = owner.address + SLOTS * SLOT_BYTES
        peer.say(sample.open(1), announce, sample.commit(1))
        assert peer.hear_until("resend", "failed", "committed").resend.chunks == [1]
        peer.say(sample.chunk(1, 2, 8, 16))
        assert peer.acks(1) == [2]  # And the commit waits on.
        peer.say(sample.chunk(1, 1, 0, 8))
        assert peer.acks(1) == [1]
        peer.committed()
        assert reader.read("s")[1] == sample.data
        other = Sample("other", rows=8)
        peer.say(other.open(2), owner.announce(other, 2, 3, 0, 8), other.commit(2))
        peer.committed()  # Read over NIXL again.
    assert running.metric("nixl_fallbacks_total") == 1
    assert running.metric("chunks_total", transport="nixl") == 1
    wait_until(lambda: running.metric("held_bytes") == 0)


def test_an_abort_waits_no_longer_than_its_chunks(running: RunningServer, owner: Owner) -> None:
    owner.offer.slots += 1
    sample = Sample(rows=16)
    with greeted(running.address, owner.offer) as peer:
        announce = owner.announce(sample, 1, 1, 0, 8)
        chunk_of(announce).slot = SLOTS
        chunk_of(announce).address = owner.address + SLOTS * SLOT_BYTES
        peer.say(sample.open(1), announce, pb.IngestRequest(abort=pb.AbortSample(sample=1, code="BAD_ROWS", message="m")))
        assert peer.hear_until("resend").resend.chunks == [1]
        peer.say(sample.chunk(1, 1, 0, 8))
        assert peer.failed().code == "BAD_ROWS"


@pytest.mark.parametrize("asked", [False, True], ids=["before it is asked for again", "after"])
def test_a_stream_that_ends_while_a_chunk_is_awaited_fails_its_sample(
    running: RunningServer, owner: Owner, asked: bool
) -> None:
    owner.offer.slots += 1
    sample = Sample(rows=16)
    with greeted(running.address, owner.offer) as peer:
        announce = owner.announce(sample, 1, 1, 0, 8)
        chunk_of(announce).slot = SLOTS
        chunk_of(announce).address = owner.address + SLOTS * SLOT_BYTES
        peer.say(sample.open(1), announce, sample.commit(1))
        if asked:
            peer.hear_until("resend")
        peer.half_close()
        assert peer.failed().code == "INTERRUPTED"
    wait_until(lambda: running.metric("open_samples") == 0)
    wait_until(lambda: running.metric("held_bytes") == 0)


# Offers and announcements that cannot be meant.


def test_a_server_told_to_use_grpc_takes_no_offer(tmp_path: Path, owner: Owner) -> None:
    with RunningServer(tmp_path, transport="grpc") as running, greeted(running.address, owner.offer) as peer:
        assert not peer.welcome.nixl
        peer.put(Sample(), 1)


def test_an_announcement_without_an_offer_is_a_violation(peer: Peer, owner: Owner) -> None:
    sample = Sample(rows=8)
    peer.say(sample.open(1), owner.announce(sample, 1, 1, 0, 8))
    assert peer.ending()[1] == "PROTOCOL"


@pytest.mark.parametrize(
    "changes",
    [
        {"agent": ""},
        {"agent": "x" * 129},
        {"metadata": b""},
        {"metadata": b"x" * (65 << 10)},
        {"slots": 0},
        {"slots": 1 << 21},
        {"slot_bytes": 0},
        {"slot_bytes": 1 << 62},
        {"address": 0},
        {"address": (1 << 64) - 1},
    ],
    ids=str,
)
def test_an_offer_that_cannot_be_is_a_violation(shared: RunningServer, owner: Owner, changes: dict[str, Any]) -> None:
    offer = pb.NixlOffer()
    offer.CopyFrom(owner.offer)
    for name, value in changes.items():
        setattr(offer, name, value)
    with Peer(shared.address, greet=False) as peer:
        peer.say(pb.IngestRequest(hello=pb.Hello(protocol=1, nixl=offer)))
        assert peer.ending()[1] == "PROTOCOL"


@pytest.mark.parametrize(
    "changes",
    [
        {"slot": SLOTS},
        {"slot": (1 << 32) - 1},
        {"address": 4096},
        {"address": "below"},
        {"address": "above"},
        {"length": 0},
        {"length": SLOT_BYTES + 1},
        {"length": (1 << 32) - 1},
        {"generation": 0},
    ],
    ids=str,
)
def test_an_announcement_outside_of_the_offer_is_a_violation(
    shared: RunningServer, owner: Owner, changes: dict[str, Any]
) -> None:
    sample = Sample(rows=8)
    request = owner.announce(sample, 1, 1, 0, 8)
    named = {"below": owner.address - 1, "above": owner.address + SLOT_BYTES - chunk_of(request).length + 1}
    for name, value in changes.items():
        setattr(chunk_of(request), name, named.get(value, value))
    with greeted(shared.address, owner.offer) as peer:
        peer.say(sample.open(1), request)
        assert peer.ending()[1] == "PROTOCOL"


def test_an_old_generation_is_a_violation(shared: RunningServer, owner: Owner) -> None:
    sample = Sample(rows=16)
    with greeted(shared.address, owner.offer) as peer:
        peer.say(sample.open(1), owner.announce(sample, 1, 2, 0, 8), owner.announce(sample, 1, 1, 8, 16))
        assert peer.ending()[1] == "PROTOCOL"


def test_a_chunk_announced_twice_in_a_message_is_a_violation(shared: RunningServer, owner: Owner) -> None:
    """What was right before it is dropped."""
    sample = Sample(rows=16)
    twice = [chunk_of(owner.announce(sample, 1, 1, 0, 8, slot=slot)) for slot in (0, 1)]
    with greeted(shared.address, owner.offer) as peer:
        peer.say(sample.open(1), pb.IngestRequest(announcements=pb.Announcements(chunks=twice)))
        assert peer.ending()[1] == "PROTOCOL"
    wait_until(lambda: shared.metric("held_bytes") == shared.metric("open_samples") == 0)


@pytest.mark.parametrize("cut", ["half", "noise", "another's name"])
def test_metadata_that_is_wrong_is_not_taken(shared: RunningServer, owner: Owner, cut: str) -> None:
    offer = pb.NixlOffer()
    offer.CopyFrom(owner.offer)
    if cut == "half":
        offer.metadata = offer.metadata[: len(offer.metadata) // 2]
    elif cut == "noise":
        offer.metadata = os.urandom(400)
    else:
        offer.agent = "slotstream-somebody-else"
    with greeted(shared.address, offer) as peer:
        assert not peer.welcome.nixl
        peer.put(Sample(cut.replace(" ", "-").replace("'", "")), 1)
    with greeted(shared.address, owner.offer) as peer:
        assert peer.welcome.nixl


# A sender that begins again before the server knows that its old stream is over.


def test_a_sender_that_is_back_gets_nixl_while_its_old_stream_is_still_there(
    running: RunningServer, offering: Peer, owner: Owner, reader: Reader
) -> None:
    old, new, last = (Sample(name, rows=8, seed=seed) for seed, name in enumerate(("old", "new", "last")))
    offering.say(old.open(1), owner.announce(old, 1, 1, 0, 4))
    assert offering.acks(1) == [1]
    with greeted(running.address, owner.offer) as again:
        assert again.welcome.nixl
        again.say(new.open(1), owner.announce(new, 1, 2, 0, 8, slot=1), new.commit(1))
        again.committed()
        offering.say(owner.announce(old, 1, 3, 4, 8, slot=2), old.commit(1))  # Whoever it is, nobody is in its way.
        offering.committed()
        offering.close()
        wait_until(lambda: running.metric("ingest_streams") == 1)
        again.say(last.open(2), owner.announce(last, 2, 4, 0, 8, slot=3), last.commit(2))
        again.committed()
    assert [reader.read(sample.sample_id)[1] for sample in (old, new, last)] == [old.data, new.data, last.data]
    assert running.metric("chunks_total", transport="nixl") == 4
    assert running.metric("nixl_fallbacks_total") == 0


def test_a_name_that_is_connected_is_not_taken_with_other_metadata(
    running: RunningServer, offering: Peer, owner: Owner
) -> None:
    offer = pb.NixlOffer()
    offer.CopyFrom(owner.offer)
    offer.metadata += b"x"
    with greeted(running.address, offer) as impostor:
        assert not impostor.welcome.nixl
    sample = Sample(rows=8)
    offering.say(sample.open(1), owner.announce(sample, 1, 1, 0, 8), sample.commit(1))
    offering.committed()
    assert running.metric("chunks_total", transport="nixl") == 1


def test_a_sender_that_is_back_reads_on_once_the_transfers_of_its_old_stream_are_over(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP its side has to take part: what it was asked for while it did not is neither read nor failed."""
    monkeypatch.setattr("slotstream.server.nixl.reader.READ_S", 0.5)
    monkeypatch.setenv("UCX_TLS", "tcp")
    owner, sample = Owner(), Sample(rows=8)
    try:
        with greeted(running.address, owner.offer) as old:
            old.say(sample.open(1), owner.announce(sample, 1, 1, 0, 4))
            assert old.acks(1) == [1]
            owner.pause()
            old.say(owner.announce(sample, 1, 2, 4, 8))
            wait_until(lambda: running.metric("nixl_quarantined_slots") == 1)
        with greeted(running.address, owner.offer) as again:
            assert again.welcome.nixl
            again.say(sample.open(1), owner.announce(sample, 1, 3, 0, 8, slot=1))
            assert again.hear_until("resend").resend.chunks == [3]
            again.say(sample.chunk(1, 3, 0, 8), sample.commit(1))
            again.committed()
            owner.go_on()
            wait_until(lambda: running.metric("nixl_quarantined_slots") == 0)
            other = Sample("other", rows=8)
            again.say(other.open(2), owner.announce(other, 2, 4, 0, 8, slot=2), other.commit(2))
            again.committed()
        assert running.metric("chunks_total", transport="nixl") == 2
    finally:
        owner.close()


def test_a_connector_that_is_back_before_the_server_noticed_sends_over_nixl(running: RunningServer) -> None:
    with HalfOpenRelay(running.address) as relay, SenderProcess(relay.address, "back") as sender:
        sender.wait("committed", 10)
        relay.hang_up()
        sender.wait("down")
        sender.wait("up")
        assert running.metric("ingest_streams") == 2
        sender.wait("committed", 20)
        assert running.metric("ingest_streams") == 2
        sender.finish()
        assert not sender.failed
        assert "fell-back" not in sender.said
        assert running.metric("chunks_total", transport="grpc") == 0
        assert_stored(running.address, "back", sender)


# Processes that stop and die.


class SenderProcess:
    """`support.nixl_sender` in a process of its own."""

    def __init__(self, address: str, namespace: str, **environment: str) -> None:
        script = Path(__file__).parents[1] / "support" / "nixl_sender.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), address, namespace],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.committed: list[int] = []
        self.failed: list[str] = []
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def hear(self) -> str:
        line = self._lines.get(timeout=TIMEOUT_S)
        assert line, f"the sender is gone; it said {self.said}"
        kind, *rest = line.split()
        if kind == "committed":
            self.committed.append(int(rest[0]))
        elif kind == "failed":
            self.failed.append(rest[1])
        else:
            self.said.append(kind)
        return kind

    def wait(self, kind: str, count: int = 1) -> None:
        """`count` more of this kind."""
        while count:
            count -= self.hear() == kind

    def finish(self) -> None:
        """Let it end what it has, and hear of it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.wait("end")
        assert self.process.wait(TIMEOUT_S) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()


def readers_of(server: int) -> list[int]:
    """The processes that read for a server."""
    return sorted(descendants(server, "slotstream.server.nixl.reader_process"))


def assert_stored(address: str, namespace: str, sender: SenderProcess) -> None:
    """Everything that the sender was told is stored is, exactly."""
    expected = [sample_of(seed, namespace).rows() for seed in range(2)]
    with connect(address) as client:
        for number in sender.committed:
            with client.read(f"s-{number}", namespace=namespace) as rows:
                assert b"".join(block.data for block in rows) == expected[number % 2]


@pytest.mark.parametrize("readers", [1, 3])
def test_a_reader_that_is_killed_loses_nothing(tmp_path: Path, readers: int) -> None:
    with ServerProcess(tmp_path, "--metrics", "127.0.0.1:0", "--nixl-readers", str(readers), transport="auto") as server:
        with SenderProcess(server.address, "killed") as sender:
            sender.wait("committed", 10)
            running = readers_of(server.process.pid)
            assert len(running) == readers
            os.kill(running[0], signal.SIGKILL)
            sender.wait("committed", 50)
            sender.finish()
            assert not sender.failed
            assert sender.said.count("up") == 1  # On the same stream all the while.
            assert server.metric("slotstream_nixl_reader_deaths_total") == 1
            assert_stored(server.address, "killed", sender)
        with SenderProcess(server.address, "after") as sender:
            read = server.metric("slotstream_chunks_total", transport="nixl")
            sender.wait("committed", 10)
            sender.finish()
            assert server.metric("slotstream_chunks_total", transport="nixl") - read == 2 * len(sender.committed)


@pytest.mark.extended
def test_a_server_that_is_stopped_for_a_while_loses_nothing(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, transport="auto") as server, SenderProcess(server.address, "stopped") as sender:
        sender.wait("committed", 10)
        readers = readers_of(server.process.pid)
        for pid in (server.process.pid, *readers):
            os.kill(pid, signal.SIGSTOP)
        for pid in (server.process.pid, *readers):
            wait_until(lambda pid=pid: " T " in Path(f"/proc/{pid}/stat").read_text())  # type: ignore[misc]
        seen = len(sender.committed)
        for pid in (*readers, server.process.pid):
            os.kill(pid, signal.SIGCONT)
        sender.wait("committed", 20)
        sender.finish()
        assert len(sender.committed) >= seen + 20
        assert not sender.failed
        assert sender.said == ["up", "end"]
        assert_stored(server.address, "stopped", sender)


@pytest.mark.extended
def test_a_server_that_is_killed_and_started_again_reads_over_nixl_again(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, transport="auto") as server, SenderProcess(server.address, "again") as sender:
        sender.wait("committed", 10)
        readers = readers_of(server.process.pid)
        server.stop(signal.SIGKILL)
        sender.wait("down")
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in readers))  # They end with their server.
        with ServerProcess(tmp_path, "--metrics", "127.0.0.1:0", address=server.address, transport="auto") as fresh:
            sender.wait("up")
            sender.wait("committed", 20)
            sender.finish()
            assert fresh.metric("slotstream_chunks_total", transport="nixl") > 20
            assert fresh.metric("slotstream_chunks_total", transport="grpc") == 0
            assert_stored(fresh.address, "again", sender)


@pytest.mark.extended
def test_a_sender_that_is_killed_takes_only_its_own_samples_with_it(running: RunningServer) -> None:
    for attempt in range(3):
        with SenderProcess(running.address, f"victim-{attempt}", UCX_TLS="tcp") as sender:
            sender.wait("committed", 5)
    with SenderProcess(running.address, "survivor") as sender:
        sender.wait("committed", 20)
        sender.finish()
        assert not sender.failed
        assert_stored(running.address, "survivor", sender)
    wait_until(lambda: running.metric("open_samples") == running.metric("held_bytes") == 0)
    wait_until(lambda: running.metric("nixl_quarantined_slots") == 0)
    shared = running.server._ingest._shared.readers
    assert shared is not None
    readers = [reader._reader for reader in shared._readers]
    # What nobody waits for would count as a sign that the reader hangs.
    assert not any(reader.requests for reader in readers if reader is not None)


def test_a_stopped_sender_is_given_up_and_goes_on_when_it_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP a stopped process answers nothing, and fails nothing: the deadline is all there is."""
    monkeypatch.setattr("slotstream.server.nixl.reader.READ_S", 0.5)
    monkeypatch.setenv("UCX_TLS", "tcp")
    with RunningServer(tmp_path, transport="auto") as running, SenderProcess(running.address, "tcp") as sender:
        sender.wait("committed", 10)
        while not running.metric("nixl_quarantined_slots"):  # Nothing was to be read just then: stop it at another moment.
            os.kill(sender.process.pid, signal.SIGCONT)
            time.sleep(0.05)
            os.kill(sender.process.pid, signal.SIGSTOP)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and not running.metric("nixl_quarantined_slots"):
                time.sleep(0.05)
        assert running.metric("nixl_timeouts_total") > 0
        with SenderProcess(running.address, "beside") as other:
            other.wait("committed", 10)
            other.finish()
            assert "fell-back" not in other.said
        os.kill(sender.process.pid, signal.SIGCONT)
        sender.wait("fell-back")
        sender.wait("committed", 10)
        sender.finish()
        assert not sender.failed
        wait_until(lambda: running.metric("nixl_quarantined_slots") == 0)
        assert_stored(running.address, "tcp", sender)
        assert_stored(running.address, "beside", other)
