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


def planes_for(transport: str, servers: Sequence[str], streams: int = 1) -> list[DataPlane]:
    """The data planes of a sender's streams for the connector option `transport` (auto, grpc or nixl) to these servers.

    NIXL pays where the server can read this process's memory, on one host, or a network card can. Over plain TCP it is faster
    than frames on many cores and slower on few (benchmarks/README.md), unencrypted, and wants more ports: ask for it.
    """
    frames: list[DataPlane] = [Frames() for _ in range(streams)]
    if transport == "grpc":
        return frames
    if transport == "auto" and not all(map(is_local, servers)) and not has_rdma():
        return frames
    if transport == "auto" and not is_installed():
        logger.info("slotstream: rows go over gRPC; for NIXL: %s", INSTALL)
        return frames
    offered = OfferedStaging(required=transport == "nixl")
    return [NixlPlane(offered=offered) for _ in range(streams)]


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


class OfferedStaging:
    """Staging as servers are offered it: one agent, registration and count of generations for all planes of a sender.

    One thread owns the agent, and serves those who read for as long as a plane needs it. `changed` guards this and the planes.
    `required`: what keeps NIXL from working on this side is a ConfigError, not a line in the log.
    """

    def __init__(self, *, required: bool = False) -> None:
        self.required = required
        self.changed = threading.Condition()
        self.offer: ingest_pb2.NixlOffer | None = None
        self._generations: list[int] = []
        self._planes: list[NixlPlane] = []
        self._open = 0  # Planes that are not closed.
        self._canary = Canary()
        self._thread: threading.Thread | None = None

    def add(self, plane: NixlPlane) -> None:
        """A plane that announces out of this; it must `close` this once."""
        self._planes.append(plane)
        self._open += 1

    def use(self, memory: memoryview, slot_bytes: int) -> None:
        """The memory to offer; only the first plane's call does something. Raises ConfigError."""
        if self._thread is not None:
            return
        ready: Future[ingest_pb2.NixlOffer] = Future()
        arguments = (memory, slot_bytes, ready)
        self._thread = threading.Thread(target=self._own, args=arguments, name="slotstream-nixl", daemon=True)
        self._thread.start()
        try:
            offer = ready.result(_START_S)
        except (NixlFault, TimeoutError) as error:
            problem = str(error) or f"NIXL did not start within {_START_S:.0f} s"
            if self.required:
                raise ConfigError(f"connector option transport is nixl: {problem}") from error
            logger.warning("slotstream: rows go over gRPC: %s", problem)
            return
        self._generations = [0] * offer.slots
        self.offer = offer

    def slot_of(self, address: int, nbytes: int) -> int | None:
        """The slot that these bytes lie in; None where they are not of what is offered."""
        offer = self.offer
        if offer is None:
            return None
        slot, at = divmod(address - offer.address, offer.slot_bytes)
        return slot if 0 <= slot < offer.slots and at + nbytes <= offer.slot_bytes else None

    def next_generation(self, slot: int) -> int:
        """With `changed` held: greater each time that the slot is announced, on any stream."""
        self._generations[slot] += 1
        return self._generations[slot]

    def close(self, timeout_s: float) -> None:
        """A plane needs it no more; the last one's call ends the thread."""
        with self.changed:
            self._open -= 1
            self.changed.notify_all()
            is_last = not self._open
        if is_last and self._thread is not None:
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
            self.offer = None  # What is announced will be asked for again; nothing more is.
            self._planes[0].fell_back(f"rows go over gRPC from here on: {error}")
        finally:
            del agent  # Before the memory that it has registered.

    def _wait(self) -> bool:
        """Until it is time to serve the server again; False when there is nobody to serve any more."""
        with self.changed:
            if self._open:
                busy = any(plane.is_busy for plane in self._planes)
                served = any(plane.is_welcome for plane in self._planes)
                self.changed.wait(_BUSY_S if busy else _IDLE_S if served else None)
            return self._open > 0


class NixlPlane:
    """A `DataPlane` of one stream. Without staging, or NIXL, or a server that takes it, chunks are frames.

    `offered`: what it announces out of, shared with the sender's other streams; else its own, with `required`.
    """

    batch_max = ANNOUNCEMENTS_MAX

    def __init__(self, *, required: bool = False, offered: OfferedStaging | None = None) -> None:
        self._offered = offered or OfferedStaging(required=required)
        self._offered.add(self)
        self._frames = Frames()
        self._on_event: Callable[[SinkEvent], None] = lambda event: None
        self._changed = self._offered.changed  # Guards everything below.
        self._announced: set[int] = set()
        self._trust = _Trust()
        self.is_welcome = False  # The server of this stream reads what is announced.
        self._warned = False

    @property
    def is_busy(self) -> bool:
        """Whether there is something that the server has yet to read."""
        return bool(self._announced)

    def use_staging(self, memory: memoryview, slot_bytes: int) -> None:
        self._offered.use(memory, slot_bytes)

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        self._on_event = on_event

    def hello(self, hello: ingest_pb2.Hello) -> ingest_pb2.Hello:
        offer = self._offered.offer
        if offer is None:
            return hello
        offering = ingest_pb2.Hello(nixl=offer)
        offering.MergeFrom(hello)
        return offering

    def welcomed(self, welcome: ingest_pb2.Welcome) -> None:
        if self._offered.offer is None:
            return
        with self._changed:
            self.is_welcome = welcome.nixl
            self._changed.notify_all()
            warn, self._warned = not welcome.nixl and not self._warned, not welcome.nixl
        if welcome.nixl:
            logger.info("slotstream: the server reads rows over NIXL")
        elif warn:
            logger.log(
                logging.WARNING if self._offered.required else logging.INFO,
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
        buffer = chunk.buffer
        if buffer.readonly:  # Staging is not.
            return False
        address = memory_address(buffer)
        slot = self._offered.slot_of(address, buffer.nbytes)
        if slot is None or not self.is_welcome or not self._trust.may_announce(chunk.chunk):
            return False
        if not self._announced:
            self._changed.notify_all()
        self._announced.add(chunk.chunk)
        generation = self._offered.next_generation(slot)
        announcements.chunks.add(
            header=chunk_header(chunk), slot=slot, generation=generation, address=address, length=buffer.nbytes
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
            self.fell_back(f"the server could not read rows over NIXL: they go over gRPC for {pause_s:.0f} s")

    def fell_back(self, message: str) -> None:
        """Says so."""
        logger.warning("slotstream: %s", message)
        self._on_event(FellBack(message))

    def ended(self) -> None:
        with self._changed:
            self.is_welcome = False
            self._announced.clear()
            self._trust.forget_trial()

    def close(self, timeout_s: float) -> None:
        self._offered.close(timeout_s)
