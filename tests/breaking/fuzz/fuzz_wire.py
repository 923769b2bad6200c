"""Targets of what crosses the wire and of names: no disk, no thread, thousands of inputs a second."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz_harness import Source, Target, sentence
from google.protobuf.message import DecodeError

from slotstream.client.reading import RowReader
from slotstream.connector.planning.request_params import default_sample_id
from slotstream.store.catalogue.page_token import KEY_BYTES, seal, unseal
from slotstream.store.records import SampleKey
from slotstream.v1 import ingest_pb2, sample_pb2, samples_pb2
from slotstream.wire import frames as wire
from slotstream.wire.address import check_address
from slotstream.wire.errors import (
    BadNamespace,
    BadPage,
    BadSampleId,
    BadTags,
    ConfigError,
    Interrupted,
    ProtocolViolation,
)
from slotstream.wire.hashing import xxh3
from slotstream.wire.names import CONTROL_BYTES_MAX, check_sample_id, check_tags


def _frame(data: bytes, decode: Any, kind: Any) -> None:
    """A frame means what an ordinary protobuf library says it means, for every way to take it apart."""
    reference = kind()
    try:
        reference.ParseFromString(data)
    except DecodeError:
        reference = None
    try:
        message, bulk = decode(data)
    except ProtocolViolation:
        assert reference is None or len(data) > CONTROL_BYTES_MAX, "a frame that protobuf takes was refused"
        return
    assert reference is not None, "a frame that protobuf refuses was taken"
    assert bytes(bulk) == reference.data
    reference.ClearField("data")
    assert message == reference
    assert not message.data


def check_frames(data: bytes) -> None:
    _frame(data, wire.decode_request, ingest_pb2.IngestRequest)
    _frame(data, wire.decode_reply, samples_pb2.ReadReply)
    try:
        request, bulk = wire.decode_request(data)
    except ProtocolViolation:
        return
    if request.WhichOneof("kind") == "chunk":
        again, same = wire.decode_request(wire.encode_chunk(request.chunk, bulk))
        assert (again.chunk, bytes(same)) == (request.chunk, bytes(bulk))


def _long(tag: int, data: bytes) -> bytes:
    return wire._varint(tag << 3 | 2) + wire._varint(len(data)) + data


def check_long_frames(data: bytes) -> None:
    """Frames past the size from which lengths are looked at before anything is parsed."""
    source = Source(data)
    parts: list[bytes] = []
    while source.left and len(parts) < 16:
        tag = source.pick((2, 3, 4, 5, 15, 1, 99))
        head = source.take(source.below(24))
        body = head + source.pick((b"\x1a\x01a", b"\x80", b"\x01", b"\x08\x00", b"\x0a")) * source.below(1 << 16)
        if source.below(2):
            body = _long(3, body) + source.take(source.below(8))
        parts.append(_long(tag, body))
    frame = b"".join(parts)
    try:
        request, bulk = wire.decode_request(frame)
    except ProtocolViolation:
        return
    ids = len(request.commit.token_ids)
    beside = request.ByteSize() - sum(len(wire._varint(value)) for value in request.commit.token_ids)
    assert beside <= CONTROL_BYTES_MAX + 64, f"{beside} bytes beside {ids} ids and {len(bulk)} of rows were parsed"


def _frame_seeds() -> Iterator[bytes]:
    rows = bytes(range(64))
    chunk = ingest_pb2.ChunkHeader(sample=1, chunk=2, first_row=3, rows=1, xxh3=xxh3(rows))
    yield wire.encode_chunk(chunk, rows)
    yield wire.encode_rows(samples_pb2.RowsHeader(first_row=7, rows=1), (rows,))
    yield ingest_pb2.IngestRequest(hello=ingest_pb2.Hello(protocol=1, engine_id="e", vllm_version="v")).SerializeToString()
    opened = ingest_pb2.OpenSample(
        sample=1, namespace="d", sample_id="s", dtype="F32", layer_ids=[1, 2], hidden_size=8, rows_max=4, tags={"k": "v"}
    )
    yield ingest_pb2.IngestRequest(open=opened).SerializeToString()
    commit = ingest_pb2.CommitSample(sample=1, row_count=2, token_ids=[5, 300], metadata={"m": "n"})
    yield ingest_pb2.IngestRequest(commit=commit).SerializeToString()
    yield ingest_pb2.IngestRequest(abort=ingest_pb2.AbortSample(sample=1, code="ABORTED", message="m")).SerializeToString()
    yield ingest_pb2.IngestRequest(chunk=chunk).SerializeToString() + b"\x7a\x02ab\x7a\x01c"  # Data that is there twice.
    yield b"\x1a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01"


class _Replies:
    """A read's stream of replies that are there already."""

    def __init__(self, replies: list[bytes]) -> None:
        self._replies = replies

    def receive(self, limit_s: float) -> bytes | None:
        return self._replies.pop(0) if self._replies else None

    def close(self) -> None:
        return


_INFO = sample_pb2.SampleInfo(
    namespace="default",
    sample_id="s",
    state=sample_pb2.SAMPLE_STATE_COMMITTED,
    dtype="F32",
    layer_ids=[1, 2],
    hidden_size=2,
    num_tokens=5,
)


