"""Reads rows out of a sample's own file: checked, and copied once. Where the server's data directory can be reached, or where
the server sent the file.
"""

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
            known = os.fstat(self._fd)
            if not stat.S_ISREG(known.st_mode):
                raise Damaged("this is not a file")
            self._size = known.st_size
            raw = self._checked_header(header_xxh3, 0 if places is None else places.header_bytes)
            self._places = self._described(raw, fits) if places is None else places
        except (IoError, *_WRONG) as error:
            raise self._wrong(error) from error

    def _described(self, raw: bytes, fits: Callable[[SampleHeader], bool]) -> Places:
        """As the header says, whose hash is the right one. Raises Damaged, UnsupportedFormat, KeyError and ValueError."""
        self.header = decode_header(raw)
        if self.header.file_bytes != self._size or not fits(self.header):
            raise Damaged("this is not what the server says of the sample")
        return _places_of(self.header)

    def _wrong(self, error: Exception) -> WrongFileError:
        self.close()
        return WrongFileError(f"{self._path}: {os.strerror(error.errno or 0) if isinstance(error, OSError) else error}")

    def _checked_header(self, header_xxh3: int, nbytes: int) -> bytes:
        """`nbytes`: of the header; 0: as the file says. Raises Damaged and IoError."""
        raw = bytes(self._read(nbytes or header_length(bytes(self._read(8, 0))), 0))
        if xxh3(raw) != header_xxh3:
            raise Damaged("this is not the file of the sample that the server knows")
        return raw

    def column(self, name: str, start: int, stop: int, positions: Sequence[int] | None) -> bytes:
        """Rows [start, stop) of a column but hidden states, checked; of the layers at `positions` (None: all) if it has some.

        Of a file whose header was read. Raises WrongFileError: the server looks at it, and says what it is.
        """
        try:
            place, entries = self.header.place_of(name), self.header.metadata
            raw = self._read(place.nbytes, place.begin)
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
            at = places.header_bytes + first * row_bytes
            data = self._read((last - first) * row_bytes, at, target if whole else None)
            if verify and xxh3(data) != places.hashes[group]:
                raise Damaged(f"rows [{first}, {last}) do not match their hash")
            part = data[(begin - first) * row_bytes : (end - first) * row_bytes]
            if target is not None and not whole:
                target[:] = part
            yield begin, part

    def _read(self, nbytes: int, at: int, into: memoryview | None = None) -> memoryview:
        """Bytes of the file, in `into` where that is given. Raises Damaged and IoError."""
        data = memoryview(bytearray(nbytes)) if into is None else into
        done = 0
        while done < data.nbytes:
            try:
                count = os.preadv(self._fd, [data[done:]], at + done)
            except OSError as error:
                raise IoError(f"the sample's file cannot be read: {os.strerror(error.errno or 0)}") from error
            if not count:
                raise Damaged("the file became shorter while it was read")
            done += count
        return data


class SentFile(SampleFile):
    """A sample's file that the server sent, and did not check: all of it is checked before a row is handed out."""

    def __init__(self, raw: memoryview, header_xxh3: int, fits: Callable[[SampleHeader], bool]) -> None:
        """Raises WrongFileError, as SampleFile does, and where rows do not match their hashes."""
        self._fd = -1
        self._path = "what the server sent"
        self._raw, self._size = raw, raw.nbytes
        try:
            self._places = self._described(self._checked_header(header_xxh3, 0), fits)
            for _ in super().rows(0, self._places.num_rows, verify=True):
                pass
        except _WRONG as error:
            raise self._wrong(error) from error

    def rows(self, start: int, stop: int, *, verify: bool, into: memoryview | None = None) -> Iterator[tuple[int, memoryview]]:
        """As `SampleFile.rows`: they were checked before."""
        return super().rows(start, stop, verify=False, into=into)

    def _read(self, nbytes: int, at: int, into: memoryview | None = None) -> memoryview:
        """See `SampleFile`. Raises Damaged."""
        data = self._raw[at : at + nbytes]
        if data.nbytes != nbytes:
            raise Damaged("the file is shorter than its header says")
        if into is None:
            return data
        into[:] = data
        return into


def _places_of(header: SampleHeader) -> Places:
    """Those that a file's header names. Raises Damaged, KeyError and ValueError."""
    hash_rows = int(header.metadata["hash_rows"])
    hashes = decode_hashes(header.metadata["hashes"], header.num_tokens, hash_rows)
    return Places(header.header_bytes, header.row_bytes, header.num_tokens, hash_rows, hashes)
