"""The outbox: every sample from its open until the server's verdict, whatever becomes of the link in between.

    open ──▶ on the stream ──▶ commit sent ──▶ Committed
               │    ▲   link up: opened again, every row sent again
     link down ▼    │
             waiting here: rows in staging, and in the spool if there is one

A sample is failed on this side only when its rows are not to be had any more, or never were; then the server is told, now
or when it is back. The server stores the same content once, so that sending it again is always safe.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slotstream.connector.counters import Counters
from slotstream.connector.faults import Faults, SampleFault
from slotstream.connector.plan import SampleOpen
from slotstream.connector.sending.failure_reports import Report, Reports
from slotstream.connector.sending.sample_state import ChunkState, SampleState, numbered, open_message
from slotstream.connector.sending.spool.files import SpoolFile
from slotstream.connector.sending.spool.shelf import Shelf
from slotstream.connector.sending.spool.spool import Adopted, Appended, Loaded, ReadBack
from slotstream.connector.sending.staging_pool import StagingPool
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.base import Failed, SampleSink, StagedChunk
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import Damaged, Interrupted, ServerDraining, StoreFull

# With these the server says that it could not store a sample now; the rows are as good as before.
_LATER = frozenset({StoreFull.code, ServerDraining.code, Interrupted.code})
_RETRY_S, _RETRY_S_MAX = 0.5, 30.0
_REPLAYS_MAX = 64  # Samples that are replayed from the spool at a time.


@dataclass(frozen=True, slots=True)
class _Sent:
    """A chunk that the sink has. `lent`: a slot of the shelf's that its rows lie in, instead of one of its own."""

    sample: SampleState
    chunk: ChunkState
    lent: int | None


