"""Samples on their way back from the spool: what a file says, and rows through staging slots that are reserved for that."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from slotstream.connector.sending.phases import Phase
from slotstream.connector.sending.sample_state import ChunkState, SampleState
from slotstream.connector.sending.spool.disk_thread import DiskThread, ReadBack
from slotstream.connector.sending.spool.files import Place, SpooledSample, SpoolFile
from slotstream.connector.sending.staging_pool import StagingPool
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import Damaged, Interrupted, TooLarge


@dataclass(frozen=True, slots=True)
class Fetch:
    """Rows that are to come back for this try at sending the sample; in which staging slot, once it is known."""

    sample: SampleState
    sends: int
    chunk: ChunkState
    staging_slot: int = -1

    @property
    def is_wanted(self) -> bool:
        """Whether the sample is still open as it was when they were asked for."""
        return self.sample.phase is Phase.OPEN and self.sample.sends == self.sends


class SpoolReader:
    """For the pump's thread. Without a disk nothing ever comes back.

    Rows come back through the pool's reserved slots, so that they lie where every transport can send from, and so that a
    full staging and a full spool cannot wait for each other.
    """

    def __init__(self, disk: DiskThread | None, pool: StagingPool) -> None:
        self._disk = disk
        self._pool = pool
        self._free_slots = list(pool.reserved_slots)
        self._fetches: deque[Fetch] = deque()

    def adopt(self) -> None:
        """Look for what dead engines left."""
        if self._disk is not None:
            self._disk.adopt()

    def load(self, file: SpoolFile) -> None:
        """Read what an adopted file says."""
        assert self._disk is not None
        self._disk.load(file)

    def fetch(self, sample: SampleState, chunk: ChunkState) -> None:
        """Have rows of an open sample read back, once `read_more` finds a slot for them."""
        self._fetches.append(Fetch(sample, sample.sends, chunk))

    def read_more(self) -> None:
        """Ask for as many rows as there are slots for."""
        while self._fetches and self._free_slots:
            fetch = self._fetches.popleft()
            if not fetch.is_wanted:
                continue
            sample, chunk = fetch.sample, fetch.chunk
            assert self._disk is not None
            assert sample.file is not None
            assert chunk.place is not None
            staging_slot = self._free_slots.pop()
            into = self._pool.buffer(staging_slot, chunk.nbytes)
            token = Fetch(sample, fetch.sends, chunk, staging_slot)
            self._disk.read(sample.file, chunk.place, chunk.skip, into, token)

    def link_down(self) -> None:
        """Nothing is wanted for the stream that broke; what is being read comes back and is not wanted either."""
        self._fetches.clear()

    def read_back(self, event: ReadBack) -> Fetch | None:
        """Whose rows came back; None when nobody wants them any more."""
        fetch = event.token
        assert isinstance(fetch, Fetch)
        if fetch.is_wanted:
            return fetch
        self.give_back(fetch.staging_slot)
        return None

    def give_back(self, staging_slot: int) -> None:
        """A slot that rows came back through is free for the next."""
        self._free_slots.append(staging_slot)
        self.read_more()

    def restore(self, file: SpoolFile, found: SpooledSample, serial: int) -> tuple[SampleState, tuple[str, str] | None]:
        """The sample of an adopted file; with code and message, where it cannot be stored."""
        opened = found.opened
        if opened is None or (opened.namespace, opened.sample_id) != (file.namespace, file.sample_id):
            found.damaged |= opened is not None  # Not where the writer died before it had said anything.
            opened = ingest_pb2.OpenSample(
                namespace=file.namespace, sample_id=file.sample_id, dtype="BF16", layer_ids=[0], hidden_size=1, rows_max=1
            )
        sample = SampleState(serial, "", opened, commit=found.commit, file=file, commit_spooled=True)
        for header, place in found.chunks:
            row_bytes = place.nbytes // header.rows
            if row_bytes > self._pool.slot_bytes:
                too_large = f"a spooled row of {row_bytes} bytes is longer than this engine's chunk_bytes"
                return sample, (TooLarge.code, too_large)
            self._restore_chunk(sample, header, place, row_bytes)
        if found.damaged:
            return sample, (Damaged.code, "the spool's file of the sample is damaged")
        if found.abort is not None:
            return sample, (found.abort.code, found.abort.message)
        if found.commit is None:
            return sample, (Interrupted.code, "the engine stopped before the sample was whole")
        return sample, None

    def _restore_chunk(self, sample: SampleState, header: ingest_pb2.ChunkHeader, place: Place, row_bytes: int) -> None:
        """A chunk as the file has it, or in pieces that fit a slot of this engine's staging."""
        rows_max = self._pool.slot_bytes // row_bytes
        for at in range(0, header.rows, rows_max):
            rows = min(rows_max, header.rows - at)
            chunk = ChunkState(header.first_row + at, rows, rows * row_bytes, header.xxh3, None)
            chunk.place, chunk.skip = place, at * row_bytes
            sample.add(chunk)
