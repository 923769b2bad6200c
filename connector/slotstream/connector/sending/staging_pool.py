"""The staging pool: one fixed piece of host memory in equal slots, where rows wait between the device and the network.

Allocated once and never grown: pinning 32 MiB takes milliseconds, and memory that a network card may read must stay put.

A slot is free, leased, or kept. Kept slots hold rows that the server has taken already, or that lie in the spool too: they
are worth something if the link breaks, and nothing if it does not. So a lease that needs room takes them without asking.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_WAIT_SLICE_S = 0.05
# How many full steps' rows staging holds by default. vLLM prepares a step while the device computes the one before: rows of
# both have slots before they exist, and those of a third may be on their way. With half of that the model may wait: on an
# H200, 16 layers, 0.98 of the speed with room for two steps, and 0.985 with four.
STEPS = 3
_BYTES_MIN = 512 << 20
_BYTES_MAX = 2 << 30


def default_staging_bytes(wanted_bytes: int) -> int:
    """What staging takes unless an option says so: `wanted_bytes` or more, within bounds."""
    return min(max(_BYTES_MIN, power_of_two(wanted_bytes)), _BYTES_MAX)


def power_of_two(nbytes: int) -> int:
    """The least power of two that is no less: torch pins no other amounts, and would leave the rest unused."""
    return 1 << (nbytes - 1).bit_length()


@dataclass(frozen=True, slots=True)
class StagingShape:
    """`num_slots` slots that may be leased and `reserved` more, of `slot_bytes` each, for rows of `row_bytes`.

    `note_words`: beside each row, what the device notes of it (`row_check.note_words`); 0 where it notes nothing.
    """

    num_slots: int
    reserved: int
    slot_bytes: int
    row_bytes: int
    note_words: int = 0

    @property
    def slots(self) -> int:
        """Of both kinds."""
        return self.num_slots + self.reserved

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.slots * self.slot_bytes

    @property
    def rows_per_slot(self) -> int:
        """Rows that have room in a slot."""
        return self.slot_bytes // self.row_bytes


class StagingPool:
    """Slots in `memory`, one after another; the reserved ones (`reserved_slots`) come last and are never leased. Thread-safe.

    The engine leases; the pump keeps, reclaims and releases.
    """

    def __init__(self, memory: memoryview, shape: StagingShape) -> None:
        self.nbytes = shape.nbytes
        self.slot_bytes = shape.slot_bytes
        self.num_slots = num_slots = shape.num_slots
        self.reserved_slots = tuple(range(num_slots, num_slots + shape.reserved))
        self._memory = memory
        self._free = list(range(num_slots - 1, -1, -1))  # A stack: slots used lately are warm, the others untouched.
        self._changed = threading.Condition()
        self._tickets: dict[int, int] = {}  # kept: ticket -> owner
        self._spare: dict[int, int] = {}  # kept, and nobody's loss: ticket -> slot
        self._kept: dict[int, dict[int, int]] = {}  # owner -> ticket -> slot; who kept first is first
        self._robbed: set[int] = set()
        self._next_ticket = 1
        self.on_free: Callable[[], object] = lambda: None
        """Told, on anybody's thread, when slots came free."""

    @property
    def in_use(self) -> int:
        """Slots leased now."""
        with self._changed:
            return self.num_slots - len(self._free) - len(self._tickets)

    @property
    def free(self) -> int:
        """Slots neither leased nor kept."""
        return len(self._free)

    @property
    def kept(self) -> int:
        """Slots kept now: they can be leased at once."""
        with self._changed:
            return len(self._tickets)

    def acquire(self, count: int, *, deadline: float, keep_waiting: Callable[[], bool]) -> list[int] | None:
        """Lease `count` slots at once; None when they are not free by `deadline` (time.monotonic) or waiting is pointless."""
        if count > self.num_slots:
            return None
        with self._changed:
            while len(self._free) + len(self._tickets) < count:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not keep_waiting():
                    return None
                self._changed.wait(min(left_s, _WAIT_SLICE_S))
            return [self._free.pop() if self._free else self._take_kept() for _ in range(count)]

    def acquire_free(self, count: int) -> list[int]:
        """Lease up to `count` slots that nobody else could want; what is kept stays."""
        with self._changed:
            return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def _take_kept(self) -> int:
        """A kept slot: a spare one, else one of the oldest owner's, all of whose slots go before the next one's."""
        if self._spare:
            ticket = next(iter(self._spare))
            del self._tickets[ticket]
            return self._spare.pop(ticket)
        owner, slots = next(iter(self._kept.items()))
        ticket, slot = slots.popitem()
        if not slots:
            del self._kept[owner]
        del self._tickets[ticket]
        self._robbed.add(owner)
        return slot

    def release(self, slots: list[int]) -> None:
        """Give leased slots back, and wake the thread that waits for room."""
        if slots:
            with self._changed:
                self._free.extend(reversed(slots))
                self._changed.notify_all()
            self.on_free()

    def keep(self, slot: int, owner: int | None) -> int:
        """Turn a leased slot into a kept one: the ticket to reclaim it with. `owner` (None: its rows lie elsewhere too).

        0 when a slot of that owner was taken before: the others are worth nothing either, and this one is released.
        """
        with self._changed:
            self._changed.notify_all()
            if owner in self._robbed:
                self._free.append(slot)
                return 0
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            if owner is None:
                self._spare[ticket] = slot
            else:
                self._kept.setdefault(owner, {})[ticket] = slot
            self._tickets[ticket] = -1 if owner is None else owner
            return ticket

    def reclaim(self, ticket: int) -> bool:
        """Lease the kept slot of this ticket again; False when somebody took it."""
        with self._changed:
            return self._reclaim(ticket) is not None

    def _reclaim(self, ticket: int) -> int | None:
        owner = self._tickets.pop(ticket, None)
        if owner is None:
            return None
        if owner < 0:
            return self._spare.pop(ticket)
        slot = self._kept[owner].pop(ticket)
        if not self._kept[owner]:
            del self._kept[owner]
        return slot

    def was_robbed(self, owner: int) -> bool:
        """Whether a slot that `owner` kept was taken."""
        with self._changed:
            return owner in self._robbed

    def forget(self, owner: int, tickets: Iterable[int]) -> None:
        """`owner` needs none of what it kept any more: what is left of these tickets is free."""
        with self._changed:
            self._free.extend(slot for slot in map(self._reclaim, tickets) if slot is not None)
            self._robbed.discard(owner)
            self._changed.notify_all()
        self.on_free()

    def buffer(self, slot: int, nbytes: int) -> memoryview:
        """The first `nbytes` of a slot, without a copy."""
        at = slot * self.slot_bytes
        return self._memory[at : at + nbytes]
