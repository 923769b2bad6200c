"""The target of announced chunks: streams as in `fuzz_server`, whose peers offer memory that the server reads by itself.

NIXL is not in it: a reader of ours stands in for the reader process, reads memory that never changes, and cannot read some.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fuzz_harness import Source, Target
from fuzz_server import ROW_BYTES, ROWS_MAX, Harness, Model, Stream, check_streams, make_streams, rows_of, say_frames
from google.protobuf.message import DecodeError

from slotstream.server.nixl.reader import PoolSlot, ReadAnswer, ReadRequest
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.frames import encode_chunk
from slotstream.wire.hashing import xxh3
from slotstream.wire.nixl import NixlFault

_BASE = 1 << 20
_SLOTS = 5
_SLOT_ROWS = 8
_SLOT_BYTES = _SLOT_ROWS * ROW_BYTES
_UNREADABLE = 4
_DELAYS_S = (0.0, 3e-3, 1e-4, 0.0, 1e-4)  # Of reading a slot: some are overtaken, and some outlive their stream.
_FIRST_ROWS = (0, 0, 4, 4, 0)  # Rows of a sample that a slot's content begins with.
_STAGING = b"".join(rows_of(slot % 2, first, _SLOT_ROWS) for slot, first in enumerate(_FIRST_ROWS))


@dataclass(eq=False)
class _Peer:
    take: Callable[[ReadAnswer], None]


class _NixlReader:
    """What a stream asks of a `NixlReader`. A request is answered a few turns of the loop later, or never: see `disconnect`."""

    shared_only = False

    def __init__(self) -> None:
        self.lent = 0
        self._pending: dict[ReadRequest, _Peer] = {}

    def connect(self, name: str, metadata: bytes, take: Callable[[ReadAnswer], None]) -> Future[_Peer]:
        connected: Future[_Peer] = Future()
        if metadata == b"refused":
            connected.set_exception(NixlFault("the metadata are wrong"))
        else:
            connected.set_result(_Peer(take))
        return connected

    def request(self, peer: _Peer, requests: Sequence[ReadRequest]) -> None:
        loop = asyncio.get_running_loop()
        for request in requests:
            self._pending[request] = peer
            loop.call_later(_DELAYS_S[(request.address - _BASE) // _SLOT_BYTES], self._answer, request)

    def _answer(self, request: ReadRequest) -> None:
        peer = self._pending.pop(request, None)
        if peer is None:
            return
        at = request.address - _BASE
        if at // _SLOT_BYTES == _UNREADABLE:
            peer.take(ReadAnswer(request, problem="it cannot be read"))
            return
        self.lent += 1
        slot: Any = self
        data = memoryview(_STAGING)[at : at + request.nbytes]
        peer.take(ReadAnswer(request, PoolSlot(slot, 0), data, xxh3(data)))

    def free(self, slots: Sequence[PoolSlot]) -> None:
        self.lent -= len(slots)
        assert self.lent >= 0, "a slot was given back twice"

    def disconnect(self, peer: _Peer) -> list[ReadRequest]:
        dropped = [request for request, whose in self._pending.items() if whose is peer]
        for request in dropped:
            del self._pending[request]
        return dropped


def _staged(announce: pb.Announce) -> bytes | None:
    at = announce.address - _BASE
    return _STAGING[at : at + announce.length] if 0 <= at < _UNREADABLE * _SLOT_BYTES else None


def _hello(source: Source) -> pb.Hello:
    offer = pb.NixlOffer(agent="a", metadata=b"m", address=_BASE, slot_bytes=_SLOT_BYTES, slots=_SLOTS)
    match source.below(24):
        case 1:
            offer.metadata = source.pick((b"", b"refused", b"m" * (65 << 10)))
        case 2:
            offer.slots = source.pick((0, 1, 2**32 - 1))
        case 3:
            offer.address = source.pick((0, 2**64 - 1, 2**64 - _SLOTS * _SLOT_BYTES))
        case 4:
            offer.agent = source.text(200)
        case 5:
            offer.slot_bytes = source.pick((0, 1, 2**32 - 1))
        case 6:
            return pb.Hello(protocol=1)
    return pb.Hello(protocol=1, nixl=offer)


def _announce(source: Source, chunk: int) -> pb.Announce:
    slot, at = source.below(_SLOTS), source.below(_SLOT_ROWS)
    rows = source.below(_SLOT_ROWS - at) + 1
    begin = slot * _SLOT_BYTES + at * ROW_BYTES
    data = _STAGING[begin : begin + rows * ROW_BYTES]
    header = pb.ChunkHeader(sample=source.below(6), chunk=chunk, first_row=_FIRST_ROWS[slot] + at, rows=rows, xxh3=xxh3(data))
    announce = pb.Announce(header=header, slot=slot, generation=chunk, address=_BASE + begin, length=len(data))
    match source.below(24):
        case 1:
            announce.header.xxh3 ^= 1
        case 2:
            announce.header.rows = source.pick((0, rows + 1, 2**32 - 1))
        case 3:
            announce.header.first_row = source.pick((2**32 - 1, 1 << 21, ROWS_MAX))
        case 4:
            announce.slot = source.pick((slot ^ 1, _SLOTS, 2**32 - 1))
        case 5:
            announce.address += source.pick((1, _SLOT_BYTES, 2**40))
        case 6:
            announce.length = source.pick((0, 1, _SLOT_BYTES, 2**32 - 1))
        case 7:
            announce.generation = source.pick((0, 1, 2**32 - 1))
        case 8:
            announce.header.chunk = source.below(40)
    return announce


def _say(source: Source, stream: Stream, number: int) -> None:
    match source.below(4):
        case 0 | 1:
            say_frames(source, stream, number)
        case 2:
            first = 100 + number * 4  # Past the numbers of frames, and growing, as generations are.
            chunks = [_announce(source, first + more) for more in range(source.pick((1, 1, 2, 3, 0)))]
            request = pb.IngestRequest(announcements=pb.Announcements(chunks=chunks))
            stream.requests.append(request.SerializeToString())
        case _:
            stream.requests.append(_frame_of(source, stream))


def _frame_of(source: Source, stream: Stream) -> bytes:
    """A chunk announced before, as a frame: what a peer sends that is asked for it again."""
    try:
        chunks = pb.IngestRequest.FromString(source.pick(stream.requests)).announcements.chunks
    except DecodeError:
        return b""
    if not chunks:
        return b""
    announce = chunks[source.below(len(chunks))]
    at = announce.address - _BASE
    return encode_chunk(announce.header, _STAGING[max(0, at) :][: announce.length])


@cache
def _harness() -> tuple[Harness, _NixlReader]:
    reader = _NixlReader()
    return Harness(reader), reader


def check_announced(data: bytes) -> None:
    """As `check_ingest`; and no slot that the server read into is kept."""
    harness, reader = _harness()
    check_streams(harness, make_streams(Source(data), _hello, _say), partial(Model, staged=_staged))
    assert reader.lent == 0, "slots were never given back"


def _seeds() -> list[bytes]:
    """Streams whose bytes follow `make_streams` and `_say`: a sample of two announcements, one asked for again, a break."""
    opened = bytes((0, 0, 0, 1, 0, 11, 1, 0))  # stream, frames, action, number, id, rows, exact, nothing wrong
    first = bytes((0, 2, 0, 0, 0, 3, 1, 0))  # stream, announce, one; slot, at, rows, sample, nothing wrong
    rest = bytes((0, 2, 0, 2, 0, 7, 1, 0))
    unread = bytes((0, 2, 0, _UNREADABLE, 0, 3, 1, 0))
    again = bytes((0, 3, 2, 0))
    commit = bytes((0, 0, 9, 12, 0, 1, 0))
    both = bytes((0, 2, 2, 0, 0, 3, 1, 0, 2, 0, 7, 1, 0))
    slow = bytes((0, 2, 0, 1, 0, 7, 1, 0))
    return [
        bytes((0, 0, 0, 4)) + opened + first + slow + bytes((0, 0, 13, 0, 3)),
        bytes((0, 0, 0, 23)) + opened + first + rest + commit,
        bytes((0, 0, 0, 23)) + opened + both + commit,
        bytes((0, 0, 0, 23)) + opened + unread + again + rest + commit,
        bytes((0, 0, 0, 23)) + opened + unread + commit,
        bytes((0, 0, 0, 3)) + opened + both + bytes((3,)),
        bytes((1, 0, 0, 4)) + opened + both + commit + bytes((0, 0, 0, 23)) + opened + first + rest + commit,
    ]


TARGETS = (Target("announced", check_announced, 2, 512, _seeds),)
