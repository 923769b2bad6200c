"""What one stream announces, read over NIXL: a `Puller` (ingest/puller.py) on the server's `NixlReaders`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from slotstream.common.shared_memory import why_not_readable
from slotstream.server.nixl.reader import PoolSlot, ReadAnswer, ReadRequest
from slotstream.server.nixl.readers import NixlReaders, Route
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.errors import ProtocolViolation
from slotstream.wire.names import CHUNK_BYTES_MAX
from slotstream.wire.nixl import METADATA_BYTES_MAX, NAME_BYTES_MAX, SLOTS_MAX, NixlFault

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0  # The first peer's, while NIXL is being loaded, takes half a second.
_ADDRESS_END = 1 << 64


class NixlPuller:
    """Belongs to the event loop. `answered` is told of each request on a thread of the readers."""

    def __init__(self, readers: NixlReaders | None, answered: Callable[[ReadAnswer], None]) -> None:
        """`readers`: None where chunks come in frames only."""
        self._readers = readers
        self._answered = answered
        self._offer: pb.NixlOffer | None = None
        self._route: Route | None = None
        self._generations: dict[int, int] = {}  # slot of the offer -> the last one announced

    async def accept(self, hello: pb.Hello) -> bool:
        """See `Puller`."""
        if not hello.HasField("nixl"):
            return False
        offer = hello.nixl
        _check_offer(offer)
        if self._readers is None:
            return False
        if self._readers.shared_only and (why := why_not_readable(offer.pid, offer.canary_address, offer.canary)):
            _log.warning("rows of this stream come over gRPC: %s", why)
            return False
        started = await asyncio.to_thread(self._readers.connect, offer.agent, offer.metadata, self._answered)
        connected = asyncio.wrap_future(started)
        try:
            await asyncio.wait((connected,), timeout=_CONNECT_S)
        finally:  # Also where the stream ended meanwhile.
            if not connected.done():
                connected.add_done_callback(self._came_too_late)
        if not connected.done():
            _log.warning("rows of this stream come over gRPC: NIXL took longer than %.0f s", _CONNECT_S)
            return False
        try:
            self._route = connected.result()
        except Exception as error:
            level = logging.WARNING if isinstance(error, NixlFault) else logging.ERROR
            _log.log(level, "rows of this stream come over gRPC: %s", error)
            return False
        self._offer = offer
        return True

    def _came_too_late(self, connected: asyncio.Future[Route]) -> None:
        if self._readers is not None and not connected.cancelled() and connected.exception() is None:
            self._readers.disconnect(connected.result())

    def check(self, announce: pb.Announce) -> ReadRequest:
        """See `Puller`."""
        header, offer = announce.header, self._offer
        if offer is None:
            raise ProtocolViolation("chunks may be announced only on a stream that was told so")
        slot_at = offer.address + announce.slot * offer.slot_bytes
        if announce.slot >= offer.slots or not 1 <= announce.length <= CHUNK_BYTES_MAX:
            raise ProtocolViolation(f"a chunk of {announce.length} bytes in slot {announce.slot} cannot be announced")
        if not slot_at <= announce.address <= slot_at + offer.slot_bytes - announce.length:
            raise ProtocolViolation(f"a chunk was announced that does not lie in slot {announce.slot}")
        if announce.generation <= self._generations.get(announce.slot, 0):
            raise ProtocolViolation(f"slot {announce.slot} was announced again with an old generation")
        self._generations[announce.slot] = announce.generation
        return ReadRequest(
            header.sample, header.chunk, header.first_row, header.rows, header.xxh3, announce.address, announce.length
        )

    def pull(self, requests: Sequence[ReadRequest]) -> None:
        """See `Puller`."""
        assert self._readers is not None
        assert self._route is not None
        self._readers.request(self._route, requests)

    def forget(self, slots: Sequence[PoolSlot]) -> None:
        """See `Puller`."""
        if self._readers is not None:
            self._readers.free(slots)

    def close(self) -> list[ReadRequest]:
        """See `Puller`."""
        if self._readers is None or self._route is None:
            return []
        return self._readers.disconnect(self._route)


def _check_offer(offer: pb.NixlOffer) -> None:
    """Raises ProtocolViolation."""
    end = offer.address + offer.slots * offer.slot_bytes
    if not 0 < len(offer.agent.encode()) <= NAME_BYTES_MAX or not 0 < len(offer.metadata) <= METADATA_BYTES_MAX:
        raise ProtocolViolation("an offer of NIXL must name an agent and hold its metadata, both short")
    if not 1 <= offer.slots <= SLOTS_MAX or not offer.slot_bytes or not offer.address or end > _ADDRESS_END:
        raise ProtocolViolation("an offer of NIXL must name memory that can be")
