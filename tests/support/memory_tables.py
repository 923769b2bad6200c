"""The tables of a catalogue in memory, and what operations on them are made of."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from slotstream.store.catalogue.attempts import REMOVED_AFTER_S, Generation
from slotstream.store.records import SampleKey, SampleRecord, State

_NS = 1_000_000_000


@dataclass
class Row:
    """Of one sample."""

    number: int
    record: SampleRecord
    reads: int = 0
    acked: int = 0


@dataclass
class Begun:
    """One attempt."""

    key: SampleKey
    begun: int
    due: int
    ended: bool = False


class Tables:
    """What all that open the catalogue share. `clock`: Unix nanoseconds."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.rows: dict[SampleKey, Row] = {}
        self.attempts: dict[str, Begun] = {}
        self.holds: dict[str, int] = {}
        self.leases: dict[tuple[SampleKey, str], int] = {}
        self.meta: dict[str, str] = {}
        self.numbers = itertools.count(1)
        self.term = 0
        self.leader: object = None
        self.shares: dict[str, tuple[float, int]] = {}  # Of a peer: failed samples that it may still leave, and as of when.
        self.generation = Generation(secrets.token_hex(8), 0)
        self.told: list[Callable[[SampleKey | None], None]] = []
        self.lock = threading.RLock()  # Of each operation. Nobody waits while it is held.

    # What operations are made of. Each is called with the lock held.

    def put(self, record: SampleRecord) -> None:
        row = self.rows.get(record.key)
        self.rows[record.key] = Row(row.number if row is not None else next(self.numbers), record)

    def drop(self, key: SampleKey) -> None:
        row = self.rows.pop(key)
        if row.record.attempt:
            self.leave(key, row.record.attempt)
            for attempt in self.attempts.values():
                if attempt.key == key and not attempt.ended:
                    self.end(attempt)
        self.release(key)

    def leave(self, key: SampleKey, attempt: str) -> None:
        now = self.clock()
        self.attempts.setdefault(attempt, Begun(key, now, now + round(REMOVED_AFTER_S * _NS), ended=True))

    def end(self, attempt: Begun) -> None:
        attempt.ended, attempt.due = True, self.clock() + round(REMOVED_AFTER_S * _NS)

    def is_open(self, key: SampleKey) -> bool:
        return any(attempt.key == key and not attempt.ended for attempt in self.attempts.values())

    def open_attempt(self, name: str) -> Begun | None:
        found = self.attempts.get(name)
        return None if found is None or found.ended else found

    def mark(self, row: Row) -> None:
        """It is deleted."""
        if row.record.attempt:
            self.drop(row.record.key)
        else:
            row.record = replace(row.record, state=State.DELETING)

    def leased_until(self, key: SampleKey) -> int:
        now = self.clock()
        return max((until for (leased, _), until in self.leases.items() if leased == key and until > now), default=0)

    def release(self, key: SampleKey, holder: str | None = None) -> None:
        for one in [one for one in self.leases if one[0] == key and holder in (None, one[1])]:
            del self.leases[one]

    def state(self, key: SampleKey) -> State | None:
        row = self.rows.get(key)
        return None if row is None else row.record.state
