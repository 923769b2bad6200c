"""The seam of a second data plane: rows that the server gets itself, where the peer only announces them.

`nixl/puller.py` is the one there is. Frames need none: their rows come on the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slotstream.server.nixl.reader import PoolSlot, ReadRequest
from slotstream.v1 import ingest_pb2 as pb


class Puller(Protocol):
    """Of one stream. Belongs to the event loop, and never waits but in `accept`."""

    async def accept(self, hello: pb.Hello) -> bool:
        """Whether chunks may be announced on this stream. Raises ProtocolViolation for an offer that cannot be meant."""

    def check(self, announce: pb.Announce) -> ReadRequest:
        """The request that an announcement means. Raises ProtocolViolation. Each is asked once, in the order of arrival."""

    def pull(self, requests: Sequence[ReadRequest]) -> None:
        """Get these rows. What becomes of each is told once, on any thread, to the puller's maker: bytes, or why not."""

    def forget(self, slots: Sequence[PoolSlot]) -> None:
        """The bytes in these slots are not needed any more; until then they stay as they are."""

    def close(self) -> list[ReadRequest]:
        """The stream ended. What was asked for and will not be told of."""
