"""Limits how often a log line is written, and counts the lines that were left out."""

from __future__ import annotations

import time
from collections.abc import Callable


class Throttle:
    """Admits one event a key every `every_s` seconds. `clock`: monotonic seconds; None: this machine's."""

    def __init__(self, every_s: float, clock: Callable[[], float] | None = None) -> None:
        self._every_s = every_s
        self._clock = clock or (lambda: time.monotonic())
        self._seen: dict[str, tuple[float, int]] = {}  # key -> (when last admitted, refused since)

    def more(self, key: str) -> str | None:
        """What the end of a line says of those before it that were left out, "" of none; None when this one is left out too."""
        refused = self.admit(key)
        return None if refused is None else f" ({refused} more of its kind were not logged)" if refused else ""

    def admit(self, key: str) -> int | None:
        """How many events of `key` were refused since the last admitted one; None when this one is refused too."""
        now = self._clock()
        last, refused = self._seen.get(key, (float("-inf"), 0))
        if now - last < self._every_s:
            self._seen[key] = (last, refused + 1)
            return None
        self._seen[key] = (now, 0)
        return refused

    def overdue(self) -> dict[str, int]:
        """How many events of each key were refused, where one could be admitted now: those count as said from here on."""
        now = self._clock()
        due = {key: refused for key, (last, refused) in self._seen.items() if refused and now - last >= self._every_s}
        self._seen.update(dict.fromkeys(due, (now, 0)))
        return due
