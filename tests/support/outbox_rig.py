"""An outbox without threads: an engine, a disk and a server that do one thing at a time, and know what they promised."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slotstream.connector.counters import Counters
from slotstream.connector.faults import Faults
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.plan import SampleOpen
from slotstream.connector.sending.lane import Lane
from slotstream.connector.sending.outbox import Outbox
from slotstream.connector.sending.phases import Phase
from slotstream.connector.sending.sample_state import ChunkState, SampleState
from slotstream.connector.sending.spool import files as spool_files
from slotstream.connector.sending.spool.disk_thread import Adopted, Appended, Loaded, ReadBack
from slotstream.connector.sending.spool.files import OwnedDir, SpooledSample, SpoolFile
from slotstream.connector.sending.spool.reader import SpoolReader
from slotstream.connector.sending.spool.writer import SpoolWriter
from slotstream.connector.sending.staging_pool import StagingPool, StagingShape
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.base import Committed, Failed, RowChunk, SinkEvent
from slotstream.v1 import ingest_pb2
from slotstream.wire.columns import RowFormat
from slotstream.wire.hashing import xxh3
from support.hand_disk import HandDisk

ROW_BYTES = 16
_HALF_ROW_BYTES = 8
_SLOTS, _RESERVED = 8, 2
_SPOOL_BYTES = 2500
_SAMPLE_BYTES = 700  # About what one takes there at most.
_PATIENCE_S = 5.0  # How long an engine waits for a failure to be written before it hears of it.
# With these a sample may fail that lost rows because their room was needed: what the server or the link said then.
_ROBBED = {"INTERRUPTED", "STORE_FULL", "IO_ERROR", "SERVER_DRAINING", "UNAUTHENTICATED"}


@dataclass(eq=False)
class Promise:
    """A sample that some engine promised. `codes`: with which it may fail, as things went. `owed`: somebody has to say."""

    sample_id: str
    serial: int
    row_bytes: int
    rows: int = 0
    codes: set[str] = field(default_factory=set)
    aborted: bool = False
    rotten: bool = False
    owed: bool = True
    state: SampleState | None = None  # Of the engine that captures it, while that lives.

    def may_fail(self, *codes: str) -> None:
        self.codes.update(codes)

    def data(self, first_row: int, rows: int) -> bytes:
        packed = [struct.pack("<II", self.serial, row) * 2 for row in range(first_row, first_row + rows)]
        return b"".join(row[: self.row_bytes] for row in packed)

    def check_failure(self, code: str) -> None:
        assert self.rotten or code in self.codes, f"{self.sample_id} failed with {code}; only {self.codes} would be right"


@dataclass
class Upload:
    """A sample on the stream, as the server has it."""

    promise: Promise
    opened: ingest_pb2.OpenSample
    chunks: list[RowChunk] = field(default_factory=list)
    ending: ingest_pb2.CommitSample | ingest_pb2.AbortSample | None = None


class Server:
    """What is behind the streams of one connector. It outlives engines. `stored` and `failed`: what it says for good."""

    def __init__(self, promises: dict[str, Promise], lanes: int = 1) -> None:
        self.stored: dict[str, bytes] = {}
        self.failed: dict[str, str] = {}
        self.streams = [Stream(index, promises, self.stored, self.failed) for index in range(lanes)]

    @property
    def up(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.up]

    @property
    def down(self) -> list[Stream]:
        return [stream for stream in self.streams if not stream.up]

    @property
    def in_flight(self) -> list[tuple[Stream, int]]:
        """Chunks that were not acked."""
        return [(stream, number) for stream in self.streams for number in stream.in_flight]

    @property
    def uploads(self) -> list[tuple[Stream, int]]:
        """Samples without a verdict."""
        return [(stream, number) for stream in self.streams for number in stream.uploads]

    @property
    def answerable(self) -> list[tuple[Stream, int]]:
        """Samples that wait for their verdict."""
        return [(stream, number) for stream in self.streams for number in stream.answerable]

    @property
    def ended(self) -> list[tuple[Stream, int]]:
        """Samples of these streams that have their verdict."""
        return [(stream, number) for stream in self.streams for number in stream.ended]


class Stream:
    """A `SampleSink` and what the server has of it, which holds each engine to the protocol.

    `uploads`: samples without a verdict, by number. `in_flight`: chunks that were not acked, by number.
    """

    def __init__(self, index: int, promises: dict[str, Promise], stored: dict[str, bytes], failed: dict[str, str]) -> None:
        self.index = index
        self._promises = promises
        self.stored, self.failed = stored, failed
        self.up = False
        self.resets = 0
        self.uploads: dict[int, Upload] = {}
        self.in_flight: dict[int, RowChunk] = {}
        self._of_stream: dict[int, Promise] = {}

    # The sink.

    def use_staging(self, memory: memoryview, slot_bytes: int) -> None:
        return

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        return

    def open_sample(self, request: ingest_pb2.OpenSample) -> None:
        assert self.up, "opened without a link"
        assert request.sample not in self._of_stream, "a number used twice"
        promise = self._of_stream[request.sample] = self._promises[request.sample_id]
        self.uploads[request.sample] = Upload(promise, request)

    def submit(self, chunk: RowChunk) -> None:
        upload = self._upload(chunk.sample)
        assert upload.ending is None, "rows after the commit or the abort"
        assert chunk.chunk not in self.in_flight, "a chunk's number used twice"
        assert chunk.xxh3 == xxh3(chunk.buffer), "a hash of other rows"
        upload.chunks.append(chunk)
        self.in_flight[chunk.chunk] = chunk

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        upload = self._upload(request.sample)
        assert upload.ending is None, "ended twice"
        sent = sorted(row for chunk in upload.chunks for row in range(chunk.first_row, chunk.first_row + chunk.rows))
        assert sent == list(range(upload.promise.rows)), "the commit of a sample that was not sent whole"
        assert (request.row_count, list(request.token_ids)) == (upload.promise.rows, sent)
        upload.ending = request

    def abort(self, request: ingest_pb2.AbortSample) -> None:
        upload = self._upload(request.sample)
        assert upload.ending is None, "ended twice"
        upload.ending = request

    def _upload(self, number: int) -> Upload:
        assert self.up, "sent without a link"
        assert number in self.uploads, "sent after the verdict"
        return self.uploads[number]

    def report(self, report: ingest_pb2.EngineReport) -> None:
        return

    def check_deadlines(self) -> None:
        return

    def reset(self) -> None:
        assert not self.up, "reset while the link is up"
        self.resets += 1

    def close(self, timeout_s: float) -> None:
        return

    # What a test has it do.

    @property
    def answerable(self) -> list[int]:
        """Samples that wait for their verdict."""
        return [number for number, upload in self.uploads.items() if upload.ending is not None]

    def ack(self, number: int) -> int:
        """Take a chunk: its rows must still be what they were."""
        chunk = self.in_flight.pop(number)
        self._check(chunk)
        return number

    def _check(self, chunk: RowChunk) -> None:
        promise = self._of_stream[chunk.sample]
        assert bytes(chunk.buffer) == promise.data(chunk.first_row, chunk.rows), "rows changed under the server's eyes"

    def answer(self, number: int) -> Committed | Failed:
        """Store a sample, or take its abort."""
        upload = self.uploads.pop(number)
        if isinstance(upload.ending, ingest_pb2.CommitSample):
            return Committed(number, self._store(upload))
        assert upload.ending is not None
        code = upload.ending.code
        if code == "IO_ERROR" and not upload.promise.aborted:  # Its engine cannot read its rows now, and sends it again.
            return Failed(number, code, upload.ending.message)
        upload.promise.check_failure(code)
        self.failed[upload.promise.sample_id] = code
        return Failed(number, code, upload.ending.message)

    def _store(self, upload: Upload) -> bool:
        """Take what is in flight of a sample and make it durable; whether it was already."""
        promise = upload.promise
        for chunk in upload.chunks:
            if chunk.chunk in self.in_flight:
                self._check(chunk)
        assert not promise.aborted, "an aborted sample was committed"
        duplicate = promise.sample_id in self.stored
        self.stored[promise.sample_id] = promise.data(0, promise.rows)
        return duplicate

    def refuse(self, number: int, code: str, *, for_good: bool) -> Failed:
        """Fail a sample in any state."""
        upload = self.uploads.pop(number)
        promise, ending = upload.promise, upload.ending
        if for_good:
            promise.may_fail(code)
        if for_good or (isinstance(ending, ingest_pb2.AbortSample) and ending.code == code):  # As if it had taken the abort.
            self.failed[promise.sample_id] = code
        return Failed(number, code, "the server will not have it")

    @property
    def ended(self) -> list[int]:
        """Samples of this stream that have their verdict."""
        return [number for number in self._of_stream if number not in self.uploads]

    def lose_link(self, *, stores: bool) -> None:
        """The stream is over. `stores`: what was whole is durable all the same."""
        for upload in self.uploads.values():
            if stores and isinstance(upload.ending, ingest_pb2.CommitSample):
                self._store(upload)
        self.up = False
        self.resets = 0
        self.uploads.clear()
        self.in_flight.clear()
        self._of_stream.clear()


class Engine:
    """An outbox over staging of 8 slots of `slot_rows` rows each (0: of half a row), and what it promised."""

    def __init__(self, base: Path | None, slot_rows: int, server: Server, promises: dict[str, Promise]) -> None:
        slot_bytes = slot_rows * ROW_BYTES or _HALF_ROW_BYTES
        self._row_bytes = min(ROW_BYTES, slot_bytes)
        shape = StagingShape(_SLOTS, _RESERVED if base is not None else 0, slot_bytes, self._row_bytes)
        self.pool = StagingPool(memoryview(bytearray(shape.nbytes)), shape)
        self._base = base
        self._promises = promises
        self._server = server
        self._counters = Counters()
        self._faults = Faults(self._counters)
        self._disk = HandDisk(base, _SPOOL_BYTES, self._counters) if base is not None else None
        self._now = 0.0
        self._reader = SpoolReader(self._disk, self.pool)
        self.outbox = Outbox(
            ConnectorConfig(ConnectorOptions(), "engine", "model", (1,), RowFormat.of("BF16", 1, self._row_bytes // 2), {}),
            self.pool,
            server.streams,
            SpoolWriter(self._disk, self.pool, lambda: self._now),
            self._reader,
            self._counters,
            self._faults,
            self._ended,
            lambda action, sample: action(sample),  # A bug is to be seen, and not to be got over.
            lambda: self._now,
        )
        self.promised: list[str] = []
        self.ends: Counter[str] = Counter()
        self._refused = False  # At some time the disk refused something.
        self._calm_at = 0.0  # When it had nothing to do.
        self._hearing: Committed | Failed | None = None
        self._committed: set[str] = set()
        self._failed: Counter[str] = Counter()
        self._where: dict[int, tuple[Promise, ChunkState]] = {}  # by staging slot: the rows that were last put there

    @property
    def disk(self) -> HandDisk:
        assert self._disk is not None
        return self._disk

    @property
    def reserved_free(self) -> tuple[int, ...]:
        """Slots for reading back that nothing is in."""
        return tuple(sorted(self._reader._free_slots))

    # The engine's thread.

    @property
    def live(self) -> list[Promise]:
        """Samples that still get rows."""
        mine = (self._promises[sample_id] for sample_id in self.promised)
        return [promise for promise in mine if self.outbox.sample(promise.sample_id) is not None]

    def open(self) -> Promise:
        sample_id = f"s{len(self._promises)}"
        promise = self._promises[sample_id] = Promise(sample_id, len(self._promises), self._row_bytes)
        self.promised.append(sample_id)
        self.outbox.open(SampleOpen(sample_id, "default", sample_id, 0, 1000, False))
        promise.state = self.outbox.sample(sample_id)
        return promise

    def lease(self, count: int) -> list[int] | None:
        """Staging slots. Whose rows lay there must be able to do without them."""
        slots = self.pool.acquire(count, deadline=0.0, keep_waiting=lambda: False)
        for slot in slots or ():
            promise, chunk = self._where.pop(slot, (None, None))
            if promise is None or chunk is None or chunk.staging_slot != slot:
                continue
            assert promise.state is not None
            assert chunk.ticket, "a slot that is in use was leased again"
            if chunk.place is None:
                assert promise.state.phase is not Phase.WAITING, "the only copy of rows was let go of"
                promise.may_fail(*_ROBBED)
        return slots

    def add_rows(self, promise: Promise, rows: int) -> None:
        """Rows of a step; without room for them the sample fails."""
        state = promise.state
        assert state is not None
        rows_a_slot = self.pool.slot_bytes // promise.row_bytes
        slots = self.lease(-(-rows // rows_a_slot))
        if slots is None:
            promise.may_fail("STAGING_FULL")
            promise.aborted = True
            self.outbox.give_up(state, "STAGING_FULL", "no room")
            return
        for slot in slots:
            count = min(rows, rows_a_slot)
            buffer = self.pool.buffer(slot, count * promise.row_bytes)
            buffer[:] = promise.data(promise.rows, count)
            chunk = ChunkState(promise.rows, count, buffer.nbytes, xxh3(buffer), slot)
            self._where[slot] = (promise, chunk)
            promise.rows += count
            rows -= count
            self.outbox.add(state, chunk)

    def finish(self, promise: Promise) -> None:
        if not promise.rows:
            self.add_rows(promise, 1)
        if self.outbox.sample(promise.sample_id) is not None:
            assert promise.state is not None
            commit = ingest_pb2.CommitSample(row_count=promise.rows, token_ids=range(promise.rows))
            self.outbox.finish(promise.state, commit)

    def abort(self, promise: Promise, code: str) -> None:
        assert promise.state is not None
        promise.may_fail(code)
        promise.aborted = True
        self.outbox.give_up(promise.state, code, "it was hung up")

    def tick(self, seconds: float) -> None:
        if self._disk is None or not self._disk.is_behind:
            self._calm_at = self._now
        self._now += seconds
        self.outbox.tick()

    # What others say to it.

    def lane(self, stream: Stream) -> Lane:
        """What the outbox calls it."""
        return list(self.outbox.lanes)[stream.index]

    def hear(self, stream: Stream, verdict: Committed | Failed) -> None:
        """The server's verdict."""
        self._hearing = verdict
        if isinstance(verdict, Committed):
            self.outbox.committed(self.lane(stream), verdict.sample)
        else:
            self.outbox.failed(self.lane(stream), verdict)
        self._hearing = None

    @property
    def answers(self) -> int:
        """What the disk has done and not said yet."""
        return len(self._disk.events) if self._disk is not None else 0

    def work(self) -> bool:
        """Have the disk do one thing; False when there is nothing to do."""
        return self._disk is not None and self._disk.step()

    def hear_disk(self, count: int) -> int:
        """Take so many of the disk's answers; how many there were."""
        heard = min(count, self.answers)
        for _ in range(heard):
            event = self.disk.events.popleft()
            match event:
                case Appended():
                    self._refused |= event.offset is None
                    self.outbox.appended(event)
                case ReadBack():
                    self.outbox.read_back(event)
                case Adopted():
                    self.outbox.adopted(event)
                case Loaded():
                    self.outbox.loaded(event)
        return heard

    # What it says.

    def _ended(self, req_id: str) -> None:
        if req_id:
            self.ends[req_id] += 1
            if isinstance(self._hearing, Committed):
                self._committed.add(req_id)

    def look_at_ends(self) -> None:
        """What it has told of samples so far: once, and for a reason."""
        for fault in self._faults.take():
            promise = self._promises[fault.req_id]
            self._failed[fault.req_id] += 1
            promise.check_failure(fault.code)
            if (
                fault.req_id not in self.ends
                and self._disk is not None
                and not (self._refused or self._now - self._calm_at >= _PATIENCE_S or promise.rotten)
            ):
                assert self._spooled()[fault.req_id].abort is not None, "told before the next engine could tell it"
        assert set(self.ends.values()) | set(self._failed.values()) <= {1}, "an end was told twice"
        assert not self._committed & self._failed.keys(), "committed, and failed as well"

    def look_at_the_last(self) -> None:
        """Once nothing is owed to the server: every promise has had its end."""
        self.look_at_ends()
        assert self.ends.keys() == set(self.promised)
        assert self._committed | self._failed.keys() == set(self.promised)

    def look_at_the_spool(self) -> None:
        """Once all was written: what the server has yet to hear of can be told by the next engine."""
        if self._disk is None or self._disk.bytes_in_use > _SPOOL_BYTES - _SAMPLE_BYTES:
            return
        spooled = self._spooled()
        for sample_id in set(self.promised) - self.ends.keys():
            if not self._promises[sample_id].rotten:
                assert spooled[sample_id].commit is not None or spooled[sample_id].abort is not None

    def look_at_staging(self, leased: int) -> None:
        """Every slot is free, kept, or known to be in use: `leased` of them by the engine's thread."""
        pool = self.pool
        assert pool.in_use + pool.kept + pool.free == pool.num_slots
        for promise in map(self._promises.__getitem__, self.promised):
            assert promise.state is not None
            for chunk in promise.state.chunks:
                if chunk.staging_slot is not None:
                    leased += not chunk.ticket
                    assert promise.state.phase.needs_rows or chunk.wire or chunk.writing, "held for nothing"
        assert leased == pool.in_use

    def _spooled(self) -> dict[str, SpooledSample]:
        """What the files of all engines say, by sample."""
        return dict(map(_read, spool_files_in(self._base)))

    # Its end, and its heir.

    def die(self) -> None:
        for sample_id in self.promised:
            self._promises[sample_id].state = None
        if self._disk is not None:
            self._disk.die()

    def inherit(self) -> None:
        """Engines died: of what they promised, the files in the spool must be accounted for, and nothing else is known."""
        spooled = self._spooled()
        for promise in self._promises.values():
            found = spooled.get(promise.sample_id)
            promise.owed = found is not None
            if found is not None and found.commit is None:
                promise.may_fail("INTERRUPTED")
            if self.pool.slot_bytes < promise.row_bytes:
                promise.may_fail("TOO_LARGE")


def rot(promises: dict[str, Promise], path: Path, at: int) -> None:
    """A bit of a spool file flips."""
    raw = bytearray(path.read_bytes())
    if raw:
        raw[at % len(raw)] ^= 1
        path.write_bytes(raw)
        promises[path.stem.split("~")[2]].rotten = True


def spool_files_in(base: Path | None) -> list[Path]:
    """Of living and dead engines, in order."""
    return sorted(base.glob("*/*.spool")) if base is not None else []


def _read(path: Path) -> tuple[str, SpooledSample]:
    serial, namespace, sample_id = path.stem.split("~")
    return sample_id, spool_files.read_index(SpoolFile(int(serial), namespace, sample_id, OwnedDir(path.parent, -1)))
