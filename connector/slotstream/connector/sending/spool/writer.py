"""What of which sample is written to the spool, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from slotstream.connector.sending.failure_reports import Report
from slotstream.connector.sending.sample_state import ChunkState, SampleState
from slotstream.connector.sending.spool.disk_thread import Appended, DiskThread
from slotstream.connector.sending.spool.files import COLUMNS_SUFFIX, SUFFIX, Place, SpoolFile
from slotstream.connector.sending.staging_pool import StagingPool
from slotstream.v1 import ingest_pb2

_REST_S = 1.0  # After a refusal nothing is written for so long.


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a sample's file that was asked for: a chunk's, or the one at either end."""

    sample: SampleState
    chunk: ChunkState | None


class SpoolWriter:
    """For the pump's thread, but for `taking_rows`. Without a disk nothing is ever written."""

    def __init__(self, disk: DiskThread | None, pool: StagingPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._disk = disk
        self._pool = pool
        self._clock = clock
        self._rest_until = 0.0
        self._behind = False  # Something was refused or not asked for, and is still wanted.
        self._answered_at = 0.0
        self.writing = 0  # Records asked for and not answered.

    def taking_rows(self, within_s: float) -> bool:
        """Whether room in staging may come from the spool: it writes now, and answered a few seconds ago at most."""
        return self.writing > 0 and self._clock() - self._answered_at < within_s

    def put(self, sample: SampleState) -> None:
        """Have everything of a sample written that is not there yet."""
        for chunk in sample.chunks:
            self.put_chunk(sample, chunk)
        if not sample.chunks:
            self._file(sample)
        self.put_commit(sample)

    def put_chunk(self, sample: SampleState, chunk: ChunkState) -> None:
        """Have a chunk written, unless it is there, or not in memory. Its staging slot is in use until `appended` says so."""
        if chunk.place is not None or chunk.writing or chunk.staging_slot is None:
            return
        file = self._file(sample)
        if file is None:
            return
        if chunk.ticket:
            if not self._pool.reclaim(chunk.ticket):
                chunk.ticket, chunk.staging_slot = 0, None
                return
            chunk.ticket = 0
        header = ingest_pb2.ChunkHeader(first_row=chunk.first_row, rows=chunk.rows, xxh3=chunk.digest)
        chunk.writing = True
        data = self._pool.buffer(chunk.staging_slot, chunk.nbytes)
        self._append(file, ingest_pb2.IngestRequest(chunk=header), data, Record(sample, chunk))

    def relieve(self, sample: SampleState, chunk: ChunkState) -> bool:
        """Have rows written that the server has taken, while the link is up: where staging gets short, and the spool has time.

        Their staging slot would soon be taken, and with it the chance to send the sample again. Nobody waits for this.
        """
        pool = self._pool
        if self._disk is None or pool.free * 4 >= pool.num_slots or self.writing * 8 >= pool.num_slots:
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
            self._append(file, ingest_pb2.IngestRequest(commit=sample.commit), None, Record(sample, None))

    def put_report(self, report: Report) -> SpoolFile | None:
        """A file that says no more than that the sample failed; None where nothing can be written now."""
        if not self._may_write():
            return None
        opened = ingest_pb2.OpenSample.FromString(report.opened)
        file = SpoolFile(report.serial, opened.namespace, opened.sample_id)
        abort = ingest_pb2.AbortSample(code=report.fault.code, message=report.fault.message)
        self._append(file, ingest_pb2.IngestRequest(open=opened), None, None)
        self._append(file, ingest_pb2.IngestRequest(abort=abort), None, report)
        return file

    def _file(self, sample: SampleState) -> SpoolFile | None:
        """The sample's file, begun if need be; None where nothing can be written now."""
        if not self._may_write():
            return None
        if sample.file is None:
            opened = sample.opened
            suffix = COLUMNS_SUFFIX if opened.columns else SUFFIX
            sample.file = SpoolFile(sample.serial, opened.namespace, opened.sample_id, suffix=suffix)
            self._append(sample.file, ingest_pb2.IngestRequest(open=opened), None, Record(sample, None))
        return sample.file

    def _may_write(self) -> bool:
        """Whether there is a disk that is not resting; what is not written while it rests is asked for again."""
        if self._disk is None:
            return False
        resting = self._resting()
        self._behind |= resting
        return not resting

    def _resting(self) -> bool:
        return self._clock() < self._rest_until

    def _append(
        self, file: SpoolFile, request: ingest_pb2.IngestRequest, data: memoryview | None, token: Record | Report | None
    ) -> None:
        assert self._disk is not None
        if not self.writing:
            self._answered_at = self._clock()
        self.writing += 1
        self._disk.append(file, request, data, token)

    def appended(self, event: Appended) -> Record | None:
        """The disk wrote a record, or refused; which, if it is a sample's. A chunk's staging slot is not in use any more."""
        self.writing -= 1
        if event.offset is None:
            self._rest_until = self._clock() + _REST_S
            self._behind = True
        else:
            self._answered_at = self._clock()
        if not isinstance(event.token, Record):
            return None
        self._took(event.token.sample, event.token.chunk, event.offset)
        return event.token

    def _took(self, sample: SampleState, chunk: ChunkState | None, offset: int | None) -> None:
        if chunk is not None:
            chunk.writing = False
            if offset is not None:
                chunk.place = Place(offset, chunk.nbytes, chunk.digest)
                sample.unspooled -= 1
        elif offset is None:
            sample.commit_spooled = False
            if sample.file is not None and not sample.file.nbytes:
                sample.file = None  # Its first record was refused: nothing can follow.

    def stay_behind(self) -> None:
        """Not all was asked for again."""
        self._behind = True

    def is_behind(self) -> bool:
        """Whether it is time to ask again for what was refused. Once."""
        if not self._behind or self._resting():
            return False
        self._behind = False
        return True

    def drop(self, file: SpoolFile) -> None:
        """A sample needs its file no longer."""
        if self._disk is not None:
            self._disk.drop(file)
