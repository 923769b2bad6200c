"""Chunk frames: protobuf messages whose bulk bytes are sliced, not parsed (see v1/ingest.proto for why).

A frame is `<tag of the header><length><header>` then `<tag of data><length><data>`, `data` last. It is a valid
IngestRequest or ReadReply, so peers without this module read and write it with an ordinary protobuf library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.message import DecodeError, Message

from slotstream.v1 import ingest_pb2, samples_pb2
from slotstream.wire.errors import ProtocolViolation
from slotstream.wire.hashing import Buffer
from slotstream.wire.names import CONTROL_BYTES_MAX, ROWS_MAX

_LENGTH_DELIMITED = 2
_CHUNK_TAG = (3 << 3) | _LENGTH_DELIMITED  # IngestRequest.chunk
_HEADER_TAG = (1 << 3) | _LENGTH_DELIMITED  # ReadReply.header
_ROWS_TAG = (2 << 3) | _LENGTH_DELIMITED  # ReadReply.rows
_DATA_TAG = (15 << 3) | _LENGTH_DELIMITED  # data, in both
_BATCH_TAG = (7 << 3) | _LENGTH_DELIMITED  # IngestRequest.batch
_REQUESTS_TAG = (1 << 3) | _LENGTH_DELIMITED  # RequestBatch.requests
_REPLY_BATCH_TAG = (4 << 3) | _LENGTH_DELIMITED  # ReadReply.batch
_REPLIES_TAG = (1 << 3) | _LENGTH_DELIMITED  # ReadReplyBatch.replies
_COMMIT_TAG = (4 << 3) | _LENGTH_DELIMITED  # IngestRequest.commit
_TOKEN_IDS_TAG = (3 << 3) | _LENGTH_DELIMITED  # CommitSample.token_ids, packed
_COLUMNS_TAG = (5 << 3) | _LENGTH_DELIMITED  # CommitSample.columns
_COLUMN_DATA_TAG = (2 << 3) | _LENGTH_DELIMITED  # ColumnData.data
_VARINT_BYTES_MAX = 10
_HEADER_BYTES_MAX = 4096  # A chunk's or rows' header; ours are below 64.
_FIELDS_MAX = 4096  # Fields of a long request.
Frame = bytes | memoryview
_CONTINUED = bytes(range(0x80, 0x100))  # Bytes that a varint goes on after.


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(frame: Frame, at: int) -> tuple[int, int]:
    """The varint at `at`, and where it ends. Raises ProtocolViolation when it is cut short or too long."""
    value = 0
    for i in range(_VARINT_BYTES_MAX):
        if at + i >= len(frame):
            break
        byte = frame[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise ProtocolViolation("a frame's length field is cut short or too long")


def _begin(tag: int, nbytes: int) -> bytes:
    """What stands before the `nbytes` of a length-delimited field."""
    return bytes((tag,)) + _varint(nbytes)


def _parts(tag: int, header: Message, data: Sequence[Buffer]) -> tuple[Buffer, ...]:
    head = header.SerializeToString()
    nbytes = sum(memoryview(part).nbytes for part in data)
    return _begin(tag, len(head)), head, _begin(_DATA_TAG, nbytes), *data


def _split(frame: Frame, tag: int, header_bytes_max: int = _HEADER_BYTES_MAX) -> tuple[bytes, memoryview] | None:
    """(header bytes, data) of a frame laid out as ours; None when it is laid out otherwise."""
    if not frame or frame[0] != tag:
        return None
    length, at = _read_varint(frame, 1)
    header_end = at + length
    if length > header_bytes_max or header_end >= len(frame) or frame[header_end] != _DATA_TAG:
        return None
    nbytes, data_at = _read_varint(frame, header_end + 1)
    if data_at + nbytes != len(frame):
        return None
    return bytes(frame[at:header_end]), memoryview(frame)[data_at:]


def _fields(frame: Frame, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(tag, where its value begins, where it ends) of each field in frame[at:stop]. Raises ProtocolViolation."""
    for _ in range(_FIELDS_MAX):
        if at == stop:
            return
        tag, begin = _read_varint(frame, at)
        match tag & 7:
            case 0:  # Varint; these are protobuf's wire types.
                _, at = _read_varint(frame, begin)
            case 1:  # 64 bits.
                at = begin + 8
            case 5:  # 32 bits.
                at = begin + 4
            case 2:  # Length-delimited.
                length, begin = _read_varint(frame, begin)
                at = begin + length
            case _:  # Groups, which proto3 has no more.
                raise ProtocolViolation("a request holds a field of a kind that the protocol does not use")
        if at > stop:
            raise ProtocolViolation("a request's field is cut short")
        yield tag, begin, at
    raise ProtocolViolation(f"a long request has more than {_FIELDS_MAX} fields")


