"""Frames are ordinary protobuf messages, and nothing that a peer sends raises more than ProtocolViolation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import example, given
from hypothesis import strategies as st

from slotstream.v1 import ingest_pb2, sample_pb2, samples_pb2
from slotstream.wire.errors import ProtocolViolation
from slotstream.wire.frames import (
    decode_reply,
    decode_request,
    encode_batch,
    encode_chunk,
    encode_replies,
    encode_rows,
    file_parts,
    is_chunk,
    rows_parts,
    split_replies,
)
from slotstream.wire.names import CONTROL_BYTES_MAX, ROWS_MAX

_U64 = st.integers(0, (1 << 64) - 1)
_U32 = st.integers(0, (1 << 32) - 1)
_CHUNK_HEADERS = st.builds(ingest_pb2.ChunkHeader, sample=_U64, chunk=_U64, first_row=_U32, rows=_U32, xxh3=_U64)
_ROWS_HEADERS = st.builds(samples_pb2.RowsHeader, first_row=_U64, rows=_U32)
_REQUESTS = st.one_of(
    st.builds(ingest_pb2.OpenSample, sample=_U64, sample_id=st.text(max_size=200)).map(
        lambda opened: ingest_pb2.IngestRequest(open=opened)
    ),
    st.builds(ingest_pb2.CommitSample, sample=_U64, token_ids=st.lists(_U64, max_size=99)).map(
        lambda commit: ingest_pb2.IngestRequest(commit=commit)
    ),
    st.builds(ingest_pb2.AbortSample, sample=_U64).map(lambda abort: ingest_pb2.IngestRequest(abort=abort)),
)
# Lengths around those where the length of `data` needs another byte.
_DATA = st.one_of(st.binary(max_size=300), st.sampled_from([127, 128, 16383, 16384]).map(bytes))

_TAG_CHUNK, _TAG_ROWS, _TAG_DATA = b"\x1a", b"\x12", b"\x7a"

Decode = Callable[[bytes], tuple[Any, memoryview]]
DECODERS = pytest.mark.parametrize("decode", [decode_request, decode_reply])


def _field(tag: bytes, value: bytes) -> bytes:
    length, left = bytearray(), len(value)
    while left > 127:
        length.append(left & 127 | 128)
        left >>= 7
    return tag + bytes((*length, left)) + value


@given(_CHUNK_HEADERS, _DATA)
def test_a_chunk_frame_is_the_ordinary_message(header: ingest_pb2.ChunkHeader, data: bytes) -> None:
    frame = encode_chunk(header, data)
    # proto3 leaves an empty `data` out; a frame spells it, which means the same.
    if data:
        assert frame == ingest_pb2.IngestRequest(chunk=header, data=data).SerializeToString()
    assert ingest_pb2.IngestRequest.FromString(frame) == ingest_pb2.IngestRequest(chunk=header, data=data)


@given(_CHUNK_HEADERS, _DATA)
def test_the_ordinary_message_is_read_as_a_chunk(header: ingest_pb2.ChunkHeader, data: bytes) -> None:
    for frame in (encode_chunk(header, data), ingest_pb2.IngestRequest(chunk=header, data=data).SerializeToString()):
        request, view = decode_request(frame)
        assert request == ingest_pb2.IngestRequest(chunk=header)
        assert bytes(view) == data


@given(st.lists(_REQUESTS, min_size=1, max_size=20))
def test_a_batch_is_the_ordinary_message(requests: list[ingest_pb2.IngestRequest]) -> None:
    said = ingest_pb2.IngestRequest(batch=ingest_pb2.RequestBatch(requests=requests))
    message = encode_batch([request.SerializeToString() for request in requests])
    assert ingest_pb2.IngestRequest.FromString(message) == said
    assert decode_request(message)[0] == said


@given(_CHUNK_HEADERS, _DATA, _REQUESTS)
def test_a_chunk_is_told_from_other_requests(
    header: ingest_pb2.ChunkHeader, data: bytes, other: ingest_pb2.IngestRequest
) -> None:
    assert is_chunk(encode_chunk(header, data))
    assert not is_chunk(other.SerializeToString())


@given(_ROWS_HEADERS, st.lists(_DATA, max_size=4))
def test_a_rows_frame_is_the_ordinary_message(header: samples_pb2.RowsHeader, pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    frame = encode_rows(header, pieces)
    assert samples_pb2.ReadReply.FromString(frame) == samples_pb2.ReadReply(rows=header, data=data)
    for spelling in (frame, samples_pb2.ReadReply(rows=header, data=data).SerializeToString()):
        reply, view = decode_reply(spelling)
        assert reply == samples_pb2.ReadReply(rows=header)
        assert bytes(view) == data


@given(st.integers(0, 1 << 20), st.text(max_size=200), _DATA)
def test_a_header_with_a_file_is_the_ordinary_message(stop: int, model: str, data: bytes) -> None:
    header = samples_pb2.ReadHeader(info=sample_pb2.SampleInfo(model=model), stop=stop, has_file=True)
    ordinary = samples_pb2.ReadReply(header=header, data=data)
    frame = b"".join(file_parts(header, data))
    assert samples_pb2.ReadReply.FromString(frame) == ordinary
    for spelling in (frame, ordinary.SerializeToString()):
        reply, view = decode_reply(spelling)
        assert reply == samples_pb2.ReadReply(header=header)
        assert bytes(view) == data
    assert decode_reply(samples_pb2.ReadReply(header=header).SerializeToString())[0].header == header


@given(st.lists(st.tuples(_ROWS_HEADERS, st.lists(_DATA, max_size=3)), min_size=1, max_size=20))
def test_replies_together_are_the_ordinary_message(replies: list[tuple[samples_pb2.RowsHeader, list[bytes]]]) -> None:
    message = encode_replies([rows_parts(header, pieces) for header, pieces in replies])
    ordinary = [samples_pb2.ReadReply(rows=header, data=b"".join(pieces)) for header, pieces in replies]
    if len(ordinary) > 1:  # One is itself.
        assert samples_pb2.ReadReply.FromString(message) == samples_pb2.ReadReply(
            batch=samples_pb2.ReadReplyBatch(replies=ordinary)
        )
    for (header, pieces), frame in zip(replies, split_replies(message), strict=True):
        reply, view = decode_reply(frame)
        assert reply == samples_pb2.ReadReply(rows=header)
        assert bytes(view) == b"".join(pieces)
        assert view.obj is message


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"\x22\x00", id="empty"),
        pytest.param(b"\x22\x05\x0a\x02ab", id="cut short"),
        pytest.param(b"\x22\x04\x0a\x07ab", id="a reply past the end"),
        pytest.param(b"\x22\x04\x12\x02ab", id="something else in it"),
        pytest.param(b"\x22\x04\x0a\x02ab\x0a\x00", id="something behind it"),
        pytest.param(b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", id="a length without an end"),
    ],
)
def test_what_is_no_batch_of_replies_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        split_replies(message)


def test_data_may_be_any_buffer_of_any_element_type() -> None:
    header = ingest_pb2.ChunkHeader(sample=1, rows=1)
    words = memoryview(bytearray(range(16))).cast("Q")
    assert len({encode_chunk(header, data) for data in (bytes(range(16)), bytearray(range(16)), words)}) == 1


def test_the_data_of_a_chunk_is_not_copied() -> None:
    frame = encode_chunk(ingest_pb2.ChunkHeader(sample=1, rows=1), b"rows")
    assert decode_request(frame)[1].obj is frame


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(ingest_pb2.IngestRequest(hello=ingest_pb2.Hello(protocol=1, engine_id="e")), id="hello"),
        pytest.param(ingest_pb2.IngestRequest(open=ingest_pb2.OpenSample(sample=3, tags={"a": "b"})), id="open"),
        pytest.param(ingest_pb2.IngestRequest(commit=ingest_pb2.CommitSample(sample=3, token_ids=[1, 2])), id="commit"),
        pytest.param(ingest_pb2.IngestRequest(abort=ingest_pb2.AbortSample(sample=3, code="ABORTED")), id="abort"),
        pytest.param(ingest_pb2.IngestRequest(), id="of no kind"),
    ],
)
def test_requests_that_are_not_chunks_pass_through(request_: ingest_pb2.IngestRequest) -> None:
    request, data = decode_request(request_.SerializeToString())
    assert request == request_
    assert bytes(data) == b""


HEADER = ingest_pb2.ChunkHeader(sample=7, chunk=8, first_row=9, rows=2, xxh3=10)
_HEAD = HEADER.SerializeToString()
_DATA_FIELD = _field(_TAG_DATA, b"rows")


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(_DATA_FIELD + _field(_TAG_CHUNK, _HEAD), id="data first"),
        pytest.param(_field(_TAG_CHUNK, _HEAD[9:]) + _field(_TAG_CHUNK, _HEAD[:9]) + _DATA_FIELD, id="header in two parts"),
        pytest.param(_field(_TAG_CHUNK, _HEAD[9:] + _HEAD[:9]) + _DATA_FIELD, id="header fields in another order"),
        pytest.param(_field(_TAG_CHUNK, _HEAD) + _field(_TAG_DATA, b"old") + _DATA_FIELD, id="data twice: the last counts"),
        pytest.param(b"\xf8\x7f\x01" + _field(_TAG_CHUNK, _HEAD) + _DATA_FIELD, id="an unknown field in front"),
        pytest.param(_field(_TAG_CHUNK, _HEAD) + b"\xf8\x7f\x01" + _DATA_FIELD, id="an unknown field between"),
        pytest.param(_field(_TAG_CHUNK, _HEAD) + _DATA_FIELD + b"\xf8\x7f\x01", id="an unknown field behind"),
        pytest.param(_TAG_CHUNK + b"\xa5\x80\x00" + _HEAD + _TAG_DATA + b"\x84\x80\x80\x00rows", id="lengths spelled long"),
    ],
)
def test_other_spellings_of_a_chunk_are_read(frame: bytes) -> None:
    request, data = decode_request(frame)
    request.DiscardUnknownFields()
    assert request == ingest_pb2.IngestRequest(chunk=HEADER)
    assert bytes(data) == b"rows"


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(_TAG_CHUNK, id="a tag alone"),
        pytest.param(_TAG_CHUNK + b"\x80", id="a length cut short"),
        pytest.param(_TAG_CHUNK + b"\x80" * 11, id="a length too long"),
        pytest.param(_TAG_CHUNK + b"\x7f", id="a header past the end"),
        pytest.param(_TAG_CHUNK + b"\x01\xff" + _DATA_FIELD, id="a header that is not one"),
        pytest.param(_field(_TAG_CHUNK, _HEAD) + _TAG_DATA, id="data without a length"),
        pytest.param(_field(_TAG_CHUNK, _HEAD) + _TAG_DATA + b"\x05rows", id="data cut short"),
        pytest.param(_field(_TAG_CHUNK, _HEAD) + _TAG_DATA + b"\xff" * 9 + b"\x7f", id="data of 2**70 bytes"),
        pytest.param(_field(_TAG_CHUNK, _HEAD) + _DATA_FIELD + b"\x00", id="a byte too many"),
        pytest.param(_field(b"\x12", _field(b"\x1a", b"\xff\xfe")), id="a string that is not UTF-8"),
        pytest.param(b"\x1b" * 1000, id="groups within groups"),
    ],
)
def test_what_is_no_request_is_a_violation(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_request(frame)


def _long(**fields: object) -> bytes:
    return ingest_pb2.IngestRequest(**fields).SerializeToString()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(_long(open=ingest_pb2.OpenSample(metadata={"k": "v" * CONTROL_BYTES_MAX})), id="metadata"),
        pytest.param(_long(open=ingest_pb2.OpenSample(tags={str(n): "" for n in range(50_000)})), id="tags"),
        pytest.param(_long(commit=ingest_pb2.CommitSample(metadata={"k": "v" * CONTROL_BYTES_MAX})), id="metadata of a commit"),
        pytest.param(_long(commit=ingest_pb2.CommitSample(token_ids=[1] * (ROWS_MAX + 1))), id="token ids"),
        pytest.param(b"\xa0\x06\x01" * 100_000, id="unknown fields"),
        pytest.param(_field(_TAG_CHUNK, _HEAD + b"\xa0\x06\x01" * 100_000) + _DATA_FIELD, id="a chunk's header"),
        pytest.param(_field(b"\x12", bytes(300_000)) + b"\x0b", id="a group"),
        pytest.param(_field(b"\x12", bytes(300_000))[:-1], id="cut short"),
    ],
)
def test_what_is_long_beside_rows_and_token_ids_is_never_parsed(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_request(frame)


def test_what_has_to_be_long_is_parsed_like_anything_else() -> None:
    commit = ingest_pb2.IngestRequest(commit=ingest_pb2.CommitSample(sample=1, row_count=9, token_ids=range(300_000)))
    request, data = decode_request(commit.SerializeToString())
    assert (request, bytes(data)) == (commit, b"")
    rows = bytes(range(256)) * 4096
    chunk = ingest_pb2.IngestRequest(chunk=ingest_pb2.ChunkHeader(sample=1, rows=1), data=rows)
    backwards = _field(_TAG_DATA, rows) + ingest_pb2.IngestRequest(chunk=chunk.chunk).SerializeToString()
    for frame in (chunk.SerializeToString(), backwards):
        request, data = decode_request(frame)
        assert (request.chunk, bytes(data)) == (chunk.chunk, rows)


@DECODERS
@given(st.binary(max_size=200))
@example(b"")
def test_arbitrary_bytes_raise_nothing_else(decode: Decode, frame: bytes) -> None:
    _decode_like_protobuf(decode, frame)


@DECODERS
@given(st.data())
def test_mutated_frames_raise_nothing_else(decode: Decode, data: st.DataObject) -> None:
    if decode is decode_request:
        frame = bytearray(encode_chunk(data.draw(_CHUNK_HEADERS), data.draw(st.binary(max_size=40))))
    else:
        frame = bytearray(encode_rows(data.draw(_ROWS_HEADERS), [data.draw(st.binary(max_size=40))]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame)))
        frame[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    _decode_like_protobuf(decode, bytes(frame))


def _decode_like_protobuf(decode: Decode, frame: bytes) -> None:
    """What `decode` accepts it reads as an ordinary protobuf library would."""
    try:
        message, data = decode(frame)
    except ProtocolViolation:
        return
    ordinary: Message = type(message).FromString(frame)
    assert bytes(data) == ordinary.data  # type: ignore[attr-defined]
    ordinary.ClearField("data")
    assert message == ordinary
