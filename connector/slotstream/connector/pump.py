"""The pump: one thread between staging and the transport. It owns every sample's state, so none of it needs a lock.

The engine's thread only posts what it staged; the pump waits for copies, checks slots, hashes, submits, and gives slots
back when the server has taken their rows.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slotstream.connector.config import ConnectorConfig
from slotstream.connector.counters import Counters
from slotstream.connector.gather import Gathered, SlotMappingCopy, Slots, Ticket
from slotstream.connector.plan import SampleAbort, SampleFinish, SampleOpen
from slotstream.connector.staging import StagingPool
from slotstream.transport.base import (
    Acked,
    Committed,
    Failed,
    FellBack,
    LinkDown,
    LinkUp,
    SampleSink,
    SinkEvent,
    StagedChunk,
)
from slotstream.transport.logs import connector_logger
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import (
    BadRows,
    CaptureAborted,
    InternalFault,
    Interrupted,
    PermissionDenied,
    RowsNotComputed,
    ServerUnavailable,
    SlotMismatch,
    SlotStreamError,
    Unauthenticated,
)
from slotstream.wire.hashing import xxh3
from slotstream.wire.logtext import log_text
from slotstream.wire.throttle import Throttle

logger = connector_logger(__name__)

_TICK_S = 1.0
_DENIALS = frozenset({PermissionDenied.code, Unauthenticated.code})


class StepMapping:
    """The slots that the device wrote in one step: a copy under way, then a sorted array."""

    def __init__(self, copy: SlotMappingCopy, ticket: Ticket) -> None:
        self._copy = copy
        self._ticket = ticket
        self._sorted: Slots | None = None

    def load(self) -> None:
        """Wait for the copy and keep what it says; its host memory is free afterwards."""
        if self._sorted is None:
            self._ticket.wait()
            self._sorted = np.sort(self._copy.numpy())

    def each_once(self, expected: Slots) -> bool:
        """Whether every slot of `expected` was written exactly once."""
        self.load()
        assert self._sorted is not None
        first = np.searchsorted(self._sorted, expected, side="left")
        last = np.searchsorted(self._sorted, expected, side="right")
        return bool(np.all(last - first == 1)) and np.unique(expected).size == expected.size


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one sample in one staging slot. `computed` are the slots of those written in this step; may be empty."""

    req_id: str
    first_row: int
    rows: int
    slot: int
    computed: Slots


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Segments of one gather. `mapping` is the step's; None where vLLM ran no extraction in this step."""

    segments: tuple[Segment, ...]
    gathered: Gathered
    mapping: StepMapping | None
    scratch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailSample:
    """The engine's thread gives a sample up."""

    req_id: str
    error: SlotStreamError


@dataclass(frozen=True, slots=True)
class _Stop:
    deadline: float


@dataclass(slots=True)
class _Sample:
    number: int
    sample_id: str
    ending: bool = False  # Commit or abort sent; only the answer is missing.
    zero_rows: int = 0
    nonfinite_rows: int = 0
    first_bad_row: int | None = None

    def canary(self) -> dict[str, str]:
        """What the sample's metadata says of rows that no healthy model writes; nothing where there are none."""
        if self.first_bad_row is None:
            return {}
        return {
            "zero_rows": str(self.zero_rows),
            "nonfinite_rows": str(self.nonfinite_rows),
            "first_bad_row": str(self.first_bad_row),
        }


_Item = SampleOpen | StagedBatch | SampleFinish | SampleAbort | FailSample | SinkEvent | _Stop


@dataclass(frozen=True, slots=True)
class SampleFault:
    """A sample that failed after it was planned; for the scheduler half, which may still tell the caller."""

    req_id: str
    code: str
    message: str


@dataclass(slots=True)
class _Faults:
    lock: threading.Lock = field(default_factory=threading.Lock)
    items: list[SampleFault] = field(default_factory=list)


