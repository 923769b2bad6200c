"""The process that reads announced chunks out of the senders' memory. `reader` starts it and speaks to it.

It is a process of its own because NIXL and UCX parse what peers send, and crash at times when peers come and go (seen in
NIXL 1.5.1: an endpoint that is closed while its peer dies). Here that costs a few chunks that come over gRPC instead, and
the work of the reads is not done under the server's interpreter lock. It hashes what it has read, too: the bytes are in the
processor's cache then, and would come out of memory again later.

A peer is a sender's agent. It may have several streams at a time: a sender that lost its stream can be back before the server
has noticed. A peer whose transfer failed, or took too long, gets no further one until all that it has are over; then
NIXL forgets it, and its next chunk starts over.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from slotstream.server.nixl.pool import NixlPool, map_pool
from slotstream.wire.hashing import xxh3
from slotstream.wire.nixl import NixlAgent, NixlFault, memory_address

READ_S = 5.0  # A peer that was stopped never answers, and never fails.
_WAIT_S = 20.0  # So much longer for a slot while the server writes what it holds.
_ALIVE_S = 1.0
_ACTIVE_MAX = 4  # Transfers of one peer at a time: enough to keep a connection busy, few enough to quarantine.
_HANDLES_MAX = 128  # Prepared transfers kept for each peer.
_BUSY_S = 0.0002
_IDLE_S = 0.01
_RECEIVE_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class _ReadRequest:
    number: int
    stream: int
    address: int
    nbytes: int
    deadline: float  # Monotonic: of being started without a wait, then of being over.
    slot: int = -1
    handle: Any = None
    over: bool = False
    digest: int | None = None  # Of the bytes in `slot`, once they are all there.


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    metadata: bytes
    streams: set[int] = field(default_factory=set)  # When none is left, nobody waits for it.
    known: bool = True  # To NIXL.
    broken: bool = False  # Starts nothing before what it has is over.
    waiting: deque[_ReadRequest] = field(default_factory=deque)
    active: deque[_ReadRequest] = field(default_factory=deque)
    lost: list[_ReadRequest] = field(default_factory=list)  # Given up, and not over.
    handles: OrderedDict[tuple[int, int, int], Any] = field(default_factory=OrderedDict)


class Reader:
    """Serves one server over `link`, until that is closed. The methods `on_*` are its requests.

    Both ways a line is a list of messages in JSON: what is said at a time goes in one, for a line costs more than a message.
    """

    def __init__(self, link: socket.socket, pool_descriptor: int, pool_bytes: int, read_s: float) -> None:
        """Raises NixlFault."""
        self._link = link
        self._to_say: list[tuple[object, ...]] = []
        self._read_s = read_s
        self._memory = map_pool(pool_descriptor, pool_bytes)
        self._address = memory_address(self._memory)
        self._pool = NixlPool(self._memory.nbytes)
        self._agent = NixlAgent(lambda line: self._say("log", line))
        # What that returns stays here: who does not have it cannot write into the pool.
        self._agent.register(self._address, self._memory.nbytes)
        self._peers: deque[_Peer] = deque()
        self._by_stream: dict[int, _Peer] = {}
        self._received = b""
        self._quarantined = 0
        self._lent = 0  # Slots that the server was told of, and holds.
        self._said_at = 0.0
        self._moved = False  # A transfer is over: there may be another to start at once.
        self._say("ready")

    def serve(self) -> None:
        """Returns when the server is gone."""
        self._tell()
        while self._listen():
            self._advance()
            self._tell()

    def _say(self, *message: object) -> None:
        self._to_say.append(message)

    def _tell(self) -> None:
        now = time.monotonic()
        if not self._to_say and now - self._said_at > _ALIVE_S and any(peer.waiting for peer in self._peers):
            self._say("alive")  # Else the server would take one that waits for its slots for one that hangs.
        if self._to_say:
            self._said_at = now
            said, self._to_say = self._to_say, []
            self._link.sendall(json.dumps(said).encode() + b"\n")

    def _listen(self) -> bool:
        """Do what the server asked for meanwhile; False when it is gone."""
        busy = any(peer.active for peer in self._peers)
        pause_s = 0 if self._moved else _BUSY_S if busy else _IDLE_S if self._peers else None
        self._moved = False
        if not select.select((self._link,), (), (), pause_s)[0]:
            return True
        received = self._link.recv(_RECEIVE_BYTES)
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            for name, *arguments in json.loads(line):
                getattr(self, f"on_{name}")(*arguments)
        return bool(received)

    # -- what the server asks for

    def on_connect(self, stream: int, name: str, metadata: str) -> None:
        """A stream, by the number that the server gives it, and the peer that it offers to read from."""
        try:
            peer = self._peer_of(name, bytes.fromhex(metadata))
        except NixlFault as error:
            self._say("refused", stream, str(error))
            return
        peer.streams.add(stream)
        self._by_stream[stream] = peer
        self._say("connected", stream)

    def on_request(self, stream: int, wanted: list[tuple[int, int, int]]) -> None:
        """Read memory of the stream's peer: each time a number, an address and bytes. Each is answered with read or failed."""
        peer = self._by_stream.get(stream)
        deadline = time.monotonic() + self._read_s
        for number, address, nbytes in wanted:
            if peer is None:
                self._say("failed", number, "the peer is not connected", False)
            else:
                peer.waiting.append(_ReadRequest(number, stream, address, nbytes, deadline))

    def on_free(self, slots: list[int]) -> None:
        """The server is done with slots that it was told of."""
        self._lent -= len(slots)
        for slot in slots:
            self._pool.give(slot)

    def on_disconnect(self, stream: int) -> None:
        """The stream ended: nobody waits for what it announced."""
        peer = self._by_stream.pop(stream, None)
        if peer is not None:
            peer.streams.discard(stream)
            peer.waiting = deque(request for request in peer.waiting if request.stream != stream)

    # -- transfers

    def _peer_of(self, name: str, metadata: bytes) -> _Peer:
        """A peer that is known to NIXL. Raises NixlFault where it cannot be, or the name is another's."""
        known = next((peer for peer in self._peers if peer.name == name), None)
        if known is not None:
            if known.metadata != metadata:
                raise NixlFault("a peer of that name is connected already, with other metadata")
            return known
        peer = _Peer(name, metadata)
        self._add(peer)
        self._peers.append(peer)
        return peer

    def _add(self, peer: _Peer) -> None:
        """Make a peer known to NIXL. Raises NixlFault where it is not the one that it says it is."""
        try:
            said = self._agent.add_peer(peer.metadata)
        except NixlFault:
            with contextlib.suppress(NixlFault):  # What NIXL took of it would stand in the way of the right metadata.
                self._agent.remove_peer(peer.name)
            raise
        if said != peer.name:
            if all(other.name != said for other in self._peers):
                self._agent.remove_peer(said)
            raise NixlFault("the peer's metadata belongs to another agent")

    def _advance(self) -> None:
        self._peers.rotate(-1)  # Slots are short at times: every peer is the first to get one now and then.
        for peer in tuple(self._peers):
            if not peer.streams:
                self._abandon(peer, "")
            self._finish(peer)
            if peer.broken:
                self._clean_up(peer)
            if not peer.broken:
                self._start(peer)
                self._finish(peer)  # On one host what was started is over by now.
            self._expire(peer)
        if self._peers:
            self._agent.progress()
        if self._quarantined != self._pool.quarantined:
            self._quarantined = self._pool.quarantined
            self._say("quarantined", self._quarantined)

    def _finish(self, peer: _Peer) -> None:
        """Hand on what was read, in order, with its hash."""
        while peer.active:
            request = peer.active[0]
            try:
                if not (request.over or self._agent.is_over(request.handle)):
                    return
            except NixlFault as error:
                request.over = True
                self._break(peer, str(error))
                return
            peer.active.popleft()
            peer.handles[request.slot, request.address, request.nbytes] = request.handle
            if len(peer.handles) > _HANDLES_MAX:
                self._release(peer.handles.popitem(last=False)[1])
            self._moved = True
            self._lent += 1
            self._say("read", request.number, request.slot, self._hash(request) if request.digest is None else request.digest)

    def _start(self, peer: _Peer) -> None:
        while peer.waiting and len(peer.active) < _ACTIVE_MAX and (slot := self._pool.take(peer.waiting[0].nbytes)) is not None:
            request = peer.waiting.popleft()
            request.slot = slot
            request.deadline = time.monotonic() + self._read_s
            try:
                request.handle = self._prepare(peer, request)
            except NixlFault as error:
                self._pool.give(slot)
                self._say("failed", request.number, str(error), False)
                continue
            peer.active.append(request)
            try:
                request.over = self._agent.post(request.handle)
            except NixlFault as error:
                request.over = True
                self._break(peer, str(error))
                return
            if request.over:
                request.digest = self._hash(request)  # Before the next one is read, which would push it out of the cache.

    def _hash(self, request: _ReadRequest) -> int:
        return xxh3(self._memory[request.slot : request.slot + request.nbytes])

    def _prepare(self, peer: _Peer, request: _ReadRequest) -> Any:
        """A transfer that was used before, or a new one. Raises NixlFault for a peer, or memory of it, that cannot be read."""
        if not peer.known:
            self._add(peer)
            peer.known = True
        handle = peer.handles.pop((request.slot, request.address, request.nbytes), None)
        local = self._address + request.slot
        return handle or self._agent.read(peer.name, request.address, local, request.nbytes)

    def _expire(self, peer: _Peer) -> None:
        now = time.monotonic()
        if peer.active and peer.active[0].deadline < now:
            self._break(peer, f"a chunk was not read within {self._read_s:.0f} s", timed_out=True)
        patience_s = _WAIT_S if self._lent else 0.0
        while peer.waiting and peer.waiting[0].deadline + patience_s < now:
            self._say("failed", peer.waiting.popleft().number, "no slot of the pool came free", False)

    def _break(self, peer: _Peer, problem: str, *, timed_out: bool = False) -> None:
        """Something went wrong: what the peer has announced is given up."""
        self._abandon(peer, problem, timed_out=timed_out)
        while peer.waiting:
            self._say("failed", peer.waiting.popleft().number, problem, False)

    def _abandon(self, peer: _Peer, problem: str, *, timed_out: bool = False) -> None:
        """Nobody waits for what is being read; its slots are left alone until it is over."""
        peer.broken = True
        for request in peer.active:
            self._pool.set_aside(request.slot)
            if problem:
                self._say("failed", request.number, problem, timed_out)
        peer.lost += peer.active
        peer.active.clear()

    def _clean_up(self, peer: _Peer) -> None:
        """Give back the slots of what is over by now; once all is, forget the peer."""
        for request in tuple(peer.lost):
            if request.over or self._ended(request.handle):
                peer.lost.remove(request)
                self._pool.give(request.slot)
                self._release(request.handle)
        while peer.waiting:
            self._say("failed", peer.waiting.popleft().number, "the transfer before it is not over", False)
        if peer.lost:
            return
        self._forget(peer)
        peer.broken = False
        if not peer.streams:
            self._peers.remove(peer)

    def _forget(self, peer: _Peer) -> None:
        while peer.handles:
            self._release(peer.handles.popitem()[1])
        if peer.known:
            peer.known = False
            with contextlib.suppress(NixlFault):  # NIXL forgets a peer by itself when it finds it dead.
                self._agent.remove_peer(peer.name)

    def _ended(self, handle: Any) -> bool:
        """Whether a transfer is over, well or not."""
        try:
            return self._agent.is_over(handle)
        except NixlFault:
            return True

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release(handle)
        except NixlFault as error:
            self._say("log", str(error))


def main() -> None:
    """`python -m slotstream.server.nixl.reader_process LINK POOL POOL_BYTES READ_S`: two descriptors, a size and a deadline."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Meant for the server, which may want to finish what it has.
        signal.signal(number, signal.SIG_IGN)
    descriptor, pool, nbytes = (int(word) for word in sys.argv[1:4])
    link = socket.socket(fileno=descriptor)
    try:
        Reader(link, pool, nbytes, float(sys.argv[4])).serve()
    except NixlFault as error:
        link.sendall(json.dumps([("unusable", str(error))]).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        pass  # The server was killed.
    os._exit(0)  # Libraries that NIXL brings crash at times in what they do at an exit; there is nothing left to do.


if __name__ == "__main__":
    main()
