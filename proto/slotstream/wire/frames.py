"""Chunk frames: protobuf messages whose bulk bytes are sliced, not parsed (see v1/ingest.proto for why).

A frame is `<tag of the header><length><header>` then `<tag of data><length><data>`, `data` last. It is a valid
IngestRequest or ReadReply, so peers without this module read and write it with an ordinary protobuf library.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError, Message

from slotstream.v1 import ingest_pb2, samples_pb2
from slotstream.wire.errors import ProtocolViolation
from slotstream.wire.hashing import Buffer

_LENGTH_DELIMITED = 2
_CHUNK_TAG = (3 << 3) | _LENGTH_DELIMITED  # IngestRequest.chunk
_ROWS_TAG = (2 << 3) | _LENGTH_DELIMITED  # ReadReply.rows
_DATA_TAG = (15 << 3) | _LENGTH_DELIMITED  # data, in both
_VARINT_BYTES_MAX = 10


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(frame: bytes, at: int) -> tuple[int, int]:
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


def _encode(tag: int, header: Message, data: Sequence[Buffer]) -> bytes:
    head = header.SerializeToString()
    nbytes = sum(memoryview(part).nbytes for part in data)
    return b"".join((bytes((tag,)), _varint(len(head)), head, bytes((_DATA_TAG,)), _varint(nbytes), *data))


def _split(frame: bytes, tag: int) -> tuple[bytes, memoryview] | None:
    """(header bytes, data) of a frame laid out as ours; None when it is laid out otherwise."""
    if not frame or frame[0] != tag:
        return None
    length, at = _read_varint(frame, 1)
    header_end = at + length
    if header_end >= len(frame) or frame[header_end] != _DATA_TAG:
        return None
    nbytes, data_at = _read_varint(frame, header_end + 1)
    if data_at + nbytes != len(frame):
        return None
    return frame[at:header_end], memoryview(frame)[data_at:]


def encode_chunk(header: ingest_pb2.ChunkHeader, data: Buffer) -> bytes:
    """One chunk as the bytes of an IngestRequest; copies `data` once."""
    return _encode(_CHUNK_TAG, header, (data,))


def decode_request(frame: bytes) -> tuple[ingest_pb2.IngestRequest, memoryview]:
    """An IngestRequest without its `data`, and the data as a view of `frame`. Raises ProtocolViolation."""
    request = ingest_pb2.IngestRequest()
    try:
        parts = _split(frame, _CHUNK_TAG)
        if parts is None:
            request.ParseFromString(frame)
            data = memoryview(request.data)
            request.ClearField("data")
            return request, data
        request.chunk.ParseFromString(parts[0])
        request.chunk.SetInParent()
    except DecodeError as error:
        raise ProtocolViolation("a frame is not an IngestRequest") from error
    return request, parts[1]


def encode_rows(header: samples_pb2.RowsHeader, data: Sequence[Buffer]) -> bytes:
    """Rows as the bytes of a ReadReply; joins the pieces of `data` with one copy."""
    return _encode(_ROWS_TAG, header, data)


def decode_reply(frame: bytes) -> tuple[samples_pb2.ReadReply, memoryview]:
    """A ReadReply without its `data`, and the data as a view of `frame`. Raises ProtocolViolation."""
    reply = samples_pb2.ReadReply()
    try:
        parts = _split(frame, _ROWS_TAG)
        if parts is None:
            reply.ParseFromString(frame)
            data = memoryview(reply.data)
            reply.ClearField("data")
            return reply, data
        reply.rows.ParseFromString(parts[0])
        reply.rows.SetInParent()
    except DecodeError as error:
        raise ProtocolViolation("a frame is not a ReadReply") from error
    return reply, parts[1]
