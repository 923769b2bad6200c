"""Rows of samples in staging: submitted to a lane, held until the verdict, then dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slotstream.connector.sending.lane import Lane, Sent
from slotstream.connector.sending.phases import Phase
from slotstream.connector.sending.sample_state import ChunkState, SampleState
from slotstream.connector.sending.spool.reader import SpoolReader
from slotstream.connector.sending.spool.writer import SpoolWriter
from slotstream.connector.sending.staging_pool import StagingPool
from slotstream.transport.base import RowChunk


class UnackedChunks:
    """For the pump's thread. `clock`: monotonic seconds."""

    def __init__(self, pool: StagingPool, writer: SpoolWriter, reader: SpoolReader, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._writer = writer
        self._reader = reader
        self._clock = clock

    def submit(self, lane: Lane, sample: SampleState, chunk: ChunkState, read_back_slot: int | None = None) -> None:
        """Send rows of a sample that is open on this lane.

        They lie in the chunk's own staging slot, or in the one that they were read back into.
        """
        staging_slot = chunk.staging_slot if read_back_slot is None else read_back_slot
        assert staging_slot is not None, "only rows in memory are submitted"
        chunk.wire = lane.next_chunk_number()
        sample.unsent -= 1
        if not lane.sent:
            lane.answered_at = self._clock()
        lane.sent[chunk.wire] = Sent(sample, chunk, read_back_slot)
        buffer = self._pool.buffer(staging_slot, chunk.nbytes)
        lane.sink.submit(RowChunk(sample.number, chunk.wire, chunk.first_row, chunk.rows, buffer, chunk.digest))

    def acked(self, lane: Lane, numbers: Sequence[int]) -> None:
        """The server took these chunks."""
        lane.answered_at = self._clock()
        for number in numbers:
            sent = lane.sent.pop(number, None)
            if sent is None:
                continue
            sent.chunk.wire = 0
            if sent.sample.lane == lane.index:
                lane.owes(sent.sample, max(0, sent.sample.owed_bytes - sent.chunk.nbytes))
            self._came_back(sent)

    def link_down(self, lane: Lane, *, last: bool) -> None:
        """A lane's sink has nothing any more. What the samples still need is held until each has its new phase.

        `last`: no other lane is up, so that every sample gets one; else only those that were on this lane.
        """
        moving = set(lane.samples.values())
        for sent in lane.went_down():
            sent.chunk.wire = 0
            held = sent.sample.phase.needs_rows and (last or sent.sample in moving)
            if not held or sent.read_back_slot is not None:
                self._came_back(sent)

    def _came_back(self, sent: Sent) -> None:
        if sent.read_back_slot is not None:
            self._reader.give_back(sent.read_back_slot)
        else:
            self.settle(sent.sample, sent.chunk)

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
