"""The announced chunks of one stream: checked, read by the `NixlReaders`, and waited for by what the peer said after them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from slotstream.common.shared_memory import why_not_readable
from slotstream.server.ingest.sample_writer import Abort, Commit
from slotstream.server.nixl.reader import ReadAnswer, ReadRequest
from slotstream.server.nixl.readers import NixlReaders, Route
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.errors import ProtocolViolation
from slotstream.wire.names import CHUNK_BYTES_MAX
from slotstream.wire.nixl import METADATA_BYTES_MAX, NAME_BYTES_MAX, SLOTS_MAX, NixlFault

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0  # The first peer's, while NIXL is being loaded, takes half a second.
_ADDRESS_END = 1 << 64


class Announced:
    """Belongs to the event loop; only `results` is filled from elsewhere, and `wake` called then."""

    def __init__(self, readers: NixlReaders | None, wake: Callable[[], None]) -> None:
        self.results: deque[ReadAnswer] = deque()
        self._readers = readers
        self._wake = wake
        self._offer: pb.NixlOffer | None = None
        self._route: Route | None = None
        self._generations: dict[int, int] = {}  # slot of the offer -> the last one announced
        self._expected: dict[int, set[int]] = {}  # sample -> chunks announced, and not with their writer yet
        self._parked: dict[int, list[tuple[Commit | Abort, int]]] = {}  # sample -> what was said after them, and its bytes
        self._resent: dict[int, int] = {}  # chunk asked for again -> its sample

    async def accept(self, offer: pb.NixlOffer) -> bool:
        """Whether chunks may be announced on this stream. Raises ProtocolViolation for an offer that cannot be meant."""
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

    def take(self, announce: pb.Announce) -> ReadRequest:
        """A checked announcement, as a request that was not started. Raises ProtocolViolation."""
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
        if header.chunk in self._expected.get(header.sample, ()):
            raise ProtocolViolation(f"chunk {header.chunk} was announced while it is being read")
        self._generations[announce.slot] = announce.generation
        return ReadRequest(
            header.sample, header.chunk, header.first_row, header.rows, header.xxh3, announce.address, announce.length
        )

    def expect(self, request: ReadRequest) -> None:
        """It is going to be started. Until `arrived`, its sample's later items are parked."""
        self._expected.setdefault(request.sample, set()).add(request.chunk)

    def start(self, requests: Sequence[ReadRequest]) -> None:
        """Read what is expected; what becomes of each appears in `results`."""
        assert self._readers is not None
        assert self._route is not None
        self._readers.request(self._route, requests)

    def _answered(self, answer: ReadAnswer) -> None:
        self.results.append(answer)
        self._wake()

    def ask_again(self, request: ReadRequest) -> None:
        """The chunk will come in a frame, or never; until then it is waited for."""
        self._resent[request.chunk] = request.sample

    def never_to_come(self) -> set[int]:
        """The peer says no more: samples of chunks that it was asked for again."""
        return set(self._resent.values())

    def is_resent(self, sample: int, chunk: int) -> bool:
        """Whether a frame is one that was asked for; asked once a chunk."""
        if self._resent.get(chunk) != sample:
            return False
        del self._resent[chunk]
        return True

    def arrived(self, sample: int, chunk: int) -> list[tuple[Commit | Abort, int]]:
        """A chunk is with its writer, or never will be; what waited for the last one, in order."""
        expected = self._expected.get(sample)
        if expected is None:
            return []
        expected.discard(chunk)
        if expected:
            return []
        del self._expected[sample]
        return self._parked.pop(sample, [])

    def park(self, sample: int, item: Commit | Abort, nbytes: int) -> bool:
        """Whether `item` has to wait for announced chunks; if so, it is kept here."""
        if sample not in self._expected:
            return False
        self._parked.setdefault(sample, []).append((item, nbytes))
        return True

    def forget(self, sample: int) -> list[tuple[Commit | Abort, int]]:
        """The sample ended; what was parked for it."""
        for chunk in self._expected.pop(sample, ()):
            self._resent.pop(chunk, None)
        return self._parked.pop(sample, [])

    def free(self, answer: ReadAnswer) -> None:
        """The bytes of a result are not needed."""
        if self._readers is not None and answer.slot is not None:
            self._readers.free((answer.slot,))

    def close(self) -> list[ReadRequest]:
        """The stream ended. What was started and will not appear in `results`."""
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
