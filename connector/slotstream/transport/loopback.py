"""A sink that keeps what it is given in memory: for tests of everything in front of a transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from slotstream.transport.base import Acked, Committed, Failed, LinkUp, RowChunk, SinkEvent
from slotstream.v1 import ingest_pb2
from slotstream.wire.columns import taken_columns
from slotstream.wire.hashing import xxh3


@dataclass(slots=True)
class LoopbackSample:
    """A sample as the far side saw it: `rows` maps a row number to its bytes."""

    opened: ingest_pb2.OpenSample
    rows: dict[int, bytes] = field(default_factory=dict)
    committed: ingest_pb2.CommitSample | None = None
    aborted: ingest_pb2.AbortSample | None = None
    failed: Failed | None = None

    @property
    def is_open(self) -> bool:
        """Whether neither Committed nor Failed was said; only then does anything count."""
        return self.committed is None and self.failed is None


class LoopbackSink:
    """Answers at once, on the caller's thread, as a server would: an Acked for each chunk, one Committed or Failed a sample."""

    def __init__(self) -> None:
        self.samples: dict[int, LoopbackSample] = {}
        self.last_report: ingest_pb2.EngineReport | None = None
        self._on_event: Callable[[SinkEvent], None] = lambda event: None

    def use_staging(self, memory: memoryview, slot_bytes: int) -> None:
        return

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        self._on_event = on_event
        on_event(LinkUp("loopback", frozenset(taken_columns())))

    def open_sample(self, request: ingest_pb2.OpenSample) -> None:
        self.samples[request.sample] = LoopbackSample(request)

    def submit(self, chunk: RowChunk) -> None:
        sample = self.samples[chunk.sample]
        if not sample.is_open:
            pass
        elif xxh3(chunk.buffer) != chunk.xxh3:
            self._fail(sample, "HASH_MISMATCH", "the chunk does not match its hash")
        else:
            row_bytes = chunk.buffer.nbytes // chunk.rows
            for i in range(chunk.rows):
                sample.rows.setdefault(chunk.first_row + i, bytes(chunk.buffer[i * row_bytes : (i + 1) * row_bytes]))
        self._on_event(Acked((chunk.chunk,)))

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        sample = self.samples[request.sample]
        if not sample.is_open:
            return
        missing = [row for row in range(request.row_count) if row not in sample.rows]
        if missing:
            self._fail(sample, "MISSING_ROWS", f"rows {missing[:8]} never came")
            return
        sample.committed = request
        self._on_event(Committed(request.sample, duplicate=False))

    def abort(self, request: ingest_pb2.AbortSample) -> None:
        sample = self.samples[request.sample]
        if sample.is_open:
            sample.aborted = request
            self._fail(sample, request.code, request.message)

    def _fail(self, sample: LoopbackSample, code: str, message: str) -> None:
        sample.failed = Failed(sample.opened.sample, code, message)
        self._on_event(sample.failed)

    def report(self, report: ingest_pb2.EngineReport) -> None:
        self.last_report = report

    def check_deadlines(self) -> None:
        return

    def reset(self) -> None:
        self.samples.clear()

    def close(self, timeout_s: float) -> None:
        self._on_event = lambda event: None
