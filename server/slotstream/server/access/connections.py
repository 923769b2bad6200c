"""Keeps one address from having all the connections: gRPC knows how many there are, and not whose.

Its own limit closes every new connection, also of a peer that has no other. So this looks at the process's sockets now and
then, and hangs up on what an address has beyond its share: first on connections that never asked for anything.

And it hangs up on the connections of calls whose messages do not end while the process grows: see bodies.py.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slotstream.common.throttle import Throttle
from slotstream.server.access.gate import Context, host_of, network_of, plain_host
from slotstream.server.access.limits import CONNECTIONS
from slotstream.server.config import ServerConfig

_log = logging.getLogger(__name__)
_EVERY_S = 0.5
_MUCH_BYTES = 2 << 20  # Requests are small: a connection that brought so much, and no message, is not that of a busy caller.
_TCP_INFO_BYTES_RECEIVED = (128, 136)  # Where `struct tcp_info` of <linux/tcp.h> has it.
_DESCRIPTORS = Path("/proc/self/fd")
_Peer = tuple[str, int]  # Host and port.


class Connections:
    """Connections that this process accepted. Looks from a thread of its own, from `start` to `stop`."""

    def __init__(self, config: ServerConfig) -> None:
        self._of_address = CONNECTIONS.of_peer(config)
        self._known_max = 2 * CONNECTIONS.total(config)
        self._known: OrderedDict[_Peer, None] = OrderedDict()  # Those that asked for something. For the event loop.
        self._ports: set[int] = set()
        self._stopping = threading.Event()
        self._said = Throttle(every_s=60.0)
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)

    def start(self, addresses: Iterable[str]) -> None:
        """The server listens on these, real ports included."""
        self._ports = {int(address.rpartition(":")[2]) for address in addresses if not address.startswith("unix:")}
        if self._ports and _DESCRIPTORS.is_dir():
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def note(self, context: Context) -> None:
        """A call came over it."""
        peer = host_of(context.peer())
        if peer is not None:
            self._known[peer] = None
            self._known.move_to_end(peer)
            if len(self._known) > self._known_max:
                self._known.popitem(last=False)

    def hang_up(self, peers: Iterable[str]) -> None:
        """On these, as gRPC names them, where they sent much. For the event loop; looks at every descriptor."""
        wanted = {host for peer in peers if (host := host_of(peer)) is not None}
        if not wanted:
            return
        with suppress(OSError):  # No descriptor is left to look with, or this system shows none.
            for descriptor, peer in list(self._accepted([int(path.name) for path in _DESCRIPTORS.iterdir()])):
                if peer in wanted and _hang_up(descriptor, peer, _MUCH_BYTES):
                    self._say_hung_up(peer[0])

    def _say_hung_up(self, host: str) -> None:
        if (unsaid := self._said.admit("unfinished")) is not None:
            more = f" ({unsaid} times more)" if unsaid else ""
            _log.warning("a connection of %s is closed: messages that did not end made memory grow%s", host, more)

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            try:
                self._look()
            except OSError as error:
                if self._said.admit("error") is not None:
                    _log.warning("connections cannot be counted: %s", error)

    def _look(self) -> None:
        descriptors = [int(path.name) for path in _DESCRIPTORS.iterdir()]
        if len(descriptors) <= self._of_address:
            return
        found = list(self._accepted(descriptors))
        of_address = Counter(network_of(peer[0]) for _, peer in found)
        greedy = {address: count - self._of_address for address, count in of_address.items() if count > self._of_address}
        if not greedy:
            return
        known = set(self._known.copy())
        for descriptor, peer in sorted(found, key=lambda one: one[1] in known):
            address = network_of(peer[0])
            if greedy.get(address, 0) > 0 and _hang_up(descriptor, peer):
                greedy[address] -= 1
        if (unsaid := self._said.admit("share")) is not None:
            more = f" ({unsaid} times more)" if unsaid else ""
            _log.warning("some connections are closed: one address had more than its %d%s", self._of_address, more)

    def _accepted(self, descriptors: list[int]) -> Iterator[tuple[int, _Peer]]:
        for descriptor in descriptors:
            with suppress(OSError), _looked_at(descriptor) as connection:
                if connection is not None and connection.getsockname()[1] in self._ports:
                    yield descriptor, _peer_of(connection)


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


def _received_bytes(connection: socket.socket) -> int:
    """How many in all; 0 where the kernel does not say. Raises OSError."""
    start, stop = _TCP_INFO_BYTES_RECEIVED
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, stop)
    return int.from_bytes(info[start:stop], sys.byteorder)
