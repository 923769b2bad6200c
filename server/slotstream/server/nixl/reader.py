"""The server's side of its reader process (`reader_process`): hands it announced chunks, and gets their bytes or why not.

The bytes lie in memory that both share, in a slot that the reader leaves alone until it is told that they are not needed any
more. When the reader dies, what it was to read has failed, and the next chunk starts another one, after a pause where that
one died as well. Each has a pool of its own: bytes that a writer still writes out stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from slotstream.server.metrics import Metrics
from slotstream.server.nixl.pool import map_pool
from slotstream.server.nixl.reader_process import READ_S
from slotstream.wire.errors import ConfigError
from slotstream.wire.nixl import NixlFault

_log = logging.getLogger(__name__)
_START_S = 30.0
_STUCK_S = 5.0  # Past a read's deadline: a reader that has said nothing for so long hangs in a library, and is killed.
_EXIT_S = 2.0
_LINK_BYTES = 4 << 20
_PAUSE_S = 5.0  # Before a third reader, after two that died; doubles up to _PAUSE_S_MAX.
_PAUSE_S_MAX = 300.0
_SOUND_S = 600.0  # A reader that lived for so long died of something else than the one before it.


@dataclass(frozen=True, slots=True)
class PoolSlot:
    """Where a chunk's bytes lie, for `NixlReader.free`."""

    reader: _Reader
    at: int


@dataclass(slots=True, eq=False)
class ReadRequest:
    """A chunk to be read from `address` of its peer; the rest is what its announcement says of it."""

    sample: int
    chunk: int
    first_row: int
    rows: int
    digest: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """What became of a request: its bytes, in `slot` until that is freed, and their xxh3-64; or why there are none."""

    request: ReadRequest
    slot: PoolSlot | None = None
    data: memoryview | None = None
    found: int | None = None
    problem: str = ""


@dataclass(slots=True, eq=False)
class ReadPeer:
    """One sender, as the reader knows it."""

    number: int
    name: str
    metadata: bytes
    take: Callable[[ReadAnswer], None]
    reader: _Reader | None = None  # The one that was told of it.
    connected: Future[ReadPeer] = field(default_factory=Future)


