"""Where chunks are written: on the event loop while the disk takes them at the speed of memory, else by a thread.

Written where it was just read, a chunk is still in the CPU's cache and no thread has to be woken for it: 15% less CPU time
a byte on two cores. But a disk that stops would stop the loop, and every other stream with it; so a write that took long
sends those after it to the thread until the disk has been quick again for a while.
"""

from __future__ import annotations

import time

_SLOW_S = 0.05  # 2 MiB take the page cache under 1 ms; a disk that is written to at its own speed takes this and more.
_SLOW_FOR_S = 5.0


class Pace:
    """How long writes of chunks took lately. Any thread may call it."""

    def __init__(self) -> None:
        self._slow_until = 0.0

    @property
    def is_fast(self) -> bool:
        """Whether no write of the last seconds was slow."""
        return time.monotonic() >= self._slow_until

    def took(self, seconds: float) -> None:
        """A chunk was written."""
        if seconds >= _SLOW_S:
            self._slow_until = time.monotonic() + _SLOW_FOR_S
