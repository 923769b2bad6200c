"""The store's clock: the wall clock, but never backwards, not even over a restart.

Listings, page tokens and "the oldest goes first" order samples by these stamps. If they followed a clock that is set back,
a new sample could count as the oldest one, and be deleted first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """Strictly increasing Unix nanoseconds. Thread safe."""

    def __init__(self, floor_unix_ns: int = 0, source: Callable[[], int] = time.time_ns) -> None:
        """`floor_unix_ns`: the latest stamp given out before; `source`: the wall clock."""
        self._last = floor_unix_ns
        self._source = source
        self._lock = threading.Lock()

    def stamp(self) -> int:
        """The time now, or a nanosecond after the last stamp where the wall clock is behind it."""
        with self._lock:
            self._last = max(self._last + 1, self._source())
            return self._last

    def now(self) -> int:
        """The time now, not behind any stamp; uses none up."""
        with self._lock:
            return max(self._last, self._source())
