"""Several NIXL readers behind one interface. Each has a process and a pool of its own.

On one host a read is a copy that the kernel makes in the reading process: a core does 4 to 5 GB/s (H200's host; two do twice
that), and a GPU captures more. So where there are cores the samples of each sender are dealt out; the chunks of one sample stay
in order that way, and its hashes need not be read back. Beyond four, what writes is what the rest waits for there
(benchmarks/README.md).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from slotstream.common.cores import for_cores
from slotstream.server.config import NIXL_POOL_BYTES_MIN, ServerConfig
from slotstream.server.metrics import Metrics
from slotstream.server.nixl.reader import NixlReader, PoolSlot, ReadAnswer, ReadPeer, ReadRequest
from slotstream.wire.nixl import INSTALL, is_installed

_log = logging.getLogger(__name__)
_READERS_MAX = 4  # When the server is to choose.


@dataclass(slots=True, eq=False)
class Route:
    """One sender, as each reader that can read from it knows it."""

    ways: list[tuple[NixlReader, ReadPeer]]


def readers_for(config: ServerConfig, cores: int | None = None) -> int:
    """How many processes read over NIXL in each of the server's: what was asked for, else by the cores that it may use."""
    most = min(_READERS_MAX, config.nixl_pool_bytes // NIXL_POOL_BYTES_MIN)
    return config.nixl_readers or for_cores(most, cores=cores, sharers=config.workers)


def start_readers(config: ServerConfig, metrics: Metrics) -> NixlReaders | None:
    """What reads rows over NIXL; None where rows come over gRPC only. Blocks where NIXL is asked for. Raises ConfigError."""
    if config.transport in ("auto", "shared") and not is_installed():
        _log.info("rows come over gRPC; for NIXL: %s", INSTALL)
        return None
    if config.transport == "grpc":
        return None
    count = readers_for(config)
    parts = [NixlReader(config.nixl_pool_bytes // count, metrics) for _ in range(count)]
    readers = NixlReaders(parts, shared_only=config.transport == "shared")
    if config.transport == "nixl":
        try:
            readers.prove()
        except BaseException:
            readers.close()
            raise
    else:
        readers.begin()
    return readers


class NixlReaders:
    """All that a server reads over NIXL. Its methods may be called from any thread, and do not wait but where they say so."""

    def __init__(self, readers: Sequence[NixlReader], *, shared_only: bool = False) -> None:
        """Nothing is started before `begin`, or the first peer. `shared_only`: peers whose memory can be read here."""
        self.shared_only = shared_only
        self._readers = tuple(readers)

    def begin(self) -> None:
        """Start every reader now, without waiting for them."""
        for reader in self._readers:
            reader.begin()

    def prove(self) -> None:
        """Start every reader now, and wait for them. Raises ConfigError where NIXL does not work."""
        with ThreadPoolExecutor(len(self._readers)) as pool:
            list(pool.map(NixlReader.prove, self._readers))

    def connect(self, name: str, metadata: bytes, take: Callable[[ReadAnswer], None]) -> Future[Route]:
        """A new sender; `take` will get its results, on threads of the readers. The future may hold a NixlFault or an OSError.

        One reader that can read from it is enough. Starting processes, the first time, takes milliseconds.
        """
        connected: Future[Route] = Future()
        connected.set_running_or_notify_cancel()  # Nobody can cancel it from here on.
        waiting = len(self._readers)
        lock = threading.Lock()

        def one_answered(_: Future[ReadPeer]) -> None:
            nonlocal waiting
            with lock:
                waiting -= 1
                if waiting:
                    return
            ways = [(reader, said.result()) for reader, said in started if said.exception() is None]
            if ways:
                connected.set_result(Route(ways))
            else:
                connected.set_exception(started[0][1].exception())

        started = [(reader, reader.connect(name, metadata, take)) for reader in self._readers]
        for _, said in started:
            said.add_done_callback(one_answered)
        return connected

    def request(self, route: Route, requests: Sequence[ReadRequest]) -> None:
        """Read more chunks; the sender's `take` hears of each."""
        count = len(route.ways)
        for number, (reader, peer) in enumerate(route.ways):
            if ours := [request for request in requests if request.sample % count == number]:
                reader.request(peer, ours)

    def free(self, slots: Sequence[PoolSlot]) -> None:
        """The bytes in `slots` are not needed any more."""
        for reader in self._readers:
            reader.free(slots)

    def disconnect(self, route: Route) -> list[ReadRequest]:
        """The sender's stream ended: nobody waits for what it announced. The requests that its `take` will not hear of."""
        return [request for reader, peer in route.ways for request in reader.disconnect(peer)]

    def close(self) -> None:
        """End the readers, and wait for that. Every stream must have ended."""
        for reader in self._readers:
            reader.close()
