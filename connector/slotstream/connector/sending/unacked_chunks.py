"""Rows of samples in staging: submitted to the sink, held until the verdict, then dropped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slotstream.connector.sending.phases import Phase
from slotstream.connector.sending.sample_state import ChunkState, SampleState
from slotstream.connector.sending.spool.reader import SpoolReader
from slotstream.connector.sending.spool.writer import SpoolWriter
from slotstream.connector.sending.staging_pool import StagingPool
from slotstream.transport.base import RowChunk, SampleSink


@dataclass(frozen=True, slots=True)
class _Sent:
    """A chunk that the sink has. `read_back_slot`: where its rows lie, unless that is its own staging slot."""

    sample: SampleState
    chunk: ChunkState
    read_back_slot: int | None


class UnackedChunks:
    """For the pump's thread, but for the properties, which any thread may read."""

    def __init__(
        self, pool: StagingPool, sink: SampleSink, writer: SpoolWriter, reader: SpoolReader, clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._sink = sink
        self._writer = writer
        self._reader = reader
        self._clock = clock
        self._numbers = itertools.count(1)
        self._sent: dict[int, _Sent] = {}
        self._answered_at = 0.0

    @property
    def unacked(self) -> int:
        """Chunks that the server has not taken yet."""
        return len(self._sent)

    @property
    def answered_at(self) -> float:
        """When the server last took a chunk, or was first given one, by the clock."""
        return self._answered_at

    def submit(self, sample: SampleState, chunk: ChunkState, read_back_slot: int | None = None) -> None:
        """Send rows of an open sample, out of the chunk's own staging slot or the one that they were read back into."""
        staging_slot = chunk.staging_slot if read_back_slot is None else read_back_slot
        assert staging_slot is not None, "only rows in memory are submitted"
        chunk.wire = next(self._numbers)
        sample.unsent -= 1
        if not self._sent:
            self._answered_at = self._clock()
        self._sent[chunk.wire] = _Sent(sample, chunk, read_back_slot)
        buffer = self._pool.buffer(staging_slot, chunk.nbytes)
        self._sink.submit(RowChunk(sample.number, chunk.wire, chunk.first_row, chunk.rows, buffer, chunk.digest))

    def acked(self, numbers: Sequence[int]) -> None:
        """The server took these chunks."""
        self._answered_at = self._clock()
        for number in numbers:
            sent = self._sent.pop(number, None)
            if sent is None:
                continue
            sent.chunk.wire = 0
            if sent.read_back_slot is not None:
                self._reader.give_back(sent.read_back_slot)
            else:
                self.settle(sent.sample, sent.chunk)

    def link_down(self) -> None:
        """The sink has nothing any more. What the samples still need is held until each has its new phase."""
        sent, self._sent = self._sent, {}
        for one in sent.values():
            one.chunk.wire = 0
            if one.read_back_slot is not None:
                self._reader.give_back(one.read_back_slot)
            elif not one.sample.phase.needs_rows:
                self.settle(one.sample, one.chunk)

    def settle(self, sample: SampleState, chunk: ChunkState) -> None:
        """What becomes of a chunk's staging slot that may just have become free: released, kept, or held for the next link."""
        if chunk.staging_slot is None or chunk.ticket or chunk.wire or chunk.writing:
            return
        if not sample.phase.needs_rows:
            self._pool.release([chunk.staging_slot])
            chunk.staging_slot = None
        elif chunk.place is not None:
            chunk.ticket = self._pool.keep(chunk.staging_slot, None)
        elif sample.phase is not Phase.WAITING and not self._writer.relieve(sample, chunk):
            chunk.ticket = self._pool.keep(chunk.staging_slot, sample.serial)
            if not chunk.ticket:
                chunk.staging_slot = None

    def recover(self, sample: SampleState, *, spare: bool = False) -> bool:
        """Lease again what was kept of a sample (`spare`: also what the spool holds anyway); whether no row is lost."""
        for chunk in sample.chunks:
            if chunk.ticket and (spare or chunk.place is None):
                if not self._pool.reclaim(chunk.ticket):
                    chunk.staging_slot = None
                chunk.ticket = 0
        return not any(chunk.lost for chunk in sample.chunks)

    def let_go(self, sample: SampleState) -> None:
        """A sample's rows have no further use. Those that the sink or the disk has are dropped when they come back."""
        self._pool.forget(sample.serial, [chunk.ticket for chunk in sample.chunks if chunk.ticket])
        for chunk in sample.chunks:
            if chunk.ticket:
                chunk.ticket, chunk.staging_slot = 0, None
            self.settle(sample, chunk)
