"""A peer's share of failed samples, counted in the catalogue: one that goes from server to server has no more of it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from slotstream.store.catalogue.attempts import SharedCatalogue
from slotstream.store.failure_shares import FAILURES_MAX, FAILURES_PER_S, FailureShares
from slotstream.wire.errors import SlotStreamError

_AT_ONCE = 100  # So many are taken from the catalogue, and given to the peer one by one.
_AGAIN_S = 1.0  # A peer that has none left is looked up no more often.
_PEERS_MAX = 10_000


class SharedFailureShares(FailureShares):
    """As `FailureShares`, which counts alone while the catalogue is away. Thread safe; `take` may wait for the catalogue."""

    def __init__(self, catalogue: SharedCatalogue, most: int = FAILURES_MAX, per_s: float = FAILURES_PER_S) -> None:
        super().__init__(most, per_s)
        self._catalogue = catalogue
        self._held: OrderedDict[str, tuple[int, float]] = OrderedDict()  # Peer -> how many are here, and when to ask again.
        self._holding = threading.Lock()  # Guards it.

    def take(self, peer: str) -> bool:
        if not peer:
            return True
        with self._holding:
            held, again_at = self._held.get(peer, (0, 0.0))
            if held or time.monotonic() < again_at:
                self._held[peer] = (max(0, held - 1), again_at)
                return held > 0
        try:
            got = self._catalogue.take_failures(peer, _AT_ONCE, self._most, self._per_s)
        except SlotStreamError:
            return super().take(peer)
        with self._holding:
            held, _ = self._held.get(peer, (0, 0.0))
            self._held[peer] = (held + max(0, got - 1), 0.0 if got else time.monotonic() + _AGAIN_S)
            self._held.move_to_end(peer)
            while len(self._held) > _PEERS_MAX:
                self._held.popitem(last=False)
        return got > 0