class _Reader:
    """A reader process, and the memory shared with it."""

    def __init__(self, pool_bytes: int) -> None:
        self.started_at = self.heard_at = time.monotonic()
        self.requests: dict[
            int, tuple[ReadPeer, ReadRequest, float]
        ] = {}  # What it is to read, and when it has to have answered.
        self.ready: Future[None] = Future()
        self.link, theirs = socket.socketpair()
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LINK_BYTES)
        pool = os.memfd_create("slotstream-nixl")
        try:
            os.ftruncate(pool, pool_bytes)
            self.memory = map_pool(pool, pool_bytes)
            arguments = (str(theirs.fileno()), str(pool), str(pool_bytes), str(READ_S))
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slotstream.server.nixl.reader_process", *arguments],
                pass_fds=(theirs.fileno(), pool),
                stdin=subprocess.DEVNULL,
            )
        finally:
            os.close(pool)
            theirs.close()

    def send(self, *message: object) -> None:
        """Never waits: a reader that does not listen for so long is none."""
        try:
            data = json.dumps([message]).encode() + b"\n"
            if self.link.send(data, socket.MSG_DONTWAIT) == len(data):
                return
        except OSError:
            pass
        self.process.kill()

    def end(self) -> int:
        """Its exit code, once it is gone; negative for a signal."""
        try:
            return self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class NixlReader:
    """What one reader process reads. Its methods may be called from any thread, and do not wait but where they say so."""

    def __init__(self, pool_bytes: int, metrics: Metrics) -> None:
        """Nothing is allocated or started before `begin`, or the first peer."""
        self._pool_bytes = pool_bytes
        self._metrics = metrics
        self._lock = threading.RLock()  # Guards everything below.
        self._reader: _Reader | None = None
        self._peers: dict[int, ReadPeer] = {}
        self._numbers = 0
        self._problem = ""  # Why there is no reader, and will be none.
        self._deaths = 0
        self._restart_at = 0.0
        self._quarantined = 0
        self._closed = False

    def begin(self) -> None:
        """Start the reader now, without waiting for it: the first peer need not wait while NIXL is loaded."""
        with self._lock, contextlib.suppress(NixlFault, OSError):  # The first peer tries again, and says why not.
            self._started()

    def prove(self) -> None:
        """Start the reader now, and wait for it. Raises ConfigError where NIXL does not work."""
        try:
            with self._lock:
                reader = self._started()
            reader.ready.result(_START_S)
        except (NixlFault, OSError) as error:
            raise ConfigError(f"--transport is nixl: {error}") from error
        except TimeoutError as error:
            raise ConfigError(f"--transport is nixl: NIXL did not start within {_START_S:.0f} s") from error

    def connect(self, name: str, metadata: bytes, take: Callable[[ReadAnswer], None]) -> Future[ReadPeer]:
        """A new peer; `take` will get its results, on a thread of the reader. The future may hold a NixlFault or an OSError.

        Starting a process, the first time, takes milliseconds.
        """
        with self._lock:
            peer = ReadPeer(self._next_number(), name, metadata, take)
            self._peers[peer.number] = peer
            try:
                self._introduce(peer, self._started())
            except (NixlFault, OSError) as error:
                if self._problem:
                    del self._peers[peer.number]
                    peer.connected.set_exception(error)
                else:  # For now. What it announces is asked for in frames, until there is a reader again.
                    peer.connected.set_result(peer)
            return peer.connected

    def request(self, peer: ReadPeer, requests: Sequence[ReadRequest]) -> None:
        """Read more chunks; the peer's `take` hears of each."""
        with self._lock:
            try:
                reader = self._started()
            except (NixlFault, OSError) as error:
                problem = str(error)
            else:
                if peer.reader is not reader:
                    self._introduce(peer, reader)
                answer_by = time.monotonic() + READ_S + _STUCK_S
                numbered = [(self._next_number(), request) for request in requests]
                reader.requests.update((number, (peer, request, answer_by)) for number, request in numbered)
                reader.send("request", peer.number, [(number, request.address, request.nbytes) for number, request in numbered])
                return
        for request in requests:
            peer.take(ReadAnswer(request, problem=problem))

    def free(self, slots: Sequence[PoolSlot]) -> None:
        """The bytes in `slots` are not needed any more."""
        with self._lock:
            reader = self._reader
            if reader is not None and (ours := [slot.at for slot in slots if slot.reader is reader]):
                reader.send("free", ours)

    def disconnect(self, peer: ReadPeer) -> list[ReadRequest]:
        """The peer's stream ended: nobody waits for what it announced. The requests that its `take` will not hear of."""
        with self._lock:
            self._peers.pop(peer.number, None)
            reader = self._reader
            if reader is None or peer.reader is not reader:
                return []
            reader.send("disconnect", peer.number)
            dropped = [number for number, (whose, _, _) in reader.requests.items() if whose is peer]
            return [reader.requests.pop(number)[1] for number in dropped]

    def close(self) -> None:
        """End the reader, and wait for that. Every stream must have ended."""
        with self._lock:
            self._closed = True
            self._problem = "the server is shutting down"
            reader = self._reader
        if reader is not None:
            if not reader.ready.done():  # It loads NIXL, and does not listen meanwhile.
                reader.process.kill()
            reader.link.shutdown(socket.SHUT_RDWR)
            reader.end()

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _started(self) -> _Reader:
        """The reader, a new one if need be. Raises NixlFault where there can be none, or not yet, and OSError."""
        if self._reader is None:
            if self._problem:
                raise NixlFault(self._problem)
            if time.monotonic() < self._restart_at:
                raise NixlFault("the process that reads over NIXL died, and is not started again yet")
            self._reader = _Reader(self._pool_bytes)
            threading.Thread(target=self._listen, args=(self._reader,), name="nixl", daemon=True).start()
        return self._reader

    def _introduce(self, peer: ReadPeer, reader: _Reader) -> None:
        peer.reader = reader
        reader.send("connect", peer.number, peer.name, peer.metadata.hex())

    # -- what the reader says, on a thread of its own

    def _listen(self, reader: _Reader) -> None:
        rest = b""
        reader.link.settimeout(1.0)
        while True:
            try:
                received = reader.link.recv(1 << 20)
            except TimeoutError:
                self._check_stuck(reader)
                continue
            except OSError:
                received = b""
            if not received:
                break
            reader.heard_at = time.monotonic()
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                try:
                    for name, *arguments in json.loads(line):
                        getattr(self, f"_on_{name}")(reader, *arguments)
                except Exception:
                    _log.exception("the reader said something that cannot be understood")
                    reader.process.kill()
        self._died(reader)

    def _on_ready(self, reader: _Reader) -> None:
        reader.ready.set_result(None)

    def _on_unusable(self, reader: _Reader, problem: str) -> None:
        with self._lock:
            self._problem = self._problem or problem
        reader.ready.set_exception(NixlFault(problem))

    def _on_log(self, reader: _Reader, line: str) -> None:
        _log.info("%s", line)

    def _on_alive(self, reader: _Reader) -> None:
        """It waits for slots that the server holds."""

    def _on_connected(self, reader: _Reader, number: int) -> None:
        with self._lock:
            peer = self._peers.get(number)
        if peer is not None and not peer.connected.done():
            peer.connected.set_result(peer)

    def _on_refused(self, reader: _Reader, number: int, problem: str) -> None:
        with self._lock:
            peer = self._peers.get(number)
            if peer is None:
                return
            if peer.connected.done():  # Another reader knew it. Its next chunk tries again.
                peer.reader = None
                return
            del self._peers[number]
        peer.connected.set_exception(NixlFault(problem))

    def _on_read(self, reader: _Reader, number: int, at: int, found: int) -> None:
        with self._lock:
            if number not in reader.requests:  # Its peer was disconnected.
                reader.send("free", [at])
                return
            peer, request, _ = reader.requests.pop(number)
        peer.take(ReadAnswer(request, PoolSlot(reader, at), reader.memory[at : at + request.nbytes], found))

    def _on_failed(self, reader: _Reader, number: int, problem: str, timed_out: bool) -> None:
        if timed_out:
            self._metrics.nixl_timeouts.inc()
        with self._lock:
            if number not in reader.requests:
                return
            peer, request, _ = reader.requests.pop(number)
        peer.take(ReadAnswer(request, problem=problem))

    def _on_quarantined(self, reader: _Reader, count: int) -> None:
        self._set_quarantined(count)

    def _set_quarantined(self, count: int) -> None:
        self._metrics.nixl_quarantined.inc(count - self._quarantined)  # The gauge is that of all readers.
        self._quarantined = count

    def _check_stuck(self, reader: _Reader) -> None:
        now = time.monotonic()
        if now - reader.heard_at < _STUCK_S:
            return
        with self._lock:
            if any(answer_by < now for _, _, answer_by in reader.requests.values()):
                _log.error("the process that reads over NIXL hangs: it is killed")
                reader.process.kill()

    def _died(self, reader: _Reader) -> None:
        code = reader.end()
        reader.link.close()
        with self._lock:
            self._reader = None
            requests, reader.requests = reader.requests, {}
            peers = [peer for peer in self._peers.values() if not peer.connected.done()]
            closing = self._closed
            if not closing and not self._problem:
                self._note_death(reader, code, len(requests))
        self._set_quarantined(0)  # What a dead process was to write nobody writes.
        problem = self._problem or "the process that reads over NIXL died"
        if not reader.ready.done():
            reader.ready.set_exception(NixlFault(problem))
        for peer in peers:
            peer.connected.set_exception(NixlFault(problem))
        for peer, request, _ in requests.values():
            peer.take(ReadAnswer(request, problem=problem))

    def _note_death(self, reader: _Reader, code: int, requests: int) -> None:
        now = time.monotonic()
        self._deaths = 1 if now - reader.started_at > _SOUND_S else self._deaths + 1
        pause_s = 0.0 if self._deaths == 1 else min(_PAUSE_S * 2 ** (self._deaths - 2), _PAUSE_S_MAX)
        self._restart_at = now + pause_s
        self._metrics.nixl_reader_deaths.inc()
        sentence = (
            "the process that reads over NIXL died (exit code %d): %d chunks come over gRPC; a new one may start in %.0f s"
        )
        _log.error(sentence, code, requests, pause_s)
