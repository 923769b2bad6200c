"""The spool's disk without its thread: it does a task when a test says so, and may be full, or die with its process."""

from __future__ import annotations

import errno
import os
import queue
from collections import deque
from pathlib import Path

from slotstream.connector.counters import Counters
from slotstream.connector.sending.spool.disk_thread import DiskThread, Loaded, ReadBack, SpoolEvent
from slotstream.connector.sending.spool.files import OwnedDir, Place, SpoolFile
from slotstream.v1 import ingest_pb2
from slotstream.wire.hashing import xxh3


class HandDisk(DiskThread):
    """`events`: its answers, in order, which nobody has been given yet. `full`: writes are refused. `failing`: reads are."""

    def __init__(self, base: Path, bytes_max: int, counters: Counters) -> None:
        self.events: deque[SpoolEvent] = deque()
        self.full = False
        self.failing = False
        super().__init__(base, bytes_max, counters, self.events.append)

    @property
    def is_behind(self) -> bool:
        """Whether something is still to be done, or to be heard of."""
        return bool(self.events) or not self._tasks.empty()

    def step(self) -> bool:
        """Do the next task; False when there is none."""
        try:
            task = self._tasks.get_nowait()
        except queue.Empty:
            return False
        assert task is not None
        task()
        return True

    def die(self) -> None:
        """As the death of the process: locks are released, and nothing else is done."""
        for owned in self._owned():
            os.close(owned.lock_fd)

    def close(self, timeout_s: float = 0.0) -> None:
        """Do all that was asked, and leave the rest to the next owner."""
        while self.step():
            pass
        for owned in self._owned():
            owned.give_up()

    def _owned(self) -> list[OwnedDir]:
        return [*self._adopted, *([self._own] if self._own is not None else [])]

    def _append(self, file: SpoolFile, request: ingest_pb2.IngestRequest, data: memoryview | None, token: object) -> None:
        assert data is None or xxh3(data) == request.chunk.xxh3, "rows changed before they were written"
        super()._append(file, request, data, token)

    def _read(self, file: SpoolFile, place: Place, skip: int, into: memoryview, token: object) -> None:
        if self.failing:
            self._post(ReadBack(token, None, later=True))
        else:
            super()._read(file, place, skip, into, token)

    def _load(self, file: SpoolFile) -> None:
        if self.failing:
            self._post(Loaded(file, None))
        else:
            super()._load(file)

    def _place(self, file: SpoolFile) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "no space left", str(self._base))
        super()._place(file)
