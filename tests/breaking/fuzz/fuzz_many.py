"""Targets of ReadMany: what a server answers to many reads in a call, beside another, and what a client makes of answers."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from functools import partial
from typing import Any

import fuzz_server
from fuzz_disk import put
from fuzz_harness import Source, Target
from fuzz_server import ROW_BYTES, Aborted, Call

from slotstream.client.call_errors import NotServed
from slotstream.client.many import ManyReads
from slotstream.client.reading import RowReader
from slotstream.store.records import SampleKey
from slotstream.v1 import sample_pb2, samples_pb2
from slotstream.wire.errors import Interrupted, SlotStreamError
from slotstream.wire.frames import decode_reply, encode_replies, encode_rows, split_replies

Read = samples_pb2.ReadRequest
_LAYERS = (3, 7)
_ROWS = 9
_DATA = fuzz_server.rows_of(1, 0, _ROWS)
_KEY = SampleKey("default", "read")


# The server.


def _reads(source: Source) -> list[Read]:
    reads = []
    for _ in range(source.below(7)):
        read = Read(sample_id=source.pick(("read", "read", "n1", "arriving", "failed", "nothing", "../x")))
        read.namespace = source.pick(("", "other", "default", "..")) if source.below(2) else ""
        read.start = source.pick((0, 0, 1, 8, 9, 10, 2**64 - 1))
        if source.below(2):
            read.stop = source.pick((0, 1, 5, 9, 10, 2**64 - 1))
        read.layer_ids[:] = source.pick(((), (3,), (7, 3), (3, 3), (2**32 - 1,), tuple(range(5000))))
        read.unverified, read.in_place = bool(source.below(2)), source.below(4) == 3
        read.wait_s = source.pick((0.0,) * 15 + (1.0,))
        reads.append(read)
    return reads


def check_many(data: bytes) -> None:
    """Two calls at once: each read is answered once, in its turn, with the rows that were stored or a documented code."""
    harness = fuzz_server._reads_harness()
    if harness.store.stat(_KEY) is None:
        put(harness.store, _KEY, _DATA, list(range(_ROWS)))
    source = Source(data)
    asked = [_reads(source) for _ in range(2)]
    raw = [bytearray(samples_pb2.ReadManyRequest(reads=reads).SerializeToString()) for reads in asked]
    spoilt = source.below(4) == 3 and len(raw[1]) > 0
    if spoilt:
        raw[1][source.below(len(raw[1]))] ^= 1 << source.below(8)
    calls = [Call([bytes(one)]) for one in raw]
    method = harness.method("Samples", "ReadMany").stream_stream
    answering = asyncio.wait_for(_both(method, calls), 60)
    for number, ended in enumerate(harness.loop.run_until_complete(answering)):
        if ended is not None:
            assert isinstance(ended, Aborted), ended
            assert ended.code in fuzz_server._CODES - {"INTERNAL"}, ended.code
        elif not (spoilt and number):
            _check_turns(asked[number], calls[number].replies)
    assert harness.count("reads") == 0


async def _both(method: Any, calls: list[Call]) -> list[BaseException | None]:
    ended: list[BaseException | None] = await asyncio.gather(*(method(None, call) for call in calls), return_exceptions=True)
    return ended


def _check_turns(reads: list[Read], replies: list[bytes]) -> None:
    left = [reply for message in replies for reply in split_replies(message)]
    for number, read in enumerate(reads):
        first, _ = decode_reply(left.pop(0))
        if first.WhichOneof("kind") == "error":
            assert first.error.read == number, "an error is of another read"
            assert first.error.code in fuzz_server._CODES - {"INTERNAL"}, first.error
            assert (read.namespace or "default", read.sample_id) != ("default", "read") or not _is_sound(read)
            continue
        assert first.WhichOneof("kind") == "header"
        assert (first.header.info.namespace, first.header.info.sample_id) == (read.namespace or "default", read.sample_id)
        rows = b""
        while left and decode_reply(left[0])[0].WhichOneof("kind") == "rows":
            rows += bytes(decode_reply(left.pop(0))[1])
        if read.sample_id == "read":
            assert rows == (b"" if read.in_place else _rows(read)), "other rows than were stored"
    assert not left, "more answers than reads"


def _is_sound(read: Read) -> bool:
    stop = read.stop if read.HasField("stop") else _ROWS
    layers = list(read.layer_ids)
    return read.start <= stop <= _ROWS and len(set(layers)) == len(layers) and set(layers) <= set(_LAYERS)


def _rows(read: Read) -> bytes:
    layer_bytes = ROW_BYTES // len(_LAYERS)
    return b"".join(
        _DATA[row * ROW_BYTES + _LAYERS.index(layer) * layer_bytes :][:layer_bytes]
        for row in range(read.start, read.stop if read.HasField("stop") else _ROWS)
        for layer in tuple(read.layer_ids) or _LAYERS
    )


# The client.


class _Stream:
    """A call's replies: then it ends, or breaks."""

    def __init__(self, replies: list[bytes], breaks: bool) -> None:
        self._replies = replies
        self._breaks = breaks

    def receive(self, limit_s: float) -> bytes | None:
        if self._replies:
            return self._replies.pop(0)
        if self._breaks:
            raise Interrupted("the connection broke")
        return None

    def close(self) -> None:
        self._replies.clear()


