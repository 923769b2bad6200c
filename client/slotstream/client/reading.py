"""Rows as they arrive, without torch: the facts first, then blocks of bytes in row order."""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from slotstream.client.info import SampleInfo
from slotstream.client.local_file import Places, SampleFile, SentFile, WrongFileError
from slotstream.client.rpc import WatchedStream
from slotstream.v1 import sample_pb2, samples_pb2
from slotstream.wire import dtypes
from slotstream.wire.columns import TOKEN_IDS, RowFormat
from slotstream.wire.errors import Damaged, Interrupted, ProtocolViolation, SlotStreamError
from slotstream.wire.frames import Frame, decode_reply
from slotstream.wire.layout import SampleHeader, byte_runs, file_path, pick
from slotstream.wire.names import LAYERS_MAX, ROWS_MAX, SAMPLE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows [first_row, first_row + rows) of the stored sample."""

    first_row: int
    rows: int
    data: memoryview  # [rows, layers, hidden], row-major, little-endian; the block keeps its memory alive


class RowReader:
    """The rows of one read. Iterate it once; leave its `with` block to end the call early.

    Every fact that the peer states is checked before it sizes a buffer, and the rows before they are handed out, so a
    consumer sees rows `start` to `stop` in order without a gap, or an exception.
    """

    info: SampleInfo  # of the whole stored sample
    layer_ids: tuple[int, ...]  # of the rows that follow, in their order
    start: int
    stop: int
    token_ids: array[int]  # signed 64-bit, one a row
    row_format: RowFormat  # of the rows that follow, and of `columns`
    columns: dict[str, bytes]  # what the sample has beside hidden states and token ids: name -> rows [start, stop)

    def __init__(
        self,
        stream: WatchedStream[bytes],
        request: samples_pb2.ReadRequest,
        *,
        header_limit_s: float,
        stall_limit_s: float,
        takes_file: bool = False,
    ) -> None:
        """Waits for the header. Raises what the server answered; ProtocolViolation when it answered something else.

        `takes_file`: the server may send the sample's file, and `take_sent_file` is called then.
        """
        self._begin(request, stream)
        self._stall_limit_s = stall_limit_s
        try:
            self._take_header(stream.receive(header_limit_s), request, takes_file=takes_file)
        except BaseException:
            stream.close()
            raise
        self._next_row = self.start

    def _begin(self, request: samples_pb2.ReadRequest, stream: WatchedStream[bytes] | None) -> None:
        self._stream = stream
        self._file: SampleFile | None = None  # Where the rows are taken from, if not from the stream.
        self._sent_file: memoryview | None = None  # Its bytes, where the server sent them.
        self._file_rows: Iterator[RowBlock] = iter(())
        self._taken: Callable[[], None] = lambda: None
        self._again: Callable[[RowReader, SlotStreamError], RowReader] | None = None
        self._verify = not request.unverified
        self._asked = request.namespace, request.sample_id
        self._known_columns = request.columns

    @classmethod
    def of_file(cls, data_dir: Path, info: SampleInfo, request: samples_pb2.ReadRequest) -> Self:
        """All rows of a committed sample that a listing told of, out of its file below `data_dir`: no server is asked.

        Raises WrongFileError where the file there is not the sample's, or has not what is wanted: the server says why.
        """
        reader = cls.__new__(cls)
        reader._begin(request, None)
        reader.info = info
        reader.layer_ids = tuple(request.layer_ids) or info.layer_ids
        reader.start, reader.stop = 0, info.num_tokens
        reader._next_row = 0
        reader._counted_by_call = True  # Servers that list such hashes take that.
        reader._is_all_in_place = True
        reader._header_xxh3 = int(info.header_xxh3 or "0", 16)
        if not set(reader.layer_ids) <= set(info.layer_ids):
            raise WrongFileError("the sample has not all the layers that are wanted")
        reader._take_file(data_dir)
        return reader

    @property
    def next_row(self) -> int:
        """The first row that has not been handed out, once iterating or `read_into` has begun."""
        return self._next_row

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def layer_names(self) -> tuple[str, ...]:
        """What people call the layers of the rows that follow, in their order."""
        if self.layer_ids == self.info.layer_ids:
            return self.info.layer_names
        names = dict(zip(self.info.layer_ids, self.info.layer_names, strict=True))
        return tuple(names[layer_id] for layer_id in self.layer_ids)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row [layers, hidden], of the layers wanted."""
        return self.row_format.row_bytes

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes

    def count_with(self, count: Callable[[SampleInfo, bool], None]) -> None:
        """Where this is a read of every row, and the server leaves it to the reader to say that it has them: call `count` once
        the last one is handed out, with the sample, and whether the server takes many at a time. Before iterating.
        """
        if self.num_rows == self.info.num_tokens and (self._counted_by_call or self._file is not None):
            self._taken = functools.partial(count, self.info, self._counted_by_call)  # Not of the reader: see `_blocks`.

    def was_taken(self) -> None:
        """All rows are handed out, by this reader or by those that went on where it broke."""
        taken, self._taken = self._taken, lambda: None
        taken()

    def take_from(self, data_dir: Path) -> None:
        """Take the rows out of the sample's file below `data_dir`.

        For a request that said `in_place`. Raises WrongFileError when the file there is not the sample's: nothing can be read
        then. A server too old to know `in_place` sends the rows, and nothing changes.
        """
        if self._header_xxh3 is None:
            return
        assert self._stream is not None, "there was a header"
        try:
            if self._stream.receive(self._stall_limit_s) is not None:  # Waited for: a call left early counts as cancelled.
                raise ProtocolViolation("the server sends rows that were to be taken out of the file")
        finally:
            self._stream.close()
        self._take_file(data_dir)

    def take_sent_file(self) -> None:
        """Where the server sent the sample's file: check it, and take everything out of it.

        Raises WrongFileError when it is not the sample's, or damaged: nothing can be read then, and the server says why.
        """
        if self._sent_file is None:
            return
        assert self._header_xxh3 is not None, "checked with the header"
        self._take_out_of(SentFile(self._sent_file, self._header_xxh3, self._fits))

    def _take_file(self, data_dir: Path) -> None:
        path = f"{data_dir}/{file_path(*self._asked)}"  # Of the names asked for: the peer's could be any path.
        assert self._header_xxh3 is not None, "it is known which file is meant"
        self._take_out_of(SampleFile(path, self._header_xxh3, self._fits, None if self._is_all_in_place else self._places()))

    def _take_out_of(self, file: SampleFile) -> None:
        self._file = file
        if self._is_all_in_place:
            self._take_columns_of(file)
        self._file_rows = self._rows_of(file)

    def _fits(self, header: SampleHeader) -> bool:
        """Whether a file's header is of the sample that the server described."""
        of_file, info = header.row_format, self.info
        shape = (header.num_tokens, of_file.num_layers, of_file.hidden_size, of_file.dtype)
        is_told = self._is_all_in_place or of_file.names == self.row_format.names
        return is_told and shape == (info.num_tokens, len(info.layer_ids), info.hidden_size, info.dtype)

    def _places(self) -> Places | None:
        """Where the server says that the file has its rows. Raises WrongFileError where that cannot be."""
        told, info = self._told_places, self.info
        if not told.header_bytes:
            return None
        row_bytes = RowFormat.of(info.dtype, len(info.layer_ids), info.hidden_size).row_bytes
        try:
            return Places(told.header_bytes, row_bytes, info.num_tokens, told.hash_rows, told.row_xxh3)
        except Damaged as error:
            raise WrongFileError(str(error)) from error

    def _take_columns_of(self, file: SampleFile) -> None:
        """Token ids and further columns. Raises WrongFileError where there is one that this reader does not know, but needs."""
        further = file.header.row_format.further
        if any(not column.optional and column.name not in self._known_columns for column in further):
            raise WrongFileError("the sample has a column that this reader does not know")
        names = [column.name for column in further if column.name in self._known_columns]
        positions = [self.info.layer_ids.index(layer) for layer in self.layer_ids] if names else None
        self.columns = {name: file.column(name, self.start, self.stop, positions) for name in names}
        self.row_format = RowFormat.of(self.info.dtype, len(self.layer_ids), self.info.hidden_size, names)
        self.token_ids = array("q", file.column(TOKEN_IDS, self.start, self.stop, None))
        if sys.byteorder == "big":
            self.token_ids.byteswap()

    def go_on_with(self, again: Callable[[RowReader, SlotStreamError], RowReader]) -> None:
        """Where `read_into` breaks, it goes on with the reader that `again(the one that broke, why)` returns. Or it raises."""
        self._again = again

    def read_into(self, memory: memoryview) -> None:
        """All rows, to `memory` of `nbytes` bytes; instead of iterating. Raises what iterating raises."""
        reader, done = self, 0
        while True:
            try:
                reader._read_rest(memory[done:])
                break
            except SlotStreamError as error:
                if self._again is None:
                    raise
                failed = error
            done = (reader.next_row - self.start) * self.row_bytes
            reader = self._again(reader, failed)
        if reader.start != self.start:  # Else it was one of all rows.
            self.was_taken()

    def _read_rest(self, memory: memoryview) -> None:
        if self._file is not None and self.layer_ids == self.info.layer_ids:
            self._file_rows = self._rows_of(self._file, memory)
            for _ in self:
                pass
            return
        for block in self:
            at = (block.first_row - self.start) * self.row_bytes
            memory[at : at + block.data.nbytes] = block.data

    def __iter__(self) -> Iterator[RowBlock]:
        return self

    def __next__(self) -> RowBlock:
        """Raises ProtocolViolation or Interrupted when the rows do not come as promised, and what the server answered."""
        try:
            block = self._next_block()
            if block is not None:
                self._next_row += block.rows
                return block
        except BaseException:
            self.close()
            raise
        self.close()
        if self._next_row != self.stop:
            raise Interrupted(f"the server ended the read at row {self._next_row}, before row {self.stop}")
        self.was_taken()
        raise StopIteration

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._file_rows = iter(())
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _take_header(self, frame: Frame | None, request: samples_pb2.ReadRequest, *, takes_file: bool) -> None:
        reply, data = decode_reply(frame) if frame is not None else (samples_pb2.ReadReply(), memoryview(b""))
        if reply.WhichOneof("kind") != "header":
            raise ProtocolViolation("the server's first reply to a read is not its header")
        header = reply.header
        self.info = SampleInfo.from_wire(header.info)
        self.layer_ids = tuple(header.layer_ids)
        self.start, self.stop = header.start, header.stop
        self._counted_by_call = header.counted_by_call
        self._header_xxh3 = header.header_xxh3 if header.HasField("header_xxh3") else None
        self._told_places = header.file
        if header.has_file:
            self._sent_file = data
        self._is_all_in_place = (header.all_in_place or header.has_file) and self._header_xxh3 is not None
        wanted_layers = tuple(request.layer_ids) or self.info.layer_ids
        wanted_stop = request.stop if request.HasField("stop") else self.info.num_tokens
        asked = (self.info.sample_id, self.layer_ids) == (request.sample_id, wanted_layers)
        if not asked or not set(self.layer_ids) <= set(self.info.layer_ids):
            raise ProtocolViolation("the server answered a read with another sample's rows, or with other layers")
        if (self.start, self.stop) != (request.start, wanted_stop) or not self.start <= self.stop <= self.info.num_tokens:
            raise ProtocolViolation(f"the server answered with rows [{self.start}, {self.stop}), which were not asked for")
        is_whole = self.layer_ids == self.info.layer_ids and self.num_rows == self.info.num_tokens
        if header.has_file and not (takes_file and is_whole and self._header_xxh3 is not None):
            raise ProtocolViolation("the server sent a file where rows were asked for")
        num_ids = 0 if self._is_all_in_place else self.num_rows
        if self.info.num_tokens > ROWS_MAX or len(self.layer_ids) > LAYERS_MAX or len(header.token_ids) != num_ids:
            raise ProtocolViolation("the server's read header names more rows or layers, or other token ids, than it may")
        if self.info.dtype not in dtypes.ELEMENT_BYTES:
            raise ProtocolViolation(f"the server's rows are of dtype {self.info.dtype!r}, which this client does not know")
        self._take_columns(header.columns, request)
        if not self.row_bytes or self.nbytes > SAMPLE_BYTES_MAX:
            raise ProtocolViolation(f"the server's rows are {self.nbytes} bytes, outside of what a sample may be")
        try:
            self.token_ids = array("q", header.token_ids)
        except OverflowError as error:
            raise ProtocolViolation("the server sent a token id past the signed 64-bit range") from error

    def _take_columns(self, columns: Iterable[sample_pb2.ColumnData], request: samples_pb2.ReadRequest) -> None:
        """The sample's format and what it has beside the default pair. Raises ProtocolViolation."""
        self.columns = {column.name: column.data for column in columns}
        if not self.columns.keys() <= set(request.columns):
            raise ProtocolViolation("the server sent columns that were not asked for")
        self.row_format = RowFormat.of(self.info.dtype, len(self.layer_ids), self.info.hidden_size, self.columns)
        for column in self.row_format.further:
            if len(self.columns[column.name]) != self.num_rows * column.row_bytes:
                raise ProtocolViolation(f"the server sent a column {column.name} that does not fit the rows")

    def _next_block(self) -> RowBlock | None:
        if self._file is not None:
            return next(self._file_rows, None)
        assert self._stream is not None, "rows come from there or here"
        frame = self._stream.receive(self._stall_limit_s)
        return None if frame is None else self._block_of(frame)

    def _rows_of(self, file: SampleFile, into: memoryview | None = None) -> Iterator[RowBlock]:
        runs = None
        if self.layer_ids != self.info.layer_ids:
            positions = [self.info.layer_ids.index(layer) for layer in self.layer_ids]
            runs = byte_runs(positions, self.row_format.layer_bytes)
        rows = file.rows(self.start, self.stop, verify=self._verify, into=into)
        return _blocks(rows, file.row_bytes, runs)

    def _block_of(self, frame: Frame) -> RowBlock:
        reply, data = decode_reply(frame)
        rows = reply.rows
        in_order = reply.WhichOneof("kind") == "rows" and rows.first_row == self._next_row
        if not in_order or not 0 < rows.rows <= self.stop - self._next_row or data.nbytes != rows.rows * self.row_bytes:
            raise ProtocolViolation(f"the server's rows do not continue at row {self._next_row}")
        return RowBlock(rows.first_row, rows.rows, data)


def _blocks(rows: Iterator[tuple[int, memoryview]], row_bytes: int, runs: list[tuple[int, int]] | None) -> Iterator[RowBlock]:
    """Not of the reader: one that nobody holds any more goes away at once, and its file with it."""
    for first_row, data in rows:
        wanted = data if runs is None else memoryview(b"".join(pick(data, row_bytes, runs)))
        yield RowBlock(first_row, data.nbytes // row_bytes, wanted)


def little_endian(token_ids: array[int]) -> bytes:
    """Token ids as the bytes of a safetensors I64 tensor."""
    if sys.byteorder == "big":
        token_ids = array("q", token_ids)
        token_ids.byteswap()
    return token_ids.tobytes()
