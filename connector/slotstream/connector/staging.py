"""The staging pool: one fixed piece of host memory in equal slots, where rows wait between the device and the network.

Allocated once and never grown: pinning 32 MiB takes milliseconds, and memory that a network card may read must stay put.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

_WAIT_SLICE_S = 0.05


class StagingPool:
    """`num_slots` slots of `slot_bytes` each. Thread-safe: the engine leases, the pump releases.

    The memory is pinned where `device` is an accelerator, so that copies to it run beside the model.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.memory = torch.empty(num_slots * slot_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
        self._view = memoryview(self.memory.numpy())  # type: ignore[arg-type]
        self._free = list(range(num_slots - 1, -1, -1))  # A stack: slots used lately are warm, the others untouched.
        self._changed = threading.Condition()
        self._in_use_max = 0

    @property
    def memory_view(self) -> memoryview:
        """All slots, one after another."""
        return self._view

    @property
    def in_use(self) -> int:
        """Slots leased now."""
        with self._changed:
            return self.num_slots - len(self._free)

    @property
    def in_use_max(self) -> int:
        """The most slots that were ever leased at once."""
        return self._in_use_max

    def acquire(self, count: int, *, deadline: float, keep_waiting: Callable[[], bool]) -> list[int] | None:
        """Lease `count` slots at once; None when they are not free by `deadline` (time.monotonic) or waiting is pointless."""
        if count > self.num_slots:
            return None
        with self._changed:
            while len(self._free) < count:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not keep_waiting():
                    return None
                self._changed.wait(min(left_s, _WAIT_SLICE_S))
            leased = [self._free.pop() for _ in range(count)]
            self._in_use_max = max(self._in_use_max, self.num_slots - len(self._free))
            return leased

    def release(self, slots: list[int]) -> None:
        """Give slots back; whoever waits for them wakes."""
        if slots:
            with self._changed:
                self._free.extend(reversed(slots))
                self._changed.notify_all()

    def tensor(self, slot: int, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of a slot, uint8 [nbytes]."""
        at = slot * self.slot_bytes
        return self.memory[at : at + nbytes]

    def buffer(self, slot: int, nbytes: int) -> memoryview:
        """The first `nbytes` of a slot, without a copy."""
        at = slot * self.slot_bytes
        return self._view[at : at + nbytes]
