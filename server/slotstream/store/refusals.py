"""Samples that failed under an id that another one has: a committed row says nothing of them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping

from slotstream.store.records import Failure, SampleKey

_IDS_MAX = 4096
_CODES_MAX = 16  # Of one id: a sender may give up with any code.
_OTHER = "OTHER"


class Refusals:
    """How many samples of an id failed for good, by code, since the start; of the last few thousand ids. Thread safe."""

    def __init__(self) -> None:
        self._counts: OrderedDict[SampleKey, Counter[str]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, key: SampleKey, failure: Failure) -> None:
        """One failed. One that is going to be sent again does not count."""
        if failure.retryable:
            return
        with self._lock:
            counts = self._counts.setdefault(key, Counter())
            counts[failure.code if failure.code in counts or len(counts) < _CODES_MAX else _OTHER] += 1
            self._counts.move_to_end(key)
            while len(self._counts) > _IDS_MAX:
                self._counts.popitem(last=False)

    def of(self, key: SampleKey) -> Mapping[str, int]:
        """Code -> how many."""
        with self._lock:
            return dict(self._counts.get(key, ()))
