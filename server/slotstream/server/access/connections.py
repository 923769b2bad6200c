"""Keeps few addresses from having all the connections: gRPC knows how many there are, and not whose.

Its own limit closes every new connection, also of a peer that has no other. So this looks at the process's sockets now and
then, and hangs up on what an address has beyond its share, and on what all have beyond three quarters of the limit: first on
connections that never asked for anything, then on others, and first on those of the address that has most. The last quarter
is for addresses that have one.

And it hangs up on the connections of calls whose messages do not end while the process grows: see bodies.py.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slotstream.common.throttle import Throttle
from slotstream.server.access.gate import Context, beyond_first, host_of, network_of, plain_host
from slotstream.server.access.limits import CONNECTIONS
from slotstream.server.config import ServerConfig

_log = logging.getLogger(__name__)
_EVERY_S = 0.5
_AGAIN_S = 0.05  # After a look that closed some: who opens them without end must not fill the last quarter meanwhile.
_MUCH_BYTES = 2 << 20  # Requests are small: a connection that brought so much, and no message, is not that of a busy caller.
_THROTTLED_BYTES = 4 << 10
_WINDOW_BYTES = 1 << 30  # As large as the kernel lets it be.
_TCP_INFO_BYTES_RECEIVED = (128, 136)  # Where `struct tcp_info` of <linux/tcp.h> has it.
_DESCRIPTORS = Path("/proc/self/fd")
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_Peer = tuple[str, int]  # Host and port.


class Connections:
    """Connections that this process accepted. Looks from a thread of its own, from `start` to `stop`."""

    def __init__(self, config: ServerConfig) -> None:
        self._of_address = CONNECTIONS.of_peer(config)
        self._of_all = beyond_first(CONNECTIONS.total(config))
        self._silent: set[_Peer] = set()  # At the last look, if there were too many.
        self._known_max = 2 * CONNECTIONS.total(config)
        self._known: set[_Peer] = set()  # Those that asked for something. The event loop adds, the thread forgets.
        self._is_shown = _DESCRIPTORS.is_dir()
        self._ports: set[int] = set()
        self._stopping = threading.Event()
        self._said = Throttle(every_s=60.0)
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)

    def start(self, addresses: Iterable[str]) -> None:
        """The server listens on these, real ports included."""
        self._ports = {int(address.rpartition(":")[2]) for address in addresses if not address.startswith("unix:")}
        if self._ports and self._is_shown:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def note(self, context: Context) -> None:
        """A call came over it."""
        peer = host_of(context.peer())
        if peer is not None and self._is_shown:
            self._known.add(peer)

    def hang_up(self, peers: Iterable[str]) -> None:
        """On these, as gRPC names them, where they sent much. For the event loop; looks at every descriptor."""
        with suppress(OSError):
            for descriptor, peer in self._found(peers):
                if _hang_up(descriptor, peer, _MUCH_BYTES):
                    self._say_hung_up(peer[0])

    def throttle(self, peers: Iterable[str], *, on: bool) -> bool:
        """While it is on, the kernel takes next to nothing from these, which must keep what they have to say.

        False where no descriptor was left to look with: some of them may be as they were. Looks at every descriptor.
        """
        try:
            for descriptor, peer in self._found(peers):
                _set_window(descriptor, peer, _THROTTLED_BYTES if on else _WINDOW_BYTES)
        except OSError as error:
            if not on and (more := self._said.more("throttle")) is not None:
                _log.warning("connections that were slowed down stay slow until this can be undone: %s%s", error, more)
            return False
        return True

    def _found(self, peers: Iterable[str]) -> Iterator[tuple[int, _Peer]]:
        """Descriptors of their connections; none where this system shows none. Raises OSError if none is left to look with."""
        wanted = {host for peer in peers if (host := host_of(peer)) is not None}
        if not wanted or not self._is_shown:
            return
        for descriptor in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
            with _or_gone():
                peer = self._accepted_from(descriptor)
                if peer is not None and peer in wanted:
                    yield descriptor, peer

    def _say_hung_up(self, host: str) -> None:
        if (unsaid := self._said.admit("unfinished")) is not None:
            more = f" ({unsaid} times more)" if unsaid else ""
            _log.warning("a connection of %s is closed: messages that did not end made memory grow%s", host, more)

    def _run(self) -> None:
        pause_s = _EVERY_S
        while not self._stopping.wait(pause_s):
            pause_s = _EVERY_S
            try:
                if self._look():
                    pause_s = min(_AGAIN_S, _EVERY_S)
            except OSError as error:
                if self._said.admit("error") is not None:
                    _log.warning("connections cannot be counted: %s", error)

    def _look(self) -> bool:
        """Whether some were closed. Raises OSError."""
        known = self._known.copy()  # First: what asks for something after that is not forgotten.
        descriptors = [int(path.name) for path in _DESCRIPTORS.iterdir()]
        if len(descriptors) <= min(self._of_address, self._of_all) and len(known) <= self._known_max:
            return False
        found = list(self._accepted(descriptors))
        self._known -= known - {peer for _, peer in found}
        closed = sum(_hang_up(descriptor, peer) for descriptor, peer in self._unwanted(found, self._known.copy()))
        if closed and (unsaid := self._said.admit("share")) is not None:
            more = f" ({unsaid} times more)" if unsaid else ""
            _log.warning("%d connections are closed: there were more than addresses may have, or all of them%s", closed, more)
        return closed > 0

    def _unwanted(self, found: list[tuple[int, _Peer]], known: set[_Peer]) -> list[tuple[int, _Peer]]:
        """Those to hang up on, of all that there are; `known` asked for something."""
        excess = len(found) - self._of_all
        silent_before, self._silent = self._silent, {peer for _, peer in found} - known if excess > 0 else set()
        of_address: Counter[str] = Counter()
        order: list[tuple[bool, int, int, _Peer]] = []
        # Each has a rank at its address: the first is the last to go. One that is alone may go if it was silent for a while.
        for descriptor, peer in sorted(found, key=lambda one: one[1] not in known):
            address = network_of(peer[0])
            rank = of_address[address]
            of_address[address] += 1
            if rank or (peer in silent_before and peer not in known):
                order.append((peer in known, -rank, descriptor, peer))
        order.sort()
        over = [one for one in order if -one[1] >= self._of_address]
        rest = [one for one in order if -one[1] < self._of_address]
        return [(descriptor, peer) for _, _, descriptor, peer in over + rest[: max(0, excess - len(over))]]

    def _accepted(self, descriptors: list[int]) -> Iterator[tuple[int, _Peer]]:
        for descriptor in descriptors:
            with suppress(OSError):
                if (peer := self._accepted_from(descriptor)) is not None:
                    yield descriptor, peer

    def _accepted_from(self, descriptor: int) -> _Peer | None:
        """Whom a connection is with; None for what is none of the accepted ones. Raises OSError."""
        with _looked_at(descriptor) as connection:
            is_ours = connection is not None and connection.getsockname()[1] in self._ports
            return _peer_of(connection) if connection is not None and is_ours else None


@contextmanager
def _or_gone() -> Iterator[None]:
    """Passes over a connection that ended meanwhile. Raises OSError where no descriptor is left to look with."""
    try:
        yield
    except OSError as error:
        if error.errno in _SHORT:
            raise


@contextmanager
def _looked_at(descriptor: int) -> Iterator[socket.socket | None]:
    """A TCP socket of this process, through a descriptor of our own; None for what is none. Raises OSError."""
    if not str((_DESCRIPTORS / str(descriptor)).readlink()).startswith("socket:"):
        yield None
        return
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        yield connection if connection.family in (socket.AF_INET, socket.AF_INET6) else None


def _peer_of(connection: socket.socket) -> _Peer:
    name = connection.getpeername()
    return plain_host(str(name[0])), int(name[1])


def _hang_up(descriptor: int, peer: _Peer, received_bytes_min: int = 0) -> bool:
    """Whether it was still that connection, and that much came over it: gRPC notices that it ended, and closes it."""
    with suppress(OSError), _looked_at(descriptor) as connection:
        if connection is not None and _peer_of(connection) == peer and _received_bytes(connection) >= received_bytes_min:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _set_window(descriptor: int, peer: _Peer, nbytes: int) -> None:
    """How much of that connection, if it still is that one, the kernel receives before somebody reads it, at most.

    Raises OSError where no descriptor is left to look with.
    """
    with _or_gone(), _looked_at(descriptor) as connection:
        if connection is not None and _peer_of(connection) == peer:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, nbytes)


def _received_bytes(connection: socket.socket) -> int:
    """How many in all; 0 where the kernel does not say. Raises OSError."""
    start, stop = _TCP_INFO_BYTES_RECEIVED
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, stop)
    return int.from_bytes(info[start:stop], sys.byteorder)
