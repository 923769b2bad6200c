"""Whose leases they are: the store limits all of them together, and knows holders only, whom callers name as they like."""

from __future__ import annotations

import time
from collections import defaultdict

from slotstream.server.access.limits import LEASES
from slotstream.server.config import ServerConfig
from slotstream.store.records import SampleKey
from slotstream.wire.errors import TooMany


class LeaseBook:
    """Leases by peer, as long as they last, since this server started. Belongs to one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._of_peer = LEASES.of_peer(config)
        self._ends: defaultdict[str, dict[tuple[SampleKey, str], float]] = defaultdict(dict)

    def take(self, peer: str, key: SampleKey, holder: str, seconds: float) -> None:
        """Count a lease, before the store gives it. Raises TooMany."""
        now = time.monotonic()
        held = self._ends[peer]
        if (key, holder) not in held and len(held) >= self._of_peer:
            held = self._ends[peer] = {name: ends for name, ends in held.items() if ends > now}
            if len(held) >= self._of_peer:
                raise TooMany(f"{self._of_peer} {LEASES.what} at a time are as many as this server allows one peer")
        held[key, holder] = now + seconds

    def give_back(self, peer: str, key: SampleKey, holder: str) -> None:
        """It was given back, or not given at all."""
        held = self._ends.get(peer, {})
        held.pop((key, holder), None)
        if not held:
            self._ends.pop(peer, None)