class Outbox:
    """For the pump's thread, but for the plain attributes, which any thread may read.

    `on_end` is called with the request of each sample that is durable, or failed as the server knows.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        pool: StagingPool,
        sink: SampleSink,
        shelf: Shelf,
        counters: Counters,
        faults: Faults,
        on_end: Callable[[str], None],
    ) -> None:
        self._config = config
        self._pool = pool
        self._sink = sink
        self._shelf = shelf
        self._counters = counters
        self._faults = faults
        self._on_end = on_end
        self._numbers = itertools.count(1)  # Of samples on the wire: none is ever used again, on any stream.
        self._chunk_numbers = itertools.count(1)
        self._serials = itertools.count(1)
        self._live: dict[str, SampleState] = {}  # by request, until its finish or abort
        self._held: dict[int, SampleState] = {}  # by serial: in the order of their opens
        self._by_number: dict[int, SampleState] = {}
        self._sent: dict[int, _Sent] = {}
        self._retries: list[SampleState] = []
        self._backlog: deque[SampleState] = deque()  # To be replayed, rows in the spool only.
        self._files: deque[SpoolFile] = deque()  # Of earlier engines, to be loaded.
        self._replaying = 0  # Samples replayed from the spool, and files being loaded.
        self._reports = Reports(sink, counters, self._numbers, faults, shelf.put_report, shelf.drop, on_end)
        self.link_up = False
        self.answered_at = 0.0  # monotonic; when the server last took a chunk, or was first given one

    @property
    def unacked(self) -> int:
        """Chunks that the server has not taken yet."""
        return len(self._sent)

    @property
    def samples(self) -> int:
        """Samples without a verdict, those that only the spool holds included."""
        return len(self._held) + len(self._files)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is owed to the server."""
        return not (self._held or self._files or self._reports)

    @property
    def live(self) -> list[str]:
        """Requests whose samples still get rows."""
        return list(self._live)

    # What the engine says.

    def open(self, item: SampleOpen) -> None:
        """A sample begins."""
        sample = SampleState(next(self._serials), item.req_id, open_message(self._config, item))
        self._live[item.req_id] = self._held[sample.serial] = sample
        self._counters.add("samples_opened")
        if self.link_up:
            self._announce(sample)
        else:
            self._shelf.put(sample)

    def sample(self, req_id: str) -> SampleState | None:
        """The sample of a request, if it still takes rows."""
        return self._live.get(req_id)

    def add(self, sample: SampleState, chunk: ChunkState) -> None:
        """Rows of a sample that still takes them, in a leased slot."""
        sample.add(chunk)
        self._counters.add("rows", chunk.rows)
        self._counters.add("bytes", chunk.nbytes)
        self._counters.add("chunks")
        if sample.number:
            self._submit(sample, chunk)
        else:
            self._shelf.put_chunk(sample, chunk)
            self._settle(sample, chunk)

    def finish(self, sample: SampleState, commit: ingest_pb2.CommitSample) -> None:
        """No more rows come: commit."""
        self._live.pop(sample.req_id, None)
        sample.commit = commit
        self._progress(sample)

    def give_up(self, sample: SampleState, code: str, message: str) -> None:
        """Fail a sample for a reason on this side, unless only the server's verdict is missing. The server is told."""
        self._no_rows_come(sample)
        if not sample.number:
            self._end(sample, code, message, tell_server=True)
        elif not sample.ending:
            sample.ending, sample.failure = True, (code, message)
            self._sink.abort(ingest_pb2.AbortSample(sample=sample.number, code=code, message=message))
            self._let_go(sample)

    def _no_rows_come(self, sample: SampleState) -> None:
        if self._live.get(sample.req_id) is sample:
            del self._live[sample.req_id]

    # What the link says.

    def link_is_up(self) -> None:
        """The server answers: what waits in memory is sent again at once, what only the spool holds bit by bit."""
        self.link_up = True
        for sample in list(self._held.values()):
            if sample.commit is None or sample.in_memory:
                self._replay(sample)
            else:
                self._backlog.append(sample)
        self._shelf.adopt()
        self._advance()

    def link_is_down(self, message: str, code: str = "") -> None:
        """The stream broke, or was refused (`code`): nothing counts that was sent on it without a verdict."""
        for sent in self._sent.values():
            sent.chunk.wire = 0
        lent = [sent.lent for sent in self._sent.values() if sent.lent is not None]
        over = [sent for sent in self._sent.values() if sent.sample.over]
        self._sent.clear()
        self._by_number.clear()
        self._backlog.clear()
        self._retries.clear()
        self._reports.link_down()
        for sample in sorted(self._held.values(), key=lambda sample: sample.failure is None):  # Failures are written first.
            self._replaying -= sample.queued
            sample.queued, sample.retry_at = False, 0.0
            sample.unsend()
            if sample.failure is not None:
                self._end(sample, *sample.failure, tell_server=True)
            elif not self._recover(sample):
                self._end(sample, code or Interrupted.code, message, tell_server=True)
            else:
                self._shelf.put(sample)
        for sent in over:
            self._settle(sent.sample, sent.chunk)
        for slot in lent:
            self._shelf.give_back(slot)
        self.link_up = False  # Only now that the spool is at work: an engine that waits for room would give up between the two.
        self._sink.reset()

    def acked(self, numbers: Sequence[int]) -> None:
        """The server took these chunks."""
        self.answered_at = time.monotonic()
        for number in numbers:
            sent = self._sent.pop(number, None)
            if sent is None:
                continue
            sent.chunk.wire = 0
            if sent.lent is not None:
                self._shelf.give_back(sent.lent)
            else:
                self._settle(sent.sample, sent.chunk)

    def committed(self, number: int) -> None:
        """A sample is durable."""
        sample = self._by_number.get(number)
        if sample is not None:
            self._counters.add("samples_committed")
            self._forget(sample)
            self._on_end(sample.req_id)
            self._advance()

    def failed(self, event: Failed) -> None:
        """The server will not store a sample, or cannot now."""
        later = event.code in _LATER
        if self._reports.answered(event, again=later):
            self._advance()
            return
        sample = self._by_number.pop(event.sample, None)
        if sample is None:
            return
        if later and sample.failure is None and not self._pool.was_robbed(sample.serial):
            self._retry_later(sample, event)
            return
        if later and sample.failure is not None:  # It was given up for a reason of its own, which the server has not taken.
            self._end(sample, *sample.failure, tell_server=True)
        else:
            self._end(sample, event.code, event.message)
        self._advance()

    def _retry_later(self, sample: SampleState, event: Failed) -> None:
        """Its rows stay for as long as nobody needs their room; then, or when none are lost, it is sent again."""
        sample.refusal = (event.code, event.message)
        sample.retry_at = time.monotonic() + min(_RETRY_S * 2**sample.attempts, _RETRY_S_MAX)
        sample.attempts = min(sample.attempts + 1, 16)
        sample.unsend()
        self._retries.append(sample)
        self._shelf.put(sample)
        for chunk in sample.chunks:
            self._settle(sample, chunk)

    def tick(self) -> None:
        """Called about once a second."""
        now, waiting = time.monotonic(), self._retries
        self._retries = []
        for sample in waiting:
            if sample.over:
                continue
            if sample.retry_at > now or any(chunk.wire for chunk in sample.chunks):
                self._retries.append(sample)
            else:
                sample.retry_at = 0.0
                self._replay(sample)
        if self._shelf.is_behind():
            for sample in list(self._held.values()):
                if not sample.number:
                    self._shelf.put(sample)
            self._reports.put_again()
        self._reports.tick()
        self._advance()

    # What the spool says.

    def appended(self, event: Appended) -> None:
        """A record was written, or refused."""
        if isinstance(event.token, Report):
            self._reports.written(event.token)
        written = self._shelf.appended(event)
        if written is not None:
            sample, chunk = written
            if chunk is not None:
                self._settle(sample, chunk)
            if not sample.over and not sample.number:
                self._shelf.put_commit(sample)

    def adopted(self, event: Adopted) -> None:
        """A dead engine left files."""
        self._files.extend(event.files)
        self._advance()

    def loaded(self, event: Loaded) -> None:
        """What such a file says."""
        self._replaying -= 1
        if not self.link_up:
            self._files.appendleft(event.file)
            return
        sample = self._shelf.restore(event.file, event.sample, next(self._serials))
        self._counters.add("samples_opened")
        self._held[sample.serial] = sample
        if sample.failure is not None:
            self._end(sample, *sample.failure, tell_server=True)
        else:
            self._backlog.append(sample)
        self._advance()

    def read_back(self, event: ReadBack) -> None:
        """Rows came back from the spool."""
        fetched = self._shelf.read_back(event)
        if fetched is None:
            return
        sample, _, chunk, slot = fetched
        if event.digest is None:
            self._shelf.give_back(slot)
            self.give_up(sample, Damaged.code, "rows of the sample cannot be read back from the spool")
        else:
            chunk.digest = event.digest
            self._submit(sample, chunk, slot)
            self._progress(sample)

    # Sending.

    def _announce(self, sample: SampleState) -> None:
        sample.number = next(self._numbers)
        self._by_number[sample.number] = sample
        self._sink.open_sample(numbered(sample.opened, sample.number))

    def _submit(self, sample: SampleState, chunk: ChunkState, lent: int | None = None) -> None:
        slot = chunk.slot if lent is None else lent
        assert slot is not None, "only rows in memory are submitted"
        chunk.wire, chunk.sent = next(self._chunk_numbers), True
        sample.unsent -= 1
        if not self._sent:
            self.answered_at = time.monotonic()
        self._sent[chunk.wire] = _Sent(sample, chunk, lent)
        buffer = self._pool.buffer(slot, chunk.nbytes)
        self._sink.submit(StagedChunk(sample.number, chunk.wire, chunk.first_row, chunk.rows, buffer, chunk.digest))

    def _progress(self, sample: SampleState) -> None:
        """Commit once there is nothing left to submit; while the sample waits, see that the spool knows it is whole."""
        if sample.commit is None:
            return
        if not sample.number:
            self._shelf.put_commit(sample)
        elif not sample.unsent and not sample.ending:
            sample.ending = True
            request = ingest_pb2.CommitSample()
            request.CopyFrom(sample.commit)
            request.sample = sample.number
            self._sink.commit(request)

    def _replay(self, sample: SampleState) -> None:
        """Open a sample again and send all there is of it. One that lost rows meanwhile fails."""
        if not self._recover(sample, spare=True):
            code, message = sample.refusal or (Interrupted.code, "the stream broke, and the rows sent before were let go of")
            self._end(sample, code, message, tell_server=True)
            return
        self._announce(sample)
        self._counters.add("samples_replayed")
        for chunk in sample.chunks:
            if chunk.slot is not None:
                self._submit(sample, chunk)
            else:
                self._shelf.fetch(sample, chunk)
        self._shelf.read_more()
        self._progress(sample)

    def _recover(self, sample: SampleState, *, spare: bool = False) -> bool:
        """Lease again what was kept of a sample (`spare`: also what the spool holds anyway); whether no row is lost."""
        for chunk in sample.chunks:
            if chunk.ticket and (spare or chunk.place is None):
                if not self._pool.reclaim(chunk.ticket):
                    chunk.slot = None
                chunk.ticket = 0
        return not any(chunk.lost for chunk in sample.chunks)

    def _advance(self) -> None:
        """Replay more of what only the spool holds, and tell more failures, as far as the limits allow."""
        if not self.link_up:
            return
        while self._replaying < _REPLAYS_MAX and (self._backlog or self._files):
            self._replaying += 1
            if not self._backlog:
                self._shelf.load(self._files.popleft())
                continue
            sample = self._backlog.popleft()
            if sample.over:
                self._replaying -= 1
                continue
            sample.queued = True
            self._replay(sample)
        self._reports.send()

    # Letting go.

    def _settle(self, sample: SampleState, chunk: ChunkState) -> None:
        """What becomes of a chunk's slot that may just have become free: released, kept, or held for the next link."""
        if chunk.slot is None or chunk.ticket or chunk.wire or chunk.writing:
            return
        if sample.over:
            self._pool.release([chunk.slot])
            chunk.slot = None
        elif chunk.place is not None:
            chunk.ticket = self._pool.keep(chunk.slot, None)
        elif (chunk.sent or sample.retry_at) and not self._shelf.relieve(sample, chunk):
            chunk.ticket = self._pool.keep(chunk.slot, sample.serial)
            if not chunk.ticket:
                chunk.slot = None

    def _let_go(self, sample: SampleState) -> None:
        """A sample's rows have no further use."""
        sample.over = True
        self._pool.forget(sample.serial, [chunk.ticket for chunk in sample.chunks if chunk.ticket])
        for chunk in sample.chunks:
            if chunk.ticket:
                chunk.ticket, chunk.slot = 0, None
            self._settle(sample, chunk)

    def _end(self, sample: SampleState, code: str, message: str, *, tell_server: bool = False) -> None:
        """A sample failed for good."""
        fault = SampleFault(sample.req_id, code, message)
        if not tell_server:
            self._faults.add(sample.opened.sample_id, fault)
            self._on_end(sample.req_id)
        else:
            file = sample.file
            if file is not None and sample.req_id:  # An earlier engine's file stays until the server has heard of it.
                self._shelf.drop(file)
                file = None
            sample.file = None
            self._reports.add(Report.of(sample.opened, sample.serial, fault, file))
        self._forget(sample)

    def _forget(self, sample: SampleState) -> None:
        del self._held[sample.serial]
        self._by_number.pop(sample.number, None)
        self._no_rows_come(sample)
        self._replaying -= sample.queued
        sample.queued = False
        self._let_go(sample)
        if sample.file is not None:
            self._shelf.drop(sample.file)
