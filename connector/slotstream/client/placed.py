"""Rows taken out of a sample's own file, where the server's data directory is at hand: checked, and copied once."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slotstream.wire.errors import Damaged
from slotstream.wire.hashing import HASH_HEX_CHARS, xxh3
from slotstream.wire.layout import decode_header, header_length

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # A FIFO in its place must not hang the reader.


class NotInPlaceError(Exception):
    """The file at hand is not that of the sample: the rows have to come from the server."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [first_row, first_row + rows) of a file, whole, in `data`."""

    first_row: int
    rows: int
    data: memoryview


class SampleFile:
    """An open sample file. It stays readable when the sample is deleted or replaced meanwhile."""

    def __init__(self, path: Path, header_xxh3: int) -> None:
        """Raises NotInPlaceError when there is no such file, or its header is not the one that the server hashed."""
        self._fd = -1
        try:
            self._fd = os.open(path, _FLAGS)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise NotInPlaceError(f"{path} is not a file")
            raw = os.pread(self._fd, header_length(os.pread(self._fd, 8, 0)), 0)
            if xxh3(raw) != header_xxh3:
                raise NotInPlaceError(f"{path} is not the file of the sample that the server knows")
            self.header = decode_header(raw)
            self._hash_rows, self._hashes = int(self.header.metadata["hash_rows"]), self.header.metadata["hashes"]
        except OSError as error:
            self.close()
            raise NotInPlaceError(f"{path}: {os.strerror(error.errno or 0)}") from error
        except (Damaged, KeyError, ValueError) as error:
            self.close()
            raise NotInPlaceError(f"{path}: {error}") from error
        except NotInPlaceError:
            self.close()
            raise

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def rows(self, start: int, stop: int, *, verify: bool, into: memoryview | None = None) -> Iterator[Rows]:
        """Rows [start, stop) in order, a group of hashed rows (about 2 MiB) at a time; raises Damaged.

        into: [stop - start] rows of memory to read them into, where a group is wanted whole; the others are copied there.
        """
        row_bytes = self.header.row_bytes
        for group in range(start // self._hash_rows, -(-stop // self._hash_rows) if stop > start else 0):
            first = group * self._hash_rows
            last = min(first + self._hash_rows, self.header.num_tokens)
            begin, end = max(first, start), min(last, stop)
            target = None if into is None else into[(begin - start) * row_bytes : (end - start) * row_bytes]
            whole = (begin, end) == (first, last)
            data = target if whole and target is not None else memoryview(bytearray((last - first) * row_bytes))
            self._fill(data, self.header.header_bytes + first * row_bytes)
            if verify and xxh3(data) != int(self._hashes[group * HASH_HEX_CHARS : (group + 1) * HASH_HEX_CHARS], 16):
                raise Damaged(f"rows [{first}, {last}) do not match their hash")
            part = data[(begin - first) * row_bytes : (end - first) * row_bytes]
            if target is not None and not whole:
                target[:] = part
            yield Rows(begin, end - begin, part)

    def _fill(self, data: memoryview, at: int) -> None:
        done = 0
        while done < data.nbytes:
            try:
                count = os.preadv(self._fd, [data[done:]], at + done)
            except OSError as error:
                raise Damaged(f"the sample's file cannot be read: {os.strerror(error.errno or 0)}") from error
            if not count:
                raise Damaged("the file became shorter while it was read")
            done += count


def picked(block: Rows, row_bytes: int, positions: Sequence[int], layer_bytes: int) -> memoryview:
    """The layers at `positions` of whole rows, [rows, layers wanted, hidden], in memory of their own."""
    pieces = [
        block.data[row * row_bytes + position * layer_bytes :][:layer_bytes]
        for row in range(block.rows)
        for position in positions
    ]
    return memoryview(b"".join(pieces))
