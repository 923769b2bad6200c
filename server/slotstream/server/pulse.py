"""Whether the event loop and the server's own threads still move.

Each has a pulse. It beats, or is excused while it waits for a disk or has nothing to do. One that is not excused and has not
beaten for BOUND_S is stuck, and so is one whose thread ended. A restart helps those; it does not bring a disk back.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BEAT_S = 1.0
BOUND_S = 10.0  # How long the event loop, or a thread, may keep still.


class Pulse:
    """The pulse of one thread, which alone beats; any thread may look."""

    def __init__(
        self,
        name: str,
        thread: threading.Thread | None = None,
        *,
        idle: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`thread`: its end is noticed too. `idle`: only its end, for all that it does is to wait for a disk or for work."""
        self.name = name
        self._thread = thread
        self._clock = clock
        self._beat_at = clock()
        self._excuses = int(idle)

    def beat(self) -> None:
        self._beat_at = self._clock()

    @contextmanager
    def excused(self) -> Iterator[None]:
        """While the block runs the thread waits for a disk, or for work, and may keep still."""
        self._excuses += 1
        try:
            yield
        finally:
            self.beat()  # Before the excuse ends: nobody may see an old beat without one.
            self._excuses -= 1

    @property
    def is_stuck(self) -> bool:
        if self._thread is not None and not self._thread.is_alive():
            return True
        beat_at = self._beat_at  # Before the excuses are looked at: an excuse that ends has beaten first.
        return not self._excuses and self._clock() - beat_at > BOUND_S


async def beat_forever(pulse: Pulse) -> None:
    """The event loop's own pulse: a task that runs until it is cancelled."""
    while True:
        pulse.beat()
        await asyncio.sleep(BEAT_S)
