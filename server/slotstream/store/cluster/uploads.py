"""A sample that arrives: its rows land in a scratch file, as in a partial, and go on to its object while more arrive."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from typing import Any

from slotstream.store.blobs.base import Blobs
from slotstream.store.cluster.reading import object_key
from slotstream.store.records import SampleRecord
from slotstream.store.sample.ranges import RangeSet
from slotstream.store.sample.upload import Upload
from slotstream.wire.errors import IoError
from slotstream.wire.hashing import Buffer


class ObjectUpload(Upload):
    """An `Upload` whose `partial` is scratch: what is committed is an object."""

    def __init__(self, *parts: Any, blobs: Blobs, threads: Executor, check_open: Callable[[str], None]) -> None:
        """`parts`: as `Upload` takes them. `threads`: they send. `check_open(attempt)` raises Interrupted once it may not."""
        self.attempt = secrets.token_hex(8)
        self.begun: Future[bool] = Future()  # Done once the catalogue knows of the attempt; set by the store.
        self.is_stored = False  # It is committed, by this server.
        self.is_sure = True  # Nothing that was sent may still arrive.
        super().__init__(*parts)
        bytes_max = self._exact_file_bytes()
        key = object_key(self.spec.key, self.attempt)
        self._put = blobs.put(key, bytes_max, self._read_scratch, lambda: check_open(self.attempt))
        self._threads = threads
        self._landed = RangeSet()  # Bytes of the file that are written.
        self._sends: dict[int, Future[None]] = {}
        self._sending = threading.Lock()  # Guards these two, and the descriptor.
        self._scratch_fd = -1
        self._is_over = False
        # One that fits a part is sent by its commit, and nobody has to count its bytes.
        self.written = self._rows_landed if bytes_max > self._put.part_bytes else None

    def begin_sending(self, begun: Future[bool]) -> None:
        """The catalogue knows of the attempt now, or does not take it."""
        if (error := begun.exception()) is not None:
            self.begun.set_exception(error)
        else:
            self.begun.set_result(begun.result())

    def _rows_landed(self, start: int, stop: int) -> None:
        """Rows [start, stop) are written: parts that are whole by that are sent. All but the first, which has the header."""
        size = self._put.part_bytes
        begin, end = self.header_bytes + start * self.spec.row_bytes, self.header_bytes + stop * self.spec.row_bytes
        with self._sending:
            self._landed.add(begin, end)
            for number in range(max(1, begin // size), end // size + 1):
                whole = not self._landed.gaps(number * size, (number + 1) * size)
                if whole and number not in self._sends and not self._is_over:
                    self._sends[number] = self._threads.submit(self._send, number)

    def _send(self, number: int) -> None:
        self.begun.result()
        self._put.send(number)

    def finish(self, record: SampleRecord) -> None:
        """The object is the whole sample, when this returns. Raises IoError, StoreFull and Interrupted."""
        self.begun.result()
        # One that failed is sent again.
        wait(list(self._sends.values()))
        self._put.forget(self.header_bytes + record.num_tokens * self.spec.row_bytes)
        # For good: what was sent again, since nobody answered, may still arrive.
        self.is_sure = False
        self._put.finish(record.file_bytes)

    def stop_sending(self) -> None:
        """Waits for parts that are under way."""
        with self._sending:
            self._is_over = True
        for send in self._sends.values():
            send.cancel()
        wait(list(self._sends.values()))
        self.close_scratch()

    def drop(self) -> None:
        """Nothing is left of the object, once nothing is sent any more. Raises IoError."""
        self._put.abort()

    def close_scratch(self) -> None:
        """No part is being sent any more."""
        with self._sending:
            fd, self._scratch_fd = self._scratch_fd, -1
        if fd >= 0:
            with suppress(OSError):
                self._files.close(fd)

    def _read_scratch(self, at: int, nbytes: int) -> Buffer:
        try:
            with self._sending:
                if self._scratch_fd < 0:  # Its own: the upload closes the other one when it ends.
                    self._scratch_fd = self._files.open_read(self.partial)
                fd = self._scratch_fd
            data = self._files.pread(fd, nbytes, at)
        except OSError as error:
            raise self._failure(error, "reading the scratch file") from error
        if len(data) < nbytes:
            raise IoError("rows that were written cannot be read back: the scratch file became shorter")
        return data
