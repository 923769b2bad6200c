"""Reads rows out of a sample's own file, where the server's data directory can be reached: checked, and copied once."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import Damaged, IoError, UnsupportedFormat
from slotstream.wire.hashing import xxh3
from slotstream.wire.layout import HEADER_BYTES_MAX, decode_hashes, decode_header, group_count, groups_of, header_length

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # A FIFO in its place must not hang the reader.


class WrongFileError(Exception):
    """The file at hand is not that of the sample: the rows have to come from the server."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows of a file are, and what they are checked with."""

    header_bytes: int
    row_bytes: int
    num_rows: int
    hash_rows: int
    hashes: Sequence[int]  # of each group of `hash_rows` rows

    def __post_init__(self) -> None:
        """Raises Damaged where they cannot be those of a file."""
        if not 0 < self.header_bytes <= HEADER_BYTES_MAX or self.hash_rows < 1:
            raise Damaged("the file cannot be as it is described")
        if len(self.hashes) != group_count(self.num_rows, self.hash_rows):
            raise Damaged("the file's row hashes do not fit its rows")


class SampleFile:
    """An open sample file. It stays readable when the sample is deleted or replaced meanwhile."""

    def __init__(self, path: str, header_xxh3: int, row_format: RowFormat, num_rows: int, places: Places | None) -> None:
        """`places`: as the server says, or None where it leaves that to the header.

        Raises WrongFileError when there is no such file, its header is not the one that the server hashed, it is not one of
        these rows, or it has columns that only the server knows.
        """
        self._fd = -1
        try:
            self._fd = os.open(path, _FLAGS)
            raw = self._checked_header(header_xxh3, 0 if places is None else places.header_bytes)
            self._places = places or _places_of(raw, row_format, num_rows)
        except (OSError, Damaged, UnsupportedFormat, KeyError, ValueError) as error:
            self.close()
            why = os.strerror(error.errno or 0) if isinstance(error, OSError) else error
            raise WrongFileError(f"{path}: {why}") from error

    def _checked_header(self, header_xxh3: int, nbytes: int) -> bytes:
        """`nbytes`: of the header; 0: as the file says."""
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise Damaged("this is not a file")
        raw = os.pread(self._fd, nbytes or header_length(os.pread(self._fd, 8, 0)), 0)
        if xxh3(raw) != header_xxh3:
            raise Damaged("this is not the file of the sample that the server knows")
        return raw

    @property
    def row_bytes(self) -> int:
        """Of a row as stored."""
        return self._places.row_bytes

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
        places, row_bytes = self._places, self._places.row_bytes
        for group in groups_of(start, stop, places.hash_rows):
            first = group * places.hash_rows
            last = min(first + places.hash_rows, places.num_rows)
            begin, end = max(first, start), min(last, stop)
            target = None if into is None else into[(begin - start) * row_bytes : (end - start) * row_bytes]
            whole = (begin, end) == (first, last)
            data = target if whole and target is not None else memoryview(bytearray((last - first) * row_bytes))
            self._fill(data, places.header_bytes + first * row_bytes)
            if verify and xxh3(data) != places.hashes[group]:
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


def _places_of(raw: bytes, row_format: RowFormat, num_rows: int) -> Places:
    """Those that a file's header names. Raises Damaged, UnsupportedFormat, KeyError and ValueError."""
    header = decode_header(raw)
    if (header.row_format, header.num_tokens) != (row_format, num_rows):
        raise Damaged("this is not what the server says of the sample")
    hash_rows = int(header.metadata["hash_rows"])
    hashes = decode_hashes(header.metadata["hashes"], num_rows, hash_rows)
    return Places(header.header_bytes, header.row_bytes, num_rows, hash_rows, hashes)
