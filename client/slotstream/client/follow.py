"""Batches of what is stored and of all that commits after it, without end: chance mixes what is there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from slotstream.client.arrays import Arrays
from slotstream.client.batches import Options, Part, batch_of
from slotstream.client.client import Client
from slotstream.client.epoch import Cut, Member, stretches
from slotstream.client.info import SampleState
from slotstream.client.members import Selection
from slotstream.client.ranks import Place
from slotstream.client.stretches import Held, read_stretches

_POLL_S = 1.0


class Follower:
    """One worker's share of what commits after a moment."""

    def __init__(self, client: Client, options: Options, arrays: Arrays, where: Place, since: int) -> None:
        self._client = client
        self._options = options
        self._arrays = arrays
        self._where = where
        self._selection = Selection(options.layers)
        self._cut = Cut.of(0, options.buffer_rows, 1)
        self._chance = random.Random(options.seed)
        self._looked = since  # What committed up to here was asked for.
        self._oldest = 0  # All that commits from now on was created at this moment or later.
        self._pool: list[tuple[Held, int]] = []
        self._pending: list[tuple[int, Held]] = []  # The moment before each look, and what it found that is still pooled.

    @property
    def since(self) -> int:
        """A moment: what committed up to it was handed out, all of it. What came after it may have been, too."""
        self._pending = [(before, held) for before, held in self._pending if held.left]
        return min((before for before, _ in self._pending), default=self._looked)

    def batches(self) -> Iterator[Any]:
        """Full ones; waits for rows where there are too few. Raises what reading raises."""
        batch, full = self._options.batch, max(self._options.batch, self._options.buffer_rows)
        while True:
            until = self._client.moment(namespace=self._options.filters.namespace)
            units = ((unit, unit) for unit in stretches(self._arrived(until), self._cut) if unit.is_of(self._where))
            came = False
            for _, held in read_stretches(self._client, units, self._arrays, self._options.retry_s):
                if held is None:
                    continue
                came, held.left = True, held.stretch.rows
                self._pending.append((self._looked, held))
                self._pool += ((held, row) for row in range(held.stretch.rows))
                while len(self._pool) >= full:
                    yield self._drawn()
            self._looked = until
            while len(self._pool) >= batch:
                yield self._drawn()
            if not came:
                self._client.pause(_POLL_S)

    def _arrived(self, until: int) -> list[Member]:
        """What committed since the last look, in that order."""
        infos = list(self._options.filters.listed(self._client, until, created_from=self._oldest, state=None))
        arriving = (info.created_unix_ns for info in infos if info.state is SampleState.ARRIVING)
        self._oldest = min(arriving, default=until)
        new = (self._selection.of(info) for info in infos if self._looked < (info.committed_unix_ns or 0) <= until)
        return sorted(new, key=lambda member: member.committed_unix_ns)

    def _drawn(self) -> Any:
        parts: dict[int, Part] = {}
        for place in range(self._options.batch):
            at = self._chance.randrange(len(self._pool))
            self._pool[at], self._pool[-1] = self._pool[-1], self._pool[at]
            held, row = self._pool.pop()
            held.left -= 1
            part = parts.setdefault(id(held), Part(held, [], []))
            part.rows.append(row)
            part.places.append(place)
        return batch_of(list(parts.values()), self._options, self._arrays)
