"""One committed sample being read. Nothing is served before its header, its size and the rows' hashes were checked.

Plain reads, no mmap: a file that somebody truncates under a mapping kills the process, here it is an error of one read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from slotstream.store.disk.files import Files, store_error
from slotstream.store.disk.retrying import is_fact, retried
from slotstream.store.records import SampleRecord
from slotstream.store.sample.file import SampleFile, read_sample_file, unpack_token_ids
from slotstream.wire.columns import TOKEN_IDS
from slotstream.wire.errors import BadLayers, BadTokenRange, Damaged, IoError, SlotStreamError, StoreFull
from slotstream.wire.hashing import Buffer, to_hex, xxh3
from slotstream.wire.layout import byte_runs, column_rows, groups_of, pick

BLOCK_BYTES = 1 << 21  # A whole hash group: a message costs both ends as much as some hundred KiB of rows do.
_PIECES_MAX = 4096  # Reads in one block of a layer subset.


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows [first_row, first_row + rows) as consecutive pieces of bytes."""

    first_row: int
    rows: int
    data: Sequence[Buffer]


class SampleReader:
    """An open sample file. It stays readable when the sample is deleted meanwhile. Use as a context manager."""

    def __init__(self, files: Files, path: Path, record: SampleRecord, closed: Callable[[], None] = lambda: None) -> None:
        """`closed` is called once, by `close`. Raises Damaged when the file is not the one that `record` describes,
        UnsupportedFormat when it is and cannot be read, FileNotFoundError and OSError. Nothing is open then, and `closed` is
        not called.
        """
        self.record = record
        self._files = files
        self._closed: Callable[[], None] = lambda: None
        self._fd = retried(lambda: files.open_read(path))
        try:
            self.file = self._checked()
        except BaseException:
            self.close()
            raise
        self._closed = closed

    def _checked(self) -> SampleFile:
        file = read_sample_file(self._files, self._fd, self.record.header_xxh3)
        if file.key != self.record.key or file.header_xxh3 != self.record.header_xxh3:
            raise Damaged("the file is not the one that was committed under this id")
        return file

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)
            self._closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def check_range(self, start: int, stop: int | None) -> tuple[int, int]:
        """[start, stop) with `stop` filled in. Raises BadTokenRange unless 0 <= start <= stop <= rows of the sample."""
        return checked_range(start, stop, self.file.header.num_tokens)

    def positions(self, layer_ids: Sequence[int]) -> list[int]:
        """Where in a row the wanted layers are. Raises BadLayers for one that is not stored, or named twice."""
        return positions_of(layer_ids, self.file.layer_ids)

    def token_ids(self, start: int, stop: int) -> array[int]:
        """Ids of rows [start, stop), checked. Raises Damaged."""
        return unpack_token_ids(self.column(TOKEN_IDS, start, stop))

    def column(self, name: str, start: int, stop: int, positions: Sequence[int] | None = None) -> memoryview:
        """Rows [start, stop) of a column other than hidden states, checked; of the layers at `positions` (None: all) where it
        has some. Raises Damaged.
        """
        place = self.file.header.place_of(name)
        raw = self._read_right(place.nbytes, place.begin, self.file.column_xxh3[name])
        if raw is None:
            raise Damaged(f"column {name} does not match its hash")
        return column_rows(place.column, raw, start, stop, positions)

    def blocks(
        self, start: int, stop: int, positions: Sequence[int] | None = None, *, verify: bool = True
    ) -> Iterator[RowBlock]:
        """Rows [start, stop) in blocks of at most about BLOCK_BYTES, of the layers at `positions` (None: whole rows).

        Rows are checked against their hashes before they are handed out; for that, whole groups of rows are read, for any
        choice of layers. Not `verify`: fewer than half of the layers are read alone, and nothing says whether they are damaged.
        Raises Damaged.
        """
        if positions is None or list(positions) == list(range(self.file.header.row_format.num_layers)):
            return self._whole_rows(start, stop)
        if verify or 2 * len(positions) >= self.file.header.row_format.num_layers:  # Picking half of them costs no less.
            return self._picked_layers(start, stop, positions)
        return self._layers_alone(start, stop, positions)

    def _whole_rows(self, start: int, stop: int) -> Iterator[RowBlock]:
        row_bytes, hash_rows = self.file.header.row_bytes, self.file.hash_rows
        step = max(1, BLOCK_BYTES // row_bytes)
        for group in groups_of(start, stop, hash_rows):
            group_start = group * hash_rows
            data = memoryview(self.read_group(group))
            until = min(stop, group_start + hash_rows)
            # Groups of very long samples are larger than a message.
            for first in range(max(start, group_start), until, step):
                last = min(first + step, until)
                part = data[(first - group_start) * row_bytes : (last - group_start) * row_bytes]
                yield RowBlock(first, last - first, (part,))

    def read_group(self, group: int) -> Buffer:
        """All rows of one hash group, checked. Raises Damaged."""
        header = self.file.header
        start = group * self.file.hash_rows
        rows = min(self.file.hash_rows, header.num_tokens - start)
        wanted = to_hex(self.file.hashes[group])
        data = self._read_right(rows * header.row_bytes, header.header_bytes + start * header.row_bytes, wanted)
        if data is None:
            raise Damaged(f"rows [{start}, {start + rows}) do not match their hash")
        return data

    def _picked_layers(self, start: int, stop: int, positions: Sequence[int]) -> Iterator[RowBlock]:
        row_bytes, runs = self.file.header.row_bytes, self._runs(positions)
        step = max(1, _PIECES_MAX // len(runs))
        for block in self._whole_rows(start, stop):
            whole = memoryview(block.data[0])
            for first in range(0, block.rows, step):
                last = min(first + step, block.rows)
                pieces = pick(whole[first * row_bytes : last * row_bytes], row_bytes, runs)
                yield RowBlock(block.first_row + first, last - first, pieces)

    def _layers_alone(self, start: int, stop: int, positions: Sequence[int]) -> Iterator[RowBlock]:
        header = self.file.header
        runs = self._runs(positions)
        step = max(1, min(BLOCK_BYTES // sum(end - begin for begin, end in runs), _PIECES_MAX // len(runs)))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            rows_at = range(header.header_bytes + first * header.row_bytes, header.rows_end, header.row_bytes)
            pieces = [self._read(end - begin, at + begin) for at in rows_at[: last - first] for begin, end in runs]
            yield RowBlock(first, last - first, pieces)

    def _runs(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        return byte_runs(positions, self.file.header.row_format.layer_bytes)

    def _read_right(self, nbytes: int, at: int, hash_hex: str) -> Buffer | None:
        """Bytes that match their hash; None when they were read twice, and did not."""
        for _ in range(2):
            data = self._read(nbytes, at)
            if to_hex(xxh3(data)) == hash_hex:
                return data
        return None

    def _read(self, nbytes: int, at: int) -> Buffer:
        try:
            data = retried(lambda: self._files.pread_view(self._fd, nbytes, at))
        except OSError as error:
            raise unreadable(error) from error
        if len(data) < nbytes:
            raise Damaged("the file became shorter while it was read")
        return data


def checked_range(start: int, stop: int | None, rows: int) -> tuple[int, int]:
    """As `SampleReader.check_range`, of a sample of so many rows."""
    stop = rows if stop is None else stop
    if not 0 <= start <= stop <= rows:
        raise BadTokenRange(f"rows [{start}, {stop}) are not a range of a sample of {rows} rows")
    return start, stop


def positions_of(layer_ids: Sequence[int], stored: Sequence[int]) -> list[int]:
    """As `SampleReader.positions`, of a sample with the layers `stored`."""
    where = {layer: at for at, layer in enumerate(stored)}
    if unknown := sorted(set(layer_ids) - where.keys()):
        raise BadLayers(f"layers {unknown[:8]} are not among the sample's {list(stored)[:64]}")
    if len(set(layer_ids)) != len(layer_ids):
        raise BadLayers("a layer is named twice")
    return [where[layer] for layer in layer_ids]


def unreadable(error: OSError) -> SlotStreamError:
    """What a read is answered with: StoreFull while the process is out of descriptors; Damaged where something else is in the
    file's place; else IoError, which says nothing about the file's bytes.
    """
    failure = store_error(error, "opening or reading the sample's file")
    if isinstance(failure, StoreFull):
        return failure
    return Damaged(str(failure)) if is_fact(error) else IoError(str(failure))
