"""Whose leases they are: the store limits all of them together, and knows holders only, whom callers name as they like."""

from __future__ import annotations

import time
from collections import defaultdict

from slotstream.server.access.gate import beyond_first
from slotstream.server.access.limits import LEASES
from slotstream.server.config import ServerConfig
from slotstream.store.records import SampleKey
from slotstream.wire.errors import TooMany

_FORGET_EVERY_S = 60.0


class LeaseBook:
    """Leases by peer, as long as they last, since this server started. Belongs to one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._total = LEASES.total(config)
        self._of_peer = LEASES.of_peer(config)
        self._ends: defaultdict[str, dict[tuple[SampleKey, str], float]] = defaultdict(dict)
        self._forget_at = 0.0

    def take(self, peer: str, key: SampleKey, holder: str, seconds: float) -> tuple[int, int]:
        """Count a lease, before the store gives it. Raises TooMany.

        How many there may be with it, in all and in its namespace. A namespace has half of all; and of both, the last quarter
        is for peers that hold none there.
        """
        now = time.monotonic()
        if now >= self._forget_at:
            self._forget(now)
        held = self._ends[peer]
        if (key, holder) not in held and len(held) >= self._of_peer:
            held = self._ends[peer] = {name: ends for name, ends in held.items() if ends > now}
            if len(held) >= self._of_peer:
                raise TooMany(f"{self._of_peer} {LEASES.what} at a time are as many as this server allows one peer")
        spaces = {leased.namespace for (leased, _), ends in held.items() if ends > now}
        held[key, holder] = now + seconds
        in_all, there = self._total, self._total // 2
        return beyond_first(in_all) if spaces else in_all, beyond_first(there) if key.namespace in spaces else there

    def take_back(self, peer: str, key: SampleKey, holder: str) -> None:
        """The store did not give it."""
        held = self._ends.get(peer, {})
        held.pop((key, holder), None)
        if not held:
            self._ends.pop(peer, None)

    def end(self, key: SampleKey, holder: str) -> None:
        """It was given back, by any peer. An empty `holder`: all leases of that sample were."""
        for peer, held in list(self._ends.items()):
            for name in [(key, holder)] if holder else [name for name in held if name[0] == key]:
                self.take_back(peer, *name)

    def _forget(self, now: float) -> None:
        """Those that ended, also of peers that never come back."""
        self._forget_at = now + _FORGET_EVERY_S
        for peer, held in list(self._ends.items()):
            for name in [name for name, ends in held.items() if ends <= now]:
                self.take_back(peer, *name)
