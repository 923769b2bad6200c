"""Between the outbox and the spool: what of which sample is written there, and rows on their way back through staging."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from slotstream.connector.sending.failure_reports import Report
from slotstream.connector.sending.sample_state import ChunkState, SampleState
from slotstream.connector.sending.spool.files import Place, SpooledSample, SpoolFile
from slotstream.connector.sending.spool.spool import Appended, ReadBack, Spool
from slotstream.connector.sending.staging_pool import StagingPool
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import Damaged, Interrupted, TooLarge

_REST_S = 1.0  # After a refusal nothing is written for so long.

Fetch = tuple[SampleState, int, ChunkState, int]  # The number is the sample's when it was asked for; last, the slot.


class Shelf:
    """For the pump's thread, but for `taking_rows`. Without a spool nothing is ever written, and nothing comes back.

    Rows come back through the pool's reserved slots, so that they lie where every transport can send from, and so that a
    full staging and a full spool cannot wait for each other.
    """

    def __init__(self, spool: Spool | None, pool: StagingPool) -> None:
        self._spool = spool
        self._pool = pool
        self._lent_free = list(pool.reserved_slots)
        self._reads: deque[tuple[SampleState, int, ChunkState]] = deque()
        self._rest_until = 0.0
        self._behind = False  # Something was refused or not asked for, and is still wanted.
        self._answered_at = 0.0
        self.writing = 0

    def taking_rows(self, within_s: float) -> bool:
        """Whether room in staging may come from the spool: it writes now, and has answered of late. From any thread."""
        return self.writing > 0 and time.monotonic() - self._answered_at < within_s

    # Writing.

    def put(self, sample: SampleState) -> None:
        """Have everything of a sample written that is not there yet."""
        for chunk in sample.chunks:
            self.put_chunk(sample, chunk)
        if not sample.chunks:
            self._file(sample)
        self.put_commit(sample)

    def put_chunk(self, sample: SampleState, chunk: ChunkState) -> None:
        """Have a chunk written, unless it is there, or not in memory. Its slot is in use until `appended` says so."""
        if chunk.place is not None or chunk.writing or chunk.slot is None:
            return
        file = self._file(sample)
        if file is None or self._spool is None:
            return
        if chunk.ticket:
            if not self._pool.reclaim(chunk.ticket):
                chunk.ticket, chunk.slot = 0, None
                return
            chunk.ticket = 0
        header = ingest_pb2.ChunkHeader(first_row=chunk.first_row, rows=chunk.rows, xxh3=chunk.digest)
        chunk.writing = True
        data = self._pool.buffer(chunk.slot, chunk.nbytes)
        self._append(file, ingest_pb2.IngestRequest(chunk=header), data, (sample, chunk))

    def relieve(self, sample: SampleState, chunk: ChunkState) -> bool:
        """Have rows written that the server has taken, while the link is up: where staging gets short, and the spool has time.

        Their slot would soon be taken, and with it the chance to send the sample again. Nobody waits for this.
        """
        pool = self._pool
        if self._spool is None or pool.free * 4 >= pool.num_slots or self.writing * 8 >= pool.num_slots:
            return False
        if not pool.was_robbed(sample.serial):
            self.put_chunk(sample, chunk)
        return chunk.writing

    def put_commit(self, sample: SampleState) -> None:
        """Have the commit written, once every chunk is there: a file that has one can be sent as it is."""
        if sample.commit is None or sample.unspooled or sample.commit_spooled or sample.file is None:
            return
        if (file := self._file(sample)) is not None:
            sample.commit_spooled = True
            self._append(file, ingest_pb2.IngestRequest(commit=sample.commit), None, (sample, None))

    def put_report(self, report: Report) -> SpoolFile | None:
        """A file that says no more than that the sample failed; None where nothing can be written now."""
        if self._spool is None:
            return None
        if self._resting():
            self._behind = True
            return None
        opened = ingest_pb2.OpenSample.FromString(report.opened)
        file = SpoolFile(report.serial, opened.namespace, opened.sample_id)
        abort = ingest_pb2.AbortSample(code=report.fault.code, message=report.fault.message)
        self._append(file, ingest_pb2.IngestRequest(open=opened), None, None)
        self._append(file, ingest_pb2.IngestRequest(abort=abort), None, report)
        return file

    def _file(self, sample: SampleState) -> SpoolFile | None:
        """The sample's file, begun if need be; None where nothing can be written now."""
        if self._spool is None:
            return None
        if self._resting():
            self._behind = True
            return None
        if sample.file is None:
            opened = sample.opened
            sample.file = SpoolFile(sample.serial, opened.namespace, opened.sample_id)
            self._append(sample.file, ingest_pb2.IngestRequest(open=opened), None, (sample, None))
        return sample.file

    def _resting(self) -> bool:
        return time.monotonic() < self._rest_until

    def _append(self, file: SpoolFile, request: ingest_pb2.IngestRequest, data: memoryview | None, token: Any) -> None:
        assert self._spool is not None
        if not self.writing:
            self._answered_at = time.monotonic()
        self.writing += 1
        self._spool.append(file, request, data, token)

    def appended(self, event: Appended) -> tuple[SampleState, ChunkState | None] | None:
        """The spool wrote something, or refused; of whom, if it matters to anybody. The chunk's slot is not in use any more."""
        self.writing -= 1
        if event.offset is None:
            self._rest_until = time.monotonic() + _REST_S
            self._behind = True
        else:
            self._answered_at = time.monotonic()
        if not isinstance(event.token, tuple):
            return None
        sample, chunk = event.token
        return self._took(sample, chunk, event.offset), chunk

    def _took(self, sample: SampleState, chunk: ChunkState | None, offset: int | None) -> SampleState:
        if chunk is not None:
            chunk.writing = False
            if offset is not None:
                chunk.place = Place(offset, chunk.nbytes, chunk.digest)
                sample.unspooled -= 1
        elif offset is None:
            sample.commit_spooled = False
            if sample.file is not None and not sample.file.nbytes:
                sample.file = None  # Its first record was refused: nothing can follow.
        return sample

    def is_behind(self) -> bool:
        """Whether it is time to ask again for what was refused. Once."""
        if not self._behind or self._resting():
            return False
        self._behind = False
        return True

    def drop(self, file: SpoolFile) -> None:
        """A sample needs its file no longer."""
        if self._spool is not None:
            self._spool.drop(file)

    # Reading.

    def adopt(self) -> None:
        """Look for what dead engines left."""
        if self._spool is not None:
            self._spool.adopt()

    def load(self, file: SpoolFile) -> None:
        """Read what an adopted file says."""
        assert self._spool is not None
        self._spool.load(file)

    def fetch(self, sample: SampleState, chunk: ChunkState) -> None:
        """Have rows read back, once `read_more` finds a slot for them."""
        self._reads.append((sample, sample.number, chunk))

    def read_more(self) -> None:
        """Ask for as many rows as there are slots lent for it."""
        while self._reads and self._lent_free:
            sample, number, chunk = self._reads.popleft()
            if sample.number != number or sample.over:
                continue
            assert self._spool is not None
            assert sample.file is not None
            assert chunk.place is not None
            slot = self._lent_free.pop()
            into = self._pool.buffer(slot, chunk.nbytes)
            self._spool.read(sample.file, chunk.place, chunk.skip, into, (sample, number, chunk, slot))

    def read_back(self, event: ReadBack) -> Fetch | None:
        """Whose rows came back, in which slot; None when nobody wants them any more."""
        sample, number, chunk, slot = event.token
        if sample.number != number or sample.over:
            self.give_back(slot)
            return None
        return sample, number, chunk, slot

    def give_back(self, slot: int) -> None:
        """A slot that rows came back through is free for the next."""
        self._lent_free.append(slot)
        self.read_more()

    def restore(self, file: SpoolFile, found: SpooledSample, serial: int) -> SampleState:
        """The sample of an adopted file. With its `failure`, where it cannot be stored."""
        opened = found.opened
        if opened is None or (opened.namespace, opened.sample_id) != (file.namespace, file.sample_id):
            opened = ingest_pb2.OpenSample(
                namespace=file.namespace, sample_id=file.sample_id, dtype="BF16", layer_ids=[0], hidden_size=1, rows_max=1
            )
            found.damaged |= file.nbytes > 0
        sample = SampleState(serial, "", opened, commit=found.commit, file=file, commit_spooled=True)
        for header, place in found.chunks:
            self._restore_chunk(sample, header, place)
        if sample.failure is not None:
            pass
        elif found.damaged:
            sample.failure = (Damaged.code, "the spool's file of the sample is damaged")
        elif found.abort is not None:
            sample.failure = (found.abort.code, found.abort.message)
        elif found.commit is None:
            sample.failure = (Interrupted.code, "the engine stopped before the sample was whole")
        return sample

    def _restore_chunk(self, sample: SampleState, header: ingest_pb2.ChunkHeader, place: Place) -> None:
        """A chunk as the file has it, or in pieces that fit a slot of this engine's staging."""
        row_bytes = place.nbytes // header.rows
        rows_max = self._pool.slot_bytes // row_bytes
        if rows_max == 0:
            sample.failure = (TooLarge.code, f"a spooled row of {row_bytes} bytes is longer than this engine's chunk_bytes")
            return
        for at in range(0, header.rows, rows_max):
            rows = min(rows_max, header.rows - at)
            chunk = ChunkState(header.first_row + at, rows, rows * row_bytes, header.xxh3, None)
            chunk.place, chunk.skip = place, at * row_bytes
            sample.add(chunk)
