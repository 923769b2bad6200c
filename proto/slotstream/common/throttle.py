"""Limits how often a log line is written, and counts the lines that were left out."""

from __future__ import annotations

import time


class Throttle:
    """Admits one event a key every `every_s` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._seen: dict[str, tuple[float, int]] = {}  # key -> (when last admitted, refused since)

    def admit(self, key: str) -> int | None:
        """How many events of `key` were refused since the last admitted one; None when this one is refused too."""
        now = time.monotonic()
        last, refused = self._seen.get(key, (float("-inf"), 0))
        if now - last < self._every_s:
            self._seen[key] = (last, refused + 1)
            return None
        self._seen[key] = (now, 0)
        return refused