def check_replies(data: bytes) -> None:
    """For any answer of a server, a client hands out rows start to stop in order, whole, or raises one of our errors."""
    source = Source(data)
    request = samples_pb2.ReadRequest(sample_id="s", start=source.below(3))
    if source.below(2):
        request.stop = 3 + source.below(3)
    replies: list[bytes] = []
    header = samples_pb2.ReadHeader(info=_INFO, layer_ids=[1, 2], start=request.start, stop=request.stop or 5)
    header.token_ids.extend(range(header.start, header.stop))
    if source.below(4):
        replies.append(samples_pb2.ReadReply(header=header).SerializeToString())
    while source.left:
        action = source.below(4)
        if action == 0:
            replies.append(source.take(source.below(64)))
        elif action == 1:
            changed = samples_pb2.ReadHeader()
            changed.CopyFrom(header)
            changed.info.num_tokens = source.below(1 << 40)
            changed.info.hidden_size = source.below(1 << 32)
            replies.append(samples_pb2.ReadReply(header=changed).SerializeToString())
        else:
            rows = source.below(4)
            reply = samples_pb2.RowsHeader(first_row=source.below(6), rows=rows)
            replies.append(wire.encode_rows(reply, (bytes(rows * 16 + (source.below(8) == 7)),)))
    try:
        with RowReader(_Replies(replies), request, header_limit_s=1, stall_limit_s=1) as reader:  # type: ignore[arg-type]
            row = reader.start
            assert len(reader.token_ids) == reader.num_rows
            for block in reader:
                assert block.first_row == row
                assert len(block.data) == block.rows * reader.row_bytes
                row += block.rows
            assert row == reader.stop
    except (ProtocolViolation, Interrupted):
        pass


def check_names(data: bytes) -> None:
    """A name that is accepted names a file inside the data directory, and nothing else."""
    text = data.decode("utf-8", "surrogateescape")
    namespace, _, sample_id = text.partition("/")
    root = Path("/data/dir")
    try:
        path = SampleKey.checked(namespace, sample_id).path(root)
    except (BadNamespace, BadSampleId) as error:
        sentence(error)
    else:
        assert path.relative_to(root).parts == (namespace, path.parent.name, f"{sample_id}.safetensors")
        assert str(path).isascii()
        assert not path.parts[3].startswith("catalog.")
        assert ".." not in path.parts
        assert path.name.encode() not in (b".lock",)
    made = default_sample_id(text)
    assert check_sample_id(made) == made
    try:
        check_tags({namespace: sample_id})
    except BadTags as error:
        sentence(error)
    else:
        (namespace + sample_id).encode()


def check_addresses(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for any_port in (False, True):
        try:
            address = check_address(text, any_port=any_port)
        except ConfigError as error:
            sentence(error)
            continue
        assert address == text
        address.encode()
        if not address.startswith("unix:"):
            assert 0 <= int(address.rpartition(":")[2]) <= 65535


_PAGE_KEY = bytes(range(KEY_BYTES))


def check_page_tokens(data: bytes) -> None:
    """A token that is accepted is the one that this server would have given out, and only for its own listing."""
    source = Source(data)
    fingerprint = source.below(1 << 32)
    position = [int.from_bytes(source.take(8).ljust(8, b"\0"), "big", signed=True) for _ in range(2)]
    true = seal(_PAGE_KEY, position[0], position[1], fingerprint)
    raw = bytearray(base64.urlsafe_b64decode(true))
    if source.left:
        raw[source.below(len(raw))] ^= source.below(256)
    for token, listing in ((base64.urlsafe_b64encode(raw).decode(), fingerprint), (source.text(80), fingerprint), (true, 7)):
        try:
            created, row = unseal(_PAGE_KEY, token, listing)
        except BadPage as error:
            sentence(error)
            assert (token, listing) != (true, fingerprint)
            continue
        assert seal(_PAGE_KEY, created, row, listing) == token
        assert [created, row] == position


TARGETS = (
    Target("frames", check_frames, 20, 512, _frame_seeds),
    Target("long_frames", check_long_frames, 1, 256, lambda: (bytes(range(64)), b"\x02\x08abcdefgh\x00\xff\xff\x01" * 4)),
    Target("replies", check_replies, 8, 256, lambda: (b"\x00\x00\x01" + b"\x02\x03\x00\x00", bytes(range(40)))),
    Target(
        "names",
        check_names,
        10,
        256,
        lambda: (
            b"default/sample-1",
            b"../../etc/passwd",
            b"catalog.x/a",
            b"a/.lock",
            "a/é".encode(),
            b"a/..",
            b"catalog.sqlite-wal/x",
        ),
    ),
    Target("addresses", check_addresses, 8, 160, lambda: (b"127.0.0.1:50151", b"[::1]:1", b"unix:/tmp/s", b"h:0", b"a..b:1")),
    Target("page_tokens", check_page_tokens, 8, 160, lambda: (bytes(40), b"\x01d" + bytes(range(60)))),
)