class Pump:
    """See the module. `post` never blocks; everything else happens on the pump's thread."""

    def __init__(
        self, config: ConnectorConfig, pool: StagingPool, sink: SampleSink, row_bytes: int, counters: Counters
    ) -> None:
        self._config = config
        self._pool = pool
        self._sink = sink
        self._row_bytes = row_bytes
        self._counters = counters
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._samples: dict[str, _Sample] = {}  # by request
        self._by_number: dict[int, str] = {}
        self._chunks: dict[int, int] = {}  # not acked yet -> its staging slot
        self._next_number = 1
        self._next_chunk = 1
        self._faults = _Faults()
        self._throttle = Throttle(every_s=10.0)
        self._throttle_denied = Throttle(every_s=60.0)  # It takes a person to change what the server denies.
        self._thread = threading.Thread(target=self._run, name="slotstream-pump", daemon=True)
        self._progress_at = 0.0  # monotonic; when the server last took a chunk, or was first given one
        self.link_up = False

    def start(self) -> None:
        """Start the thread and the sink."""
        self._thread.start()
        self._sink.start(self._inbox.put)

    def post(self, item: SampleOpen | StagedBatch | SampleFinish | SampleAbort | FailSample) -> None:
        """Hand something over, from any thread; kept in order."""
        self._inbox.put(item)

    @property
    def taking_rows(self) -> bool:
        """Whether waiting for room in staging makes sense: the link is up, and the server has answered of late."""
        answered_s = time.monotonic() - self._progress_at
        return self.link_up and (not self._chunks or answered_s < self._config.options.wait_s_max)

    def take_faults(self) -> list[SampleFault]:
        """Samples that failed since the last call."""
        with self._faults.lock:
            taken, self._faults.items = self._faults.items, []
        return taken

    @property
    def in_flight(self) -> int:
        """Samples opened and not ended."""
        return len(self._samples)

    def close(self, timeout_s: float) -> None:
        """Let what is in flight finish, for at most `timeout_s`; then stop thread and sink."""
        self._inbox.put(_Stop(time.monotonic() + timeout_s))
        self._thread.join(timeout_s + 2 * _TICK_S)
        self._sink.close(1.0)

    # -- the thread

    def _run(self) -> None:
        stop: _Stop | None = None
        next_check = 0.0
        while stop is None or (self._samples and self.link_up and time.monotonic() < stop.deadline):
            if time.monotonic() >= next_check:  # Also while items keep coming: the server may have stopped all the same.
                next_check = time.monotonic() + _TICK_S
                self._sink.check_deadlines()
            try:
                item = self._inbox.get(timeout=_TICK_S if stop is None else 0.1)
            except queue.Empty:
                continue
            if isinstance(item, _Stop):
                stop = item
                for req_id in list(self._samples):  # Those that wait for their commit's answer only are left alone.
                    self._give_up(req_id, CaptureAborted("the engine shut down before all rows existed"))
            else:
                self._handle_safely(item)
        if self._samples:
            logger.warning("slotstream: closed with %d samples in flight; they are lost", len(self._samples))

    def _handle_safely(self, item: _Item) -> None:
        """Our own bug must neither stop the pump nor leak staging: the samples concerned fail."""
        try:
            self._handle(item)
        except Exception as error:
            self._counters.add("hook_faults")
            logger.exception("slotstream: the pump failed on a %s", type(item).__name__)
            fault = InternalFault(f"a fault of slotstream's own: {type(error).__name__}")
            for req_id in {s.req_id for s in item.segments} if isinstance(item, StagedBatch) else {getattr(item, "req_id", "")}:
                self._give_up(req_id, fault)

    def _handle(self, item: _Item) -> None:
        match item:
            case StagedBatch():
                self._batch(item)
            case Acked():
                self._acked(item.chunk)
            case SampleOpen():
                self._open(item)
            case SampleFinish():
                self._finish(item)
            case SampleAbort():
                self._abort(item.req_id, item.code, item.message)
            case FailSample():
                self._give_up(item.req_id, item.error)
            case Committed():
                self._counters.add("samples_committed")
                self._forget(item.sample)
            case Failed():
                self._failed(item)
            case FellBack():
                self._counters.add("nixl_fallbacks")
            case LinkUp():
                self.link_up = True
                logger.info("slotstream: connected to %s (server %s)", self._config.options.server, item.server_version)
            case LinkDown():
                self._link_down(item)

    def _open(self, item: SampleOpen) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        self._samples[item.req_id] = _Sample(number, item.sample_id)
        self._by_number[number] = item.req_id
        self._counters.add("samples_opened")
        self._sink.open_sample(
            ingest_pb2.OpenSample(
                sample=number,
                namespace=item.namespace,
                sample_id=item.sample_id,
                model=self._config.model,
                dtype=self._config.dtype,
                layer_ids=self._config.layer_ids,
                hidden_size=self._config.hidden_size,
                rows_max=item.rows_max,
                rows_exact=item.rows_exact,
                tags=item.tags,
                metadata={**self._config.metadata, **item.metadata},
            )
        )

    def _batch(self, batch: StagedBatch) -> None:
        done = at = 0
        try:
            batch.gathered.wait()
            if batch.mapping is not None:
                batch.mapping.load()
            peaks = batch.gathered.peaks.float().numpy()
            for segment in batch.segments:
                done += 1
                self._segment(segment, batch.mapping, peaks[at : at + segment.rows])
                at += segment.rows
        finally:
            self._pool.release([*batch.scratch, *(s.slot for s in batch.segments[done:])])

    def _segment(self, segment: Segment, mapping: StepMapping | None, peaks: npt.NDArray[np.float32]) -> None:
        sample = self._samples.get(segment.req_id)
        problem: SlotStreamError | None = None
        if sample is not None and not sample.ending:
            problem = _slot_problem(segment, mapping) or self._bad_rows(sample, segment, peaks)
        if problem is not None:
            self._give_up(segment.req_id, problem)
        if sample is None or sample.ending or problem is not None:
            self._pool.release([segment.slot])
            return
        chunk, self._next_chunk = self._next_chunk, self._next_chunk + 1
        nbytes = segment.rows * self._row_bytes
        if not self._chunks:
            self._progress_at = time.monotonic()
        buffer = self._pool.buffer(segment.slot, nbytes)
        self._chunks[chunk] = segment.slot
        self._counters.add("rows", segment.rows)
        self._counters.add("bytes", nbytes)
        self._counters.add("chunks")
        self._sink.submit(StagedChunk(sample.number, chunk, segment.first_row, segment.rows, buffer, xxh3(buffer)))

    def _bad_rows(self, sample: _Sample, segment: Segment, peaks: npt.NDArray[np.float32]) -> BadRows | None:
        """Count and note rows of zeros and rows with a NaN or an infinity; why the sample fails, where the option says so."""
        zero, nonfinite = peaks == 0, ~np.isfinite(peaks)
        bad = np.flatnonzero(zero | nonfinite)
        if not bad.size:
            return None
        self._counters.add("zero_rows", int(zero.sum()))
        self._counters.add("nonfinite_rows", int(nonfinite.sum()))
        sample.zero_rows += int(zero.sum())
        sample.nonfinite_rows += int(nonfinite.sum())
        first = segment.first_row + int(bad[0])
        if sample.first_bad_row is None or first < sample.first_bad_row:
            sample.first_bad_row = first
        if self._config.options.bad_rows == "fail":
            what = "only zeros" if zero[bad[0]] else "a NaN or an infinity"
            return BadRows(f"row {first} holds {what}")
        if (unsaid := self._throttle.admit(BadRows.code)) is not None:
            more = f" ({unsaid} more samples were not logged)" if unsaid else ""
            logger.warning(
                "slotstream: sample %s has rows of zeros or not finite, from row %d%s", sample.sample_id, first, more
            )
        return None

    def _acked(self, chunk: int) -> None:
        self._progress_at = time.monotonic()
        slot = self._chunks.pop(chunk, None)
        if slot is not None:
            self._pool.release([slot])

    def _finish(self, item: SampleFinish) -> None:
        sample = self._samples.get(item.req_id)
        if sample is None or sample.ending:
            return
        sample.ending = True
        self._sink.commit(
            ingest_pb2.CommitSample(
                sample=sample.number,
                row_count=len(item.token_ids),
                token_ids=item.token_ids,
                metadata={**item.metadata, **sample.canary()},
            )
        )

    def _abort(self, req_id: str, code: str, message: str) -> None:
        sample = self._samples.get(req_id)
        if sample is not None and not sample.ending:
            sample.ending = True
            self._sink.abort(ingest_pb2.AbortSample(sample=sample.number, code=code, message=message))

    def _give_up(self, req_id: str, error: SlotStreamError) -> None:
        """Fail a sample for a reason on this side; the server is told and answers with Failed."""
        self._abort(req_id, error.code, str(error))

    def _failed(self, event: Failed) -> None:
        req_id = self._by_number.get(event.sample)
        if req_id is not None:
            self._report(req_id, event.code, event.message)
            self._forget(event.sample)

    def _link_down(self, event: LinkDown) -> None:
        code = event.code or (Interrupted if self.link_up else ServerUnavailable).code
        self.link_up = False
        for req_id in list(self._samples):
            self._report(req_id, code, event.message)
        self._samples.clear()
        self._by_number.clear()
        chunks, self._chunks = self._chunks, {}
        self._pool.release(list(chunks.values()))
        self._sink.reset()

    def _forget(self, number: int) -> None:
        self._samples.pop(self._by_number.pop(number, ""), None)

    def _report(self, req_id: str, code: str, message: str) -> None:
        self._counters.add("samples_failed", code=code)
        with self._faults.lock:
            self._faults.items.append(SampleFault(req_id, code, message))
        sample_id = self._samples[req_id].sample_id
        throttle = self._throttle_denied if code in _DENIALS else self._throttle
        if (unsaid := throttle.admit(code)) is not None:
            more = f" ({unsaid} more with this code were not logged)" if unsaid else ""
            logger.warning("slotstream: sample %s failed: %s%s", sample_id, log_text(code, message), more)


def _slot_problem(segment: Segment, mapping: StepMapping | None) -> SlotStreamError | None:
    """Why a segment's rows cannot be trusted; None when the device wrote every slot that the block table names."""
    if segment.computed.size == 0:
        return None
    if mapping is None:
        return RowsNotComputed("vLLM ran no extraction in a step that computed rows of this sample")
    if not mapping.each_once(segment.computed):
        return SlotMismatch("the device wrote other slots than the block table names")
    return None


def sample_gauges(pump: Pump, pool: StagingPool) -> Mapping[str, float]:
    """The gauges of `counters.METRICS`, now."""
    return {
        "samples_in_flight": pump.in_flight,
        "staging_bytes_in_use": pool.in_use * pool.slot_bytes,
        "staging_bytes_limit": pool.num_slots * pool.slot_bytes,
        "link_up": int(pump.link_up),
    }
