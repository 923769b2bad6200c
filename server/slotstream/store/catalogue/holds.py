"""Who has a sample open: retention leaves it alone meanwhile. Of this process."""

from __future__ import annotations

import threading
from collections import Counter

from slotstream.store.records import SampleKey


class ReadHold:
    """Keeps one sample from retention until `end`. A deletion by name does not wait for it."""

    def __init__(self, holds: Holds, key: SampleKey) -> None:
        self._holds = holds
        self._key: SampleKey | None = key

    def end(self) -> None:
        """More than once does nothing more."""
        key, self._key = self._key, None
        if key is not None:
            self._holds.end(key)


class Holds:
    """Thread safe."""

    def __init__(self) -> None:
        self._count: Counter[SampleKey] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Samples that somebody has open."""
        return len(self._count)

    def hold(self, key: SampleKey) -> ReadHold:
        with self._lock:
            self._count[key] += 1
        return ReadHold(self, key)

    def end(self, key: SampleKey) -> None:
        """One hold on the sample is over."""
        with self._lock:
            self._count[key] -= 1
            if not self._count[key]:
                del self._count[key]

    def has(self, key: SampleKey) -> bool:
        with self._lock:
            return key in self._count
