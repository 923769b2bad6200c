"""How many failed samples a peer may leave in the catalogue: opening and aborting without end must not fill the disk."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

FAILURES_MAX = 100_000  # At once: more than the names that a connector brings after an outage.
FAILURES_PER_S = FAILURES_MAX / 86400
_PEERS_MAX = 10_000


class FailureShares:
    """A bucket a peer, which fills again within a day. Thread safe."""

    def __init__(
        self, most: int = FAILURES_MAX, per_s: float = FAILURES_PER_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._per_s = per_s
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # Peer -> what was left, and when.
        self._lock = threading.Lock()

    def take(self, peer: str) -> bool:
        """Whether one more failed sample of `peer` may be remembered. The empty name is this process, which may always."""
        if not peer:
            return True
        with self._lock:
            now = self._now()
            left, then = self._left.get(peer, (float(self._most), now))
            left = min(float(self._most), left + (now - then) * self._per_s)
            may = left >= 1
            self._left[peer] = (left - may, now)
            self._left.move_to_end(peer)
            while len(self._left) > _PEERS_MAX:
                self._left.popitem(last=False)
            return may
