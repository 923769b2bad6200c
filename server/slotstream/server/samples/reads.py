"""What a read is answered with: a committed sample opened, and its replies, made one at a time as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self

from slotstream.server.samples import convert
from slotstream.store.records import SampleRecord
from slotstream.store.sample.reading import SampleReader, checked_range, positions_of
from slotstream.store.samples import Held, SampleStore, WholeFile
from slotstream.v1 import sample_pb2
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import UnsupportedFormat
from slotstream.wire.frames import file_parts, rows_parts
from slotstream.wire.hashing import Buffer

Reply = Sequence[Buffer]  # A ReadReply's bytes, in pieces.
FILE_BYTES_MAX = 1 << 20  # Of a sample that is sent as its file. A larger one costs its bytes, and little beside them.


class Unopened:
    """In a SampleReader's place, where the reader takes all that it wants out of the file: nothing is open here."""

    def __init__(self, record: SampleRecord) -> None:
        self.record = record

    def close(self) -> None:
        """There is nothing to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """As `close`."""


Opened = tuple[SampleReader | Unopened, Iterator[Reply], Reply]  # A sample, its replies to come, and the first of them.


def opened(store: SampleStore, held: Held, request: pb.ReadRequest, *, takes_files: bool = False) -> Opened:
    """`takes_files`: the reader takes a small sample as its file. Raises what `SampleStore.reader` raises, BadTokenRange and
    BadLayers.

    In one go: each thread that the event loop waits for costs a read a tenth of a millisecond and more.
    """
    record = held.record
    if request.in_place and request.all_in_place and record is not None and convert.header_xxh3_of(record) is not None:
        held.hold.end()
        told = _told(record, request)
        told.all_in_place = True
        return Unopened(record), iter(()), (pb.ReadReply(header=told).SerializeToString(),)
    reader = store.open_held(held, lambda record: takes_files and _goes_as_file(request, record))
    if isinstance(reader, WholeFile):
        told = _told(reader.record, request)
        told.has_file = True
        return Unopened(reader.record), iter(()), file_parts(told, reader.raw)
    try:
        frames = _frames(reader, request)
        return reader, frames, next(frames)
    except BaseException:
        reader.close()
        raise


def close_unwanted(opening: Future[Opened]) -> None:
    """Close what was opened for a reader who left meanwhile."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()


def after(step: Future[Any] | None, then: Callable[[], None]) -> None:
    """Call `then` once no thread is in `step`: a file closed under a read could be another file by then."""
    if step is None:
        then()
    else:
        step.add_done_callback(lambda _: then())


def counts_when_sent(request: pb.ReadRequest, reader: SampleReader | Unopened) -> bool:
    """Whether the read counts for delete_after_reads once all of it is sent: it is of every row, of any layers, and nobody says
    otherwise.
    """
    if request.in_place or request.counting != pb.READ_COUNTING_SENT:
        return False
    return _has_all_rows(request, reader.record)


def _has_all_rows(request: pb.ReadRequest, record: SampleRecord) -> bool:
    return request.start == 0 and (not request.HasField("stop") or request.stop == record.num_tokens)


def _goes_as_file(request: pb.ReadRequest, record: SampleRecord) -> bool:
    """Whether every row is wanted, not in place, with all layers in the file's order, of a small sample that a file has."""
    is_whole = _has_all_rows(request, record) and tuple(request.layer_ids) in ((), record.layer_ids)
    is_small = record.file_bytes <= FILE_BYTES_MAX and convert.header_xxh3_of(record) is not None
    return is_whole and is_small and not request.in_place


def _told(record: SampleRecord, request: pb.ReadRequest) -> pb.ReadHeader:
    """What a reader needs in order to take a sample out of its file. Raises BadTokenRange and BadLayers."""
    start, stop = checked_range(request.start, request.stop if request.HasField("stop") else None, record.num_tokens)
    layer_ids = tuple(request.layer_ids) or record.layer_ids
    positions_of(layer_ids, record.layer_ids)
    return pb.ReadHeader(
        info=convert.info_of(record),
        layer_ids=layer_ids,
        start=start,
        stop=stop,
        header_xxh3=convert.header_xxh3_of(record),
        counted_by_call=request.counting == pb.READ_COUNTING_CALLED,
    )


def _frames(reader: SampleReader, request: pb.ReadRequest) -> Iterator[Reply]:
    """The replies of a read, made one at a time as they are asked for.

    Raises BadTokenRange, BadLayers, Damaged, and UnsupportedFormat where the reader could not understand the rows.
    """
    start, stop = reader.check_range(request.start, request.stop if request.HasField("stop") else None)
    layer_ids = tuple(request.layer_ids) or reader.file.layer_ids
    positions = reader.positions(layer_ids)
    header = pb.ReadHeader(
        info=convert.info_of(reader.record),
        layer_ids=layer_ids,
        start=start,
        stop=stop,
        token_ids=reader.token_ids(start, stop),
        columns=[
            sample_pb2.ColumnData(name=name, data=bytes(reader.column(name, start, stop, positions)))
            for name in _wanted_columns(reader, request)
        ],
        counted_by_call=request.counting == pb.READ_COUNTING_CALLED,
    )
    if request.in_place:
        file = reader.file
        header.header_xxh3 = int(file.header_xxh3, 16)
        header.file.header_bytes, header.file.hash_rows = file.header.header_bytes, file.hash_rows
        header.file.row_xxh3.extend(file.hashes)
    yield (pb.ReadReply(header=header).SerializeToString(),)
    if request.in_place:
        return
    for block in reader.blocks(start, stop, positions, verify=not request.unverified):
        yield rows_parts(pb.RowsHeader(first_row=block.first_row, rows=block.rows), block.data)


def _wanted_columns(reader: SampleReader, request: pb.ReadRequest) -> list[str]:
    """The sample's further columns that the reader knows. Raises UnsupportedFormat where one that it needs is not there."""
    wanted = []
    for column in reader.file.header.row_format.further:
        if column.name in request.columns:
            wanted.append(column.name)
        elif not column.optional:
            raise UnsupportedFormat(f"the sample has column {column.name!r}, which this reader does not know")
    return wanted
