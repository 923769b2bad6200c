"""What the peer of an ingest stream is told, in order; several replies in one message where it takes that."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable

from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.names import BATCH_MAX


class Replies:
    """Belongs to the event loop. Its length is the number of replies that are not on their way yet."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]], written: Callable[[], None]) -> None:
        """`written` is called whenever all there were have been written."""
        self.batches = False  # Set by the peer's Hello.
        self._write = write
        self._written = written
        self._waiting: deque[pb.IngestReply] = deque()
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, reply: pb.IngestReply) -> None:
        self._waiting.append(reply)
        self._added.set()

    async def send(self) -> None:
        """Sends them as they come, until it is cancelled or the peer is gone."""
        most = 1  # Welcome is said by itself.
        while True:
            await self._added.wait()
            self._added.clear()
            while self._waiting:
                replies = list(itertools.islice(self._waiting, most))
                most = BATCH_MAX if self.batches else 1
                message = self._message(replies)
                try:
                    await self._write(message)
                except Exception:  # gRPC has no class for it: the peer is gone.
                    return
                for _ in replies:  # Only now: none left means that everything is on its way.
                    self._waiting.popleft()
            self._written()

    def _message(self, replies: list[pb.IngestReply]) -> bytes:
        message = replies[0] if len(replies) == 1 else pb.IngestReply(batch=pb.ReplyBatch(replies=replies))
        return message.SerializeToString()
