"""The NIXL data plane: chunks are announced, and the server reads them out of staging, which is registered once.

When it fails in any way, the server asks for the chunk as a frame: nothing is lost but time. Chunks then go over gRPC for
a while; after that a single one is announced, to see whether NIXL works again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from slotstream.common.shared_memory import Canary
from slotstream.transport.base import FellBack, RowChunk, SinkEvent
from slotstream.transport.grpc import DataPlane, Frames, chunk_header
from slotstream.transport.logs import connector_logger
from slotstream.v1 import ingest_pb2
from slotstream.wire.address import is_local
from slotstream.wire.errors import ConfigError
from slotstream.wire.nixl import (
    ANNOUNCEMENTS_MAX,
    INSTALL,
    METADATA_BYTES_MAX,
    SLOTS_MAX,
    NixlAgent,
    NixlFault,
    has_rdma,
    is_installed,
    memory_address,
)

logger = connector_logger(__name__)
_now = time.monotonic

# Over TCP the server reads nothing that this side does not serve; where both are on one host it would not have to.
_BUSY_S = 0.0005
_IDLE_S = 0.01
_START_S = 30.0
_PAUSE_S = 5.0  # After the first failure; doubles up to _PAUSE_S_MAX.
_PAUSE_S_MAX = 300.0


def plane_for(transport: str, *servers: str) -> DataPlane:
    """The data plane of the connector option `transport` (auto, grpc or nixl) towards the servers at these addresses.

    NIXL pays where the server can read this process's memory, on one host, or a network card can. Over plain TCP it is faster
    than frames on many cores and slower on few (benchmarks/README.md), unencrypted, and wants more ports: ask for it.
    """
    if transport == "grpc":
        return Frames()
    if transport == "auto" and not all(map(is_local, servers)) and not has_rdma():
        return Frames()
    if transport == "auto" and not is_installed():
        logger.info("slotstream: rows go over gRPC; for NIXL: %s", INSTALL)
        return Frames()
    return NixlPlane(required=transport == "nixl")


class _Trust:
    """Whether to announce: yes until the server fails to read, then not for a while, then one chunk to try. Not thread-safe."""

    def __init__(self) -> None:
        self._pause_s = _PAUSE_S
        self._resume_at: float | None = None  # Monotonic; set while NIXL is not trusted.
        self._trial: int | None = None

    def may_announce(self, chunk: int) -> bool:
        if self._resume_at is None:
            return True
        if self._trial is None and _now() >= self._resume_at:
            self._trial = chunk
            return True
        return False

    def worked(self, chunk: int) -> bool:
        """An announced chunk was read. Whether that ends a pause."""
        if self._trial != chunk:
            return False
        self._resume_at = self._trial = None
        self._pause_s = _PAUSE_S
        return True

    def failed(self, chunks: Sequence[int]) -> float | None:
        """Announced chunks were not read. How long the pause is that begins with it; None when one is running already."""
        if self._resume_at is not None and self._trial not in chunks:
            return None
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, _PAUSE_S_MAX)
        self._resume_at, self._trial = _now() + pause_s, None
        return pause_s

    def forget_trial(self) -> None:
        self._trial = None


class NixlPlane:
    """A `DataPlane`. One thread owns the agent; without staging, or NIXL, or a server that takes it, chunks are frames.

    `required`: what keeps NIXL from working on this side is a ConfigError, not a line in the log.
    """

    batch_max = ANNOUNCEMENTS_MAX

    def __init__(self, *, required: bool = False) -> None:
        self._required = required
        self._frames = Frames()
        self._on_event: Callable[[SinkEvent], None] = lambda event: None
        self._offer: ingest_pb2.NixlOffer | None = None
        self._changed = threading.Condition()  # Guards everything below.
        self._generations: list[int] = []
        self._announced: set[int] = set()
        self._trust = _Trust()
        self._welcome = False  # The server of this stream reads what is announced.
        self._warned = False
        self._closed = False
        self._canary = Canary()
        self._thread: threading.Thread | None = None

    def use_staging(self, memory: memoryview, slot_bytes: int) -> None:
        ready: Future[ingest_pb2.NixlOffer] = Future()
        arguments = (memory, slot_bytes, ready)
        self._thread = threading.Thread(target=self._own, args=arguments, name="slotstream-nixl", daemon=True)
        self._thread.start()
        try:
            offer = ready.result(_START_S)
        except (NixlFault, TimeoutError) as error:
            problem = str(error) or f"NIXL did not start within {_START_S:.0f} s"
            if self._required:
                raise ConfigError(f"connector option transport is nixl: {problem}") from error
            logger.warning("slotstream: rows go over gRPC: %s", problem)
            return
        self._generations = [0] * offer.slots
        self._offer = offer

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        self._on_event = on_event

    def hello(self, hello: ingest_pb2.Hello) -> ingest_pb2.Hello:
        if self._offer is None:
            return hello
        offering = ingest_pb2.Hello(nixl=self._offer)
        offering.MergeFrom(hello)
        return offering

    def welcomed(self, welcome: ingest_pb2.Welcome) -> None:
        if self._offer is None:
            return
        with self._changed:
            self._welcome = welcome.nixl
            self._changed.notify_all()
            warn, self._warned = not welcome.nixl and not self._warned, not welcome.nixl
        if welcome.nixl:
            logger.info("slotstream: the server reads rows over NIXL")
        elif warn:
            logger.log(
                logging.WARNING if self._required else logging.INFO,
                "slotstream: rows go over gRPC: the server does not take NIXL",
            )

    def encode(self, chunks: Sequence[RowChunk]) -> Iterator[bytes]:
        request = ingest_pb2.IngestRequest()
        with self._changed:
            frames = [chunk for chunk in chunks if not self._announce(chunk, request.announcements)]
        # One message for all of them: what a message costs, on both sides, is more than all else that a chunk does.
        if request.announcements.chunks:
            yield request.SerializeToString()
        yield from self._frames.encode(frames)

    def _announce(self, chunk: RowChunk, announcements: ingest_pb2.Announcements) -> bool:
        """Add what is said of a chunk that the server is to read; False where it has to be sent."""
        offer, buffer = self._offer, chunk.buffer
        if offer is None or buffer.readonly:  # Staging is not.
            return False
        address = memory_address(buffer)
        slot, at = divmod(address - offer.address, offer.slot_bytes)
        if not 0 <= slot < offer.slots or at + buffer.nbytes > offer.slot_bytes:
            return False
        if not self._welcome or not self._trust.may_announce(chunk.chunk):
            return False
        self._generations[slot] += 1
        if not self._announced:
            self._changed.notify_all()
        self._announced.add(chunk.chunk)
        announcements.chunks.add(
            header=chunk_header(chunk), slot=slot, generation=self._generations[slot], address=address, length=buffer.nbytes
        )
        return True

    def acked(self, chunk: int) -> None:
        with self._changed:
            if chunk not in self._announced:
                return
            self._announced.discard(chunk)
            again = self._trust.worked(chunk)
        if again:
            logger.info("slotstream: NIXL works again")

    def refused(self, chunks: Sequence[int]) -> None:
        with self._changed:
            refused = [chunk for chunk in chunks if chunk in self._announced]
            self._announced.difference_update(refused)
            pause_s = self._trust.failed(refused) if refused else None
        if pause_s is not None:
            self._fell_back(f"the server could not read rows over NIXL: they go over gRPC for {pause_s:.0f} s")

    def _fell_back(self, message: str) -> None:
        logger.warning("slotstream: %s", message)
        self._on_event(FellBack(message))

    def ended(self) -> None:
        with self._changed:
            self._welcome = False
            self._announced.clear()
            self._trust.forget_trial()

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    # -- the thread that owns the agent

    def _own(self, memory: memoryview, slot_bytes: int, ready: Future[ingest_pb2.NixlOffer]) -> None:
        try:
            agent = NixlAgent(lambda line: logger.info("slotstream: %s", line))
            address = memory_address(memory)
            offer = ingest_pb2.NixlOffer(
                agent=agent.name,
                metadata=agent.register(address, memory.nbytes),
                address=address,
                slot_bytes=slot_bytes,
                slots=memory.nbytes // slot_bytes,
                pid=self._canary.pid,
                canary_address=self._canary.address,
                canary=self._canary.content,
            )
            if offer.slots > SLOTS_MAX or len(offer.metadata) > METADATA_BYTES_MAX:
                raise NixlFault(f"staging in {offer.slots} slots is more than can be offered")
        except Exception as error:
            ready.set_exception(error if isinstance(error, NixlFault) else NixlFault(f"NIXL cannot be set up: {error}"))
            return
        ready.set_result(offer)
        try:
            while self._wait():
                agent.progress()
        except NixlFault as error:
            self._offer = None  # What is announced will be asked for again; nothing more is.
            self._fell_back(f"rows go over gRPC from here on: {error}")
        finally:
            del agent  # Before the memory that it has registered.

    def _wait(self) -> bool:
        """Until it is time to serve the server again; False when there is nobody to serve any more."""
        with self._changed:
            if not self._closed:
                pause_s = _BUSY_S if self._announced else _IDLE_S if self._welcome else None
                self._changed.wait(pause_s)
            return not self._closed