def _check_bulk(frame: bytes) -> None:
    """Refuse a request that is long in anything but rows, token ids and columns. Raises ProtocolViolation.

    A parser makes an object of every map entry, at ten times its bytes and a second for a message's worth: so this looks
    at the lengths alone, before there are objects.
    """
    if len(frame) <= CONTROL_BYTES_MAX:
        return
    beside, token_ids = len(frame), 0
    for tag, begin, stop in _fields(frame, 0, len(frame)):
        if tag == _DATA_TAG:
            beside -= stop - begin
        elif tag == _COMMIT_TAG:
            for inner, first, last in _fields(frame, begin, stop):
                if inner == _TOKEN_IDS_TAG:
                    beside -= last - first
                    token_ids += len(frame[first:last].translate(None, _CONTINUED))
                elif inner == _COLUMNS_TAG:
                    beside -= sum(e - b for data, b, e in _fields(frame, first, last) if data == _COLUMN_DATA_TAG)
    if beside > CONTROL_BYTES_MAX:
        raise ProtocolViolation(
            f"a request has {beside} bytes beside rows, token ids and columns, more than {CONTROL_BYTES_MAX}"
        )
    if token_ids > ROWS_MAX:
        raise ProtocolViolation(f"a commit has {token_ids} token ids, more than the {ROWS_MAX} rows of a sample")


def encode_chunk(header: ingest_pb2.ChunkHeader, data: Buffer) -> bytes:
    """One chunk as the bytes of an IngestRequest; copies `data` once."""
    return b"".join(_parts(_CHUNK_TAG, header, (data,)))


def is_chunk(request: bytes) -> bool:
    """Whether a request is one of `encode_chunk`'s, which no batch may hold."""
    return request[0] == _CHUNK_TAG


def encode_batch(requests: Iterable[bytes]) -> bytes:
    """An IngestRequest with a RequestBatch of these requests, each encoded already."""
    body = b"".join(part for request in requests for part in (_begin(_REQUESTS_TAG, len(request)), request))
    return _begin(_BATCH_TAG, len(body)) + body


def decode_request(frame: bytes) -> tuple[ingest_pb2.IngestRequest, memoryview]:
    """An IngestRequest without its `data`, and the data as a view of `frame`. Raises ProtocolViolation."""
    request = ingest_pb2.IngestRequest()
    try:
        parts = _split(frame, _CHUNK_TAG)
        if parts is None:
            _check_bulk(frame)
            request.ParseFromString(frame)
            data = memoryview(request.data)
            request.ClearField("data")
            return request, data
        request.chunk.ParseFromString(parts[0])
        request.chunk.SetInParent()
    except DecodeError as error:
        raise ProtocolViolation("a frame is not an IngestRequest") from error
    return request, parts[1]


def rows_parts(header: samples_pb2.RowsHeader, data: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """Rows as the bytes of a ReadReply, in the pieces that they are; copies nothing."""
    return _parts(_ROWS_TAG, header, data)


def file_parts(header: samples_pb2.ReadHeader, data: Buffer) -> tuple[Buffer, ...]:
    """A read's header with the sample's file, likewise."""
    return _parts(_HEADER_TAG, header, (data,))


def encode_rows(header: samples_pb2.RowsHeader, data: Sequence[Buffer]) -> bytes:
    """Rows as the bytes of a ReadReply; joins the pieces of `data` with one copy."""
    return b"".join(rows_parts(header, data))


def encode_replies(replies: Sequence[Sequence[Buffer]]) -> bytes:
    """One reply from its pieces; or several, as the bytes of a ReadReply with a ReadReplyBatch. One copy."""
    if len(replies) == 1:
        return b"".join(replies[0])
    sizes = [sum(memoryview(piece).nbytes for piece in pieces) for pieces in replies]
    begins = [_begin(_REPLIES_TAG, nbytes) for nbytes in sizes]
    parts = [part for begin, pieces in zip(begins, replies, strict=True) for part in (begin, *pieces)]
    return b"".join((_begin(_REPLY_BATCH_TAG, sum(sizes) + sum(map(len, begins))), *parts))


def split_replies(frame: bytes) -> list[Frame]:
    """The replies of a ReadReply with a ReadReplyBatch, as views of `frame`; any other is itself. Raises ProtocolViolation."""
    if not frame or frame[0] != _REPLY_BATCH_TAG:
        return [frame]
    length, at = _read_varint(frame, 1)
    if at + length != len(frame):
        raise ProtocolViolation("a batch of replies is cut short")
    view = memoryview(frame)
    fields = list(_fields(frame, at, len(frame)))
    if not fields or any(tag != _REPLIES_TAG for tag, _, _ in fields):
        raise ProtocolViolation("a batch of replies is empty, or holds something else")
    return [view[begin:stop] for _, begin, stop in fields]


def decode_reply(frame: Frame) -> tuple[samples_pb2.ReadReply, memoryview]:
    """A ReadReply without its `data`, and the data as a view of `frame`. Raises ProtocolViolation."""
    reply = samples_pb2.ReadReply()
    try:
        if (parts := _split(frame, _ROWS_TAG)) is not None:
            reply.rows.ParseFromString(parts[0])
            reply.rows.SetInParent()
        elif (parts := _split(frame, _HEADER_TAG, CONTROL_BYTES_MAX)) is not None:
            reply.header.ParseFromString(parts[0])
            reply.header.SetInParent()
        else:
            reply.ParseFromString(bytes(frame))
            data = memoryview(reply.data)
            reply.ClearField("data")
            return reply, data
    except DecodeError as error:
        raise ProtocolViolation("a frame is not a ReadReply") from error
    return reply, parts[1]
