"""Reads rows out of a sample's own file, where the server's data directory can be reached: checked, and copied once."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from slotstream.wire.errors import Damaged, IoError, UnsupportedFormat
from slotstream.wire.hashing import xxh3
from slotstream.wire.layout import SampleHeader, decode_hashes, decode_header, groups_of, header_length

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # A FIFO in its place must not hang the reader.


class WrongFileError(Exception):
    """The file at hand is not that of the sample: the rows have to come from the server."""


class SampleFile:
    """An open sample file. It stays readable when the sample is deleted or replaced meanwhile."""

    def __init__(self, path: Path, header_xxh3: int) -> None:
        """Raises WrongFileError when there is no such file, its header is not the one that the server hashed, or it has columns
        that only the server knows.
        """
        self._fd = -1
        try:
            self._fd = os.open(path, _FLAGS)
            self.header = self._checked_header(header_xxh3)
            self._hash_rows = int(self.header.metadata["hash_rows"])
            self._hashes = decode_hashes(self.header.metadata["hashes"], self.header.num_tokens, self._hash_rows)
        except (OSError, Damaged, UnsupportedFormat, KeyError, ValueError) as error:
            self.close()
            why = os.strerror(error.errno or 0) if isinstance(error, OSError) else error
            raise WrongFileError(f"{path}: {why}") from error

    def _checked_header(self, header_xxh3: int) -> SampleHeader:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise Damaged("this is not a file")
        raw = os.pread(self._fd, header_length(os.pread(self._fd, 8, 0)), 0)
        if xxh3(raw) != header_xxh3:
            raise Damaged("this is not the file of the sample that the server knows")
        return decode_header(raw)

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def rows(self, start: int, stop: int, *, verify: bool, into: memoryview | None = None) -> Iterator[tuple[int, memoryview]]:
        """Rows [start, stop) in order, a group of hashed rows (about 2 MiB) at a time: the first one's number, and all
        their bytes. Raises Damaged and IoError.

        into: [stop - start] rows of memory to read them into, where a group is wanted whole; the others are copied there.
        """
        row_bytes = self.header.row_bytes
        for group in groups_of(start, stop, self._hash_rows):
            first = group * self._hash_rows
            last = min(first + self._hash_rows, self.header.num_tokens)
            begin, end = max(first, start), min(last, stop)
            target = None if into is None else into[(begin - start) * row_bytes : (end - start) * row_bytes]
            whole = (begin, end) == (first, last)
            data = target if whole and target is not None else memoryview(bytearray((last - first) * row_bytes))
            self._fill(data, self.header.header_bytes + first * row_bytes)
            if verify and xxh3(data) != self._hashes[group]:
                raise Damaged(f"rows [{first}, {last}) do not match their hash")
            part = data[(begin - first) * row_bytes : (end - first) * row_bytes]
            if target is not None and not whole:
                target[:] = part
            yield begin, part

    def _fill(self, data: memoryview, at: int) -> None:
        done = 0
        while done < data.nbytes:
            try:
                count = os.preadv(self._fd, [data[done:]], at + done)
            except OSError as error:
                raise IoError(f"the sample's file cannot be read: {os.strerror(error.errno or 0)}") from error
            if not count:
                raise Damaged("the file became shorter while it was read")
            done += count
