"""The memory that NIXL reads announced chunks into: slots of the chunks' sizes, shared by the server and its reader process.

    free ──take──▶ being read ──────────▶ held by the server ──give──▶ free
                       └──set_aside──▶ quarantined ──give──▶ free

A transfer that was given up may still write into its slot, so that slot stays out of use until the transfer is really over.
"""

from __future__ import annotations

import mmap

from slotstream.wire.names import CHUNK_BYTES_MAX

_SLOT_BYTES_MIN = 64 << 10
_ORDERS = (CHUNK_BYTES_MAX // _SLOT_BYTES_MIN).bit_length()  # Sizes of slots: doubled each time.


def map_pool(descriptor: int, nbytes: int) -> memoryview:
    """The pool's memory in this process, whole slots of the largest size; unmapped when the last view of it is gone."""
    return memoryview(mmap.mmap(descriptor, nbytes - nbytes % CHUNK_BYTES_MAX))


class NixlPool:
    """Which slots of `nbytes` of memory are whose. Pages are taken from the system as chunks first touch them.

    A buddy allocator: a slot is a power of two of bytes, aligned to its size, cut out of a larger one where there is none
    that fits, and joined with its other half once both are free.
    """

    def __init__(self, nbytes: int) -> None:
        """Slots are named by where they begin, in bytes. Those free lately are taken first: they are warm, others untouched."""
        self._free: list[dict[int, None]] = [{} for _ in range(_ORDERS)]
        self._free[-1] = dict.fromkeys(reversed(range(0, nbytes - nbytes % CHUNK_BYTES_MAX, CHUNK_BYTES_MAX)))
        self._taken: dict[int, int] = {}  # slot -> order
        self._quarantined: set[int] = set()

    @property
    def quarantined(self) -> int:
        """Slots that nobody may use for now."""
        return len(self._quarantined)

    def take(self, nbytes: int) -> int | None:
        """A free slot of at least `nbytes` (at most CHUNK_BYTES_MAX); None when there is none."""
        wanted = ((nbytes - 1) // _SLOT_BYTES_MIN).bit_length()
        order = next((order for order in range(wanted, _ORDERS) if self._free[order]), None)
        if order is None:
            return None
        slot, _ = self._free[order].popitem()
        while order > wanted:
            order -= 1
            self._free[order][slot + (_SLOT_BYTES_MIN << order)] = None
        self._taken[slot] = order
        return slot

    def set_aside(self, slot: int) -> None:
        """Its transfer was given up."""
        self._quarantined.add(slot)

    def give(self, slot: int) -> None:
        """Nobody reads the slot any more, and nothing writes into it."""
        order = self._taken.pop(slot)
        self._quarantined.discard(slot)
        while order < _ORDERS - 1 and (other := slot ^ (_SLOT_BYTES_MIN << order)) in self._free[order]:
            del self._free[order][other]
            slot = min(slot, other)
            order += 1
        self._free[order][slot] = None