class _Rpc:
    """Calls whose replies an input decides on; after its end they are right."""

    others = 1

    def __init__(self, source: Source) -> None:
        self._source = source

    def read_many(self, request: samples_pb2.ReadManyRequest) -> _Stream:
        if self._source.below(16) == 15:
            raise NotServed("no such call")
        return self._stream(list(request.reads))

    def read(self, request: Read) -> _Stream:
        return self._stream([request])

    def pause(self, seconds: float) -> None:
        """No time passes: what is tried again is answered at once, and rightly in the end."""

    def _stream(self, reads: list[Read]) -> _Stream:
        source, replies = self._source, list[bytes]()
        for number, read in enumerate(reads):
            replies += self._answer(number, read)
        while replies and source.below(4) == 3:  # Some of them come together.
            at = source.below(len(replies))
            replies[at : at + 3] = [encode_replies([[reply] for reply in replies[at : at + 3]])]
        return _Stream(replies, breaks=source.below(4) == 3)

    def _answer(self, number: int, read: Read) -> Iterator[bytes]:
        """Mostly right: else an error of any read, a spoilt reply, no answer, or rows that do not belong here."""
        source, header = self._source, _header(read)
        wrong = source.below(16)
        if wrong == 1:
            error = samples_pb2.ReadError(read=source.below(5), code=source.pick(_ERRORS), message=source.text(9))
            yield samples_pb2.ReadReply(error=error).SerializeToString()
        elif wrong == 2:
            spoilt = bytearray(samples_pb2.ReadReply(header=header).SerializeToString())
            spoilt[source.below(len(spoilt))] ^= 1 << source.below(8)
            yield bytes(spoilt)
        elif wrong == 3:
            yield source.take(source.below(20))
        elif wrong != 4:
            yield samples_pb2.ReadReply(header=header).SerializeToString()
        if wrong != 1:
            for row in range(read.start, header.stop - (wrong == 5)):
                said = row + (wrong == 6)
                yield encode_rows(samples_pb2.RowsHeader(first_row=said, rows=1), (_content(read, said),))


_ERRORS = ("NOT_FOUND", "STILL_ARRIVING", "DAMAGED", "SAMPLE_FAILED", "SERVER_DRAINING", "UNAVAILABLE", "", "X" * 40)
_CLIENT_ROWS, _CLIENT_ROW_BYTES = 4, 16


def _header(read: Read) -> samples_pb2.ReadHeader:
    info = sample_pb2.SampleInfo(
        namespace="default",
        sample_id=read.sample_id,
        state=sample_pb2.SAMPLE_STATE_COMMITTED,
        model="m",
        dtype="F32",
        layer_ids=[1, 2],
        hidden_size=2,
        num_tokens=_CLIENT_ROWS,
        file_bytes=1,
        created_unix_ns=1,
        committed_unix_ns=2,
    )
    header = samples_pb2.ReadHeader(info=info, layer_ids=[1, 2], start=read.start, stop=_CLIENT_ROWS)
    header.token_ids.extend(range(read.start, _CLIENT_ROWS))
    return header


def _content(read: Read, row: int) -> bytes:
    return bytes([ord(read.sample_id[-1]), row] * (_CLIENT_ROW_BYTES // 2))


def check_many_replies(data: bytes) -> None:
    """For any answers, each read gets its own sample's rows, whole and in order, or one of our errors; or all end with one."""
    source = Source(data)
    reads = [Read(namespace="default", sample_id=f"s{n}") for n in range(1 + source.below(5))]
    wants = [source.below(4) != 3 for _ in reads]  # Who wants none has those of the next read come behind its own.

    def receive(reader: RowReader) -> tuple[str, array[int], bytes | None]:
        memory = bytearray(reader.nbytes)
        if not wants[int(reader.info.sample_id[1:])]:
            return reader.info.sample_id, reader.token_ids, None
        reader.read_into(memoryview(memory))
        return reader.info.sample_id, reader.token_ids, bytes(memory)

    rpc: Any = _Rpc(source)
    many = ManyReads(rpc, stall_limit_s=1, retry_s=3600, wait_s=0, data_dir=None, count=lambda info, by_call: None)
    answered = 0
    try:
        for key, answer in many.answers(((read.sample_id, read) for read in reads), partial(receive)):
            assert key == f"s{answered}"
            answered += 1
            if isinstance(answer, SlotStreamError):
                continue
            name, token_ids, rows = answer
            assert name == key
            if rows is not None and len(token_ids) == _CLIENT_ROWS:  # Not where a spoilt header says otherwise.
                # Bytes say whose they are, and of which row: nothing is another read's, and nothing is there twice.
                assert rows == b"".join(_content(reads[answered - 1], row) for row in range(_CLIENT_ROWS))
    except SlotStreamError:
        return
    assert answered == len(reads), "a read was left without an answer"


def _many_seeds() -> list[bytes]:
    """Two calls: of each three reads, the second one of a sample (of all kinds) or layers that are not there."""
    sound = bytes(8)  # The sample, no namespace, from row 0 to the last, all layers, verified, sent, no wait.
    others = [bytes((kind, 0, 0, 0, layers, 0, 0, 0)) for kind, layers in ((0, 0), (0, 2), (0, 3), (3, 0), (4, 0), (5, 0))]
    return [bytes((3,)) + sound + other + sound + bytes((2,)) + sound + other for other in others]


def _reply_seeds() -> list[bytes]:
    """Five reads, of which the second is answered in each wrong way; and the same where the call breaks."""
    return [bytes((4, *bytes(5), 0, 0, ends, 0, wrong, 0)) for wrong in range(7) for ends in (0, 3)]


TARGETS = (
    Target("many", check_many, 4, 128, _many_seeds),
    Target("many_replies", check_many_replies, 6, 128, _reply_seeds),
)
