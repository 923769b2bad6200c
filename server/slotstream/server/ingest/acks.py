"""Which chunks a stream took, said of many at a time.

A written chunk is noticed, and acked, with the next one that arrives or after _DELAY_S: waking the event loop, and a message,
cost about as much as a chunk does. An ack does not wait for more once it is worth a _SHARE of the peer's window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slotstream.v1 import ingest_pb2 as pb

_DELAY_S = 0.004
_SHARE = 8


class Acks:
    """Belongs to the event loop. Its length is the number of chunks that were taken and not acked yet."""

    def __init__(
        self,
        window_bytes: int,
        collect: Callable[[], None],
        reply: Callable[[pb.IngestReply], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """`window_bytes`: what the peer may have in flight. `collect` looks what was written, and calls `add` for it.

        `failed` is told of a fault in that, or in `reply`, when it was time to look.
        """
        self.window_bytes = window_bytes
        self._collect = collect
        self._reply = reply
        self._failed = failed
        self._chunks: list[int] = []
        self._nbytes = 0
        self._held = 0
        self._timer: asyncio.TimerHandle | None = None  # Set while chunks are held, or wait to be acked.

    def __len__(self) -> int:
        return len(self._chunks)

    def hold(self) -> None:
        """A chunk came, and is not written yet."""
        self._held += 1
        self._look_later()

    def let_go(self) -> None:
        """A chunk that was held is done with, well or not."""
        self._held -= 1

    def add(self, chunk: int, nbytes: int) -> None:
        """The peer needs the chunk no longer."""
        self._chunks.append(chunk)
        self._nbytes += nbytes
        if self._nbytes * _SHARE >= self.window_bytes:
            self.send()
        else:
            self._look_later()

    def send(self) -> None:
        """Say now what there is to say."""
        if self._chunks:
            ack, self._chunks, self._nbytes = pb.Ack(chunks=self._chunks), [], 0
            self._reply(pb.IngestReply(ack=ack))

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        try:
            self._collect()
            self.send()
        except Exception as error:
            self._failed(error)
            return
        if self._held:
            self._look_later()
