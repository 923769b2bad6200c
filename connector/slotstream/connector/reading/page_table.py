"""Changes of the page table on their way to the device: through a ring of pinned memory, with one kernel each.

Nothing is allocated, and nothing is asked of the driver but the launch. The kernel's last store says that it has read its
words: the host looks at that number before it writes there again.
"""

from __future__ import annotations

from typing import Any

import torch

from slotstream.connector.plan import TableUpdate
from slotstream.connector.reading.launches import Launches

_PLACES = 64  # Updates that may be under way: far more than vLLM schedules ahead.
_ENTRIES = 1024  # That one of them carries; longer ones are several.
_BLOCK = 256  # Entries that the kernel moves at a time.


class TableWriter:
    """Writes into `table` int32 [entries] and `step` int64 [1], both on one device."""

    def __init__(self, table: torch.Tensor, step: torch.Tensor, *, places: int = _PLACES, entries: int = _ENTRIES) -> None:
        self._table = table
        self._step = step
        self._places, self._entries = places, entries
        self._on_cpu = table.device.type == "cpu"
        self._next = 0
        # A place is the step, the entries, and their pages; at its end the kernel notes the step.
        self._ring = torch.zeros(places, 1 + 2 * entries, dtype=torch.int64, pin_memory=not self._on_cpu)
        self._read = torch.zeros(places, dtype=torch.int64, pin_memory=not self._on_cpu)
        self._words = list(self._ring.numpy())
        self._ring_words, self._read_words = self._ring.numpy(), self._read.numpy()
        self._launch = Launches(make_kernel)
        self._tensors = (table, step, self._ring, self._read)
        self._addresses = tuple(tensor.data_ptr() for tensor in self._tensors)

    def write(self, update: TableUpdate) -> None:
        """Have the device make these changes, in its current stream. `clear` is somebody else's work."""
        changes = update.entries
        if len(changes) <= self._entries:
            self._write(len(changes), [update.step, *changes, *changes.values()])
            return
        index, pages = list(changes), list(changes.values())
        for first in range(0, len(index), self._entries):
            part = slice(first, first + self._entries)
            self._write(len(index[part]), [update.step, *index[part], *pages[part]])

    def _write(self, count: int, said: list[int]) -> None:
        place = self._next
        self._next = (place + 1) % self._places
        words = self._words[place]
        if self._read_words[place] != words[0]:
            self._wait()
        words[: len(said)] = said
        if self._on_cpu:
            write_on_cpu(*self._tensors, place, count)
        else:
            self.write_on_gpu(place, count)

    def write_on_gpu(self, place: int, count: int) -> None:
        """Launch the kernel for a place of the ring with `count` entries."""
        memory = self._addresses if self._launch.knows("change") else self._tensors
        self._launch("change", (1, 1, 1), *memory, place, count, self._entries, _BLOCK)

    def _wait(self) -> None:
        """The device is a whole ring behind. It never is: vLLM waits for its steps long before."""
        torch.accelerator.current_stream(self._table.device).synchronize()


def write_on_cpu(
    table: torch.Tensor, step: torch.Tensor, ring: torch.Tensor, read: torch.Tensor, place: int, count: int
) -> None:
    """What the kernel does."""
    words = ring[place]
    table.index_copy_(0, words[1 : 1 + count], words[1 + count : 1 + 2 * count].to(table.dtype))
    step.copy_(words[:1])
    read[place] = words[0]


def make_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["place", "count"])  # type: ignore[untyped-decorator]
    def change(  # type: ignore[no-untyped-def]
        table,
        step,
        ring,
        read,
        place,
        count,
        ENTRIES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        words = ring + place * (1 + 2 * ENTRIES)
        number = tl.load(words)
        for first in range(0, count, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < count
            entry = tl.load(words + 1 + at, mask=inside)
            tl.store(table + entry, tl.load(words + 1 + count + at, mask=inside).to(tl.int32), mask=inside)
        tl.store(step, number)
        tl.debug_barrier()  # Every thread has read its words.
        tl.atomic_xchg(read + place, number, sem="release", scope="sys")

    return change
