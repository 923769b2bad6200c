"""The store's clock: stamps that never go back, not even over a restart, and the wall clock, by which ages go.

Listings, page tokens and "the oldest goes first" order samples by their stamps. If these followed a clock that is set back, a
new sample could count as the oldest one, and be deleted first. Ages must not follow them: a clock that once ran ahead leaves
its stamps ahead, and by those every sample would be old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def boot_ns() -> int:
    """Nanoseconds since the machine was started, asleep or awake; nobody sets this clock."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Clock:
    """Unix nanoseconds. Thread safe."""

    def __init__(
        self, floor_unix_ns: int = 0, source: Callable[[], int] = time.time_ns, elapsed: Callable[[], int] = boot_ns
    ) -> None:
        """`floor_unix_ns`: the latest stamp given out before; `source`: the wall clock; `elapsed`: one that is never set."""
        self._last = floor_unix_ns
        self._source = source
        self.elapsed = elapsed
        self._lock = threading.Lock()

    def stamp(self) -> int:
        """The time now, or a nanosecond after the last stamp where the wall clock is behind it. Strictly increasing."""
        with self._lock:
            self._last = max(self._last + 1, self._source())
            return self._last

    def heard(self, stamp: int) -> None:
        """Another process gave this stamp out: none from here on is before it."""
        with self._lock:
            self._last = max(self._last, stamp)

    def now(self) -> int:
        """The wall clock, unchecked."""
        return self._source()

    @property
    def last(self) -> int:
        """The latest stamp."""
        with self._lock:
            return self._last
