"""Reads rows out of a sample's own file, where the server's data directory can be reached: checked, and copied once."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slotstream.wire.columns import TOKEN_IDS
from slotstream.wire.errors import Damaged, IoError, UnsupportedFormat
from slotstream.wire.hashing import to_hex, xxh3
from slotstream.wire.layout import (
    COLUMNS_KEY,
    HEADER_BYTES_MAX,
    SampleHeader,
    column_rows,
    decode_columns,
    decode_hashes,
    decode_header,
    group_count,
    groups_of,
    header_length,
)

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # A FIFO in its place must not hang the reader.
_WRONG = (OSError, Damaged, UnsupportedFormat, KeyError, ValueError)  # What says that a file is not one to read from.


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

    def __init__(self, path: str, header_xxh3: int, fits: Callable[[SampleHeader], bool], places: Places | None) -> None:
        """`places`: as the server says, or None where it leaves that to the header, which `fits` what it says of the sample.

        Raises WrongFileError when there is no such file, its header is not the one that the server hashed, it does not fit, or
        it has columns that only the server knows.
        """
        self._fd = -1
        self._path = path
        try:
            self._fd = os.open(path, _FLAGS)
            raw = self._checked_header(header_xxh3, 0 if places is None else places.header_bytes)
            if places is None:
                self.header = decode_header(raw)
                if self.header.file_bytes != self._size or not fits(self.header):
                    raise Damaged("this is not what the server says of the sample")
                places = _places_of(self.header)
            self._places = places
        except _WRONG as error:
            raise self._wrong(error) from error

    def _wrong(self, error: Exception) -> WrongFileError:
        self.close()
        return WrongFileError(f"{self._path}: {os.strerror(error.errno or 0) if isinstance(error, OSError) else error}")

    def _checked_header(self, header_xxh3: int, nbytes: int) -> bytes:
        """`nbytes`: of the header; 0: as the file says."""
        known = os.fstat(self._fd)
        if not stat.S_ISREG(known.st_mode):
            raise Damaged("this is not a file")
        self._size = known.st_size
        raw = os.pread(self._fd, nbytes or header_length(os.pread(self._fd, 8, 0)), 0)
        if xxh3(raw) != header_xxh3:
            raise Damaged("this is not the file of the sample that the server knows")
        return raw

    def column(self, name: str, start: int, stop: int, positions: Sequence[int] | None) -> bytes:
        """Rows [start, stop) of a column but hidden states, checked; of the layers at `positions` (None: all) if it has some.

        Of a file whose header was read. Raises WrongFileError: the server looks at it, and says what it is.
        """
        try:
            place, entries = self.header.place_of(name), self.header.metadata
            raw = memoryview(bytearray(place.nbytes))
            self._fill(raw, place.begin)
            wanted = entries["token_ids_xxh3"] if name == TOKEN_IDS else self._further_hashes()[name]
            if to_hex(xxh3(raw)) != wanted:
                raise Damaged(f"column {name} does not match its hash")
        except (IoError, *_WRONG) as error:
            raise self._wrong(error) from error
        return bytes(column_rows(place.column, raw, start, stop, positions))

    def _further_hashes(self) -> dict[str, str]:
        return decode_columns(self.header.metadata.get(COLUMNS_KEY, ""), self.header.row_format)

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


def _places_of(header: SampleHeader) -> Places:
    """Those that a file's header names. Raises Damaged, KeyError and ValueError."""
    hash_rows = int(header.metadata["hash_rows"])
    hashes = decode_hashes(header.metadata["hashes"], header.num_tokens, hash_rows)
    return Places(header.header_bytes, header.row_bytes, header.num_tokens, hash_rows, hashes)
