"""The memory that NIXL reads announced chunks into: slots of one size, shared by the server and its reader process.

    free ──take──▶ being read ──────────▶ held by the server ──give──▶ free
                       └──set_aside──▶ quarantined ──give──▶ free

A transfer that was given up may still write into its slot, so that slot is nobody's until the transfer is really over.
"""

from __future__ import annotations

import mmap

from slotstream.wire.names import CHUNK_BYTES_MAX

SLOT_BYTES = CHUNK_BYTES_MAX
SLOTS_MIN = 4


def map_pool(descriptor: int, nbytes: int) -> memoryview:
    """The pool's memory in this process, [nbytes // SLOT_BYTES] slots; unmapped when the last view of it is gone."""
    return memoryview(mmap.mmap(descriptor, nbytes - nbytes % SLOT_BYTES))


class SlotPool:
    """Which of `count` slots are whose. Pages are taken from the system as chunks first touch them."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))  # A stack: slots used lately are warm, the others untouched.
        self._taken: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def quarantined(self) -> int:
        """Slots that nobody may use for now."""
        return len(self._quarantined)

    def take(self) -> int | None:
        """A free slot; None when there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def set_aside(self, slot: int) -> None:
        """Its transfer was given up."""
        self._quarantined.add(slot)

    def give(self, slot: int) -> None:
        """Nobody reads the slot any more, and nothing writes into it."""
        self._taken.remove(slot)
        self._quarantined.discard(slot)
        self._free.append(slot)
