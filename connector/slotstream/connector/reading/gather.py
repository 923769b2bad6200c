"""Rows copied from the device into staging by torch, ordered after the model's own writes.

This is how `extract_hidden_states` is read, and how everything is on a CPU. On an accelerator the gather runs on the model's
stream (so it sees this step's rows and not the next step's), the copy to pinned memory on a side stream (so the model does not
wait for it), and the read's number comes behind it there. The side stream gets copies only: a kernel of it would slow the model
down for seconds (see `page_reads`). On a CPU all happens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from slotstream.connector.reading.staging_memory import COPY_BYTES, StagingMemory
from slotstream.connector.sending.row_check import InSlot, Segment, numbers
from slotstream.connector.sending.staging_area import Words

WORD_BYTES = 8
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # Of elements of so many bytes.
_NO_WORDS: Words = np.zeros(0, np.int64)
Select = Callable[[torch.Tensor], torch.Tensor]


def bits_of(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """The whole numbers that elements of this dtype are looked at as for their peaks, and the mask that takes the sign off."""
    return _BITS[dtype.itemsize], (1 << dtype.itemsize * 8 - 1) - 1


class RowGather:
    """Copies rows [layers, hidden] of one source on `device` into staging."""

    def __init__(self, device: torch.device, memory: StagingMemory) -> None:
        self._device = device
        self._memory = memory
        self._row_bytes = memory.shape.row_bytes
        self._side = None if device.type == "cpu" else torch.Stream(device=device)
        self._done = torch.from_numpy(memory.area.done_word)
        self._reads = 0

    def gather(
        self, select: Select, index: Words, segments: Sequence[Segment], scratch: int | None, stamps: Select | None = None
    ) -> tuple[int, Words | InSlot]:
        """Start copying the rows that `select` takes at `index` [n], in order, to `segments`; the read's number, and where the
        rows' peaks are once it is over.

        `select` gives rows [n, layers, hidden], contiguous, for an index tensor. `scratch`: a staging slot of n words or more,
        needed on an accelerator. `stamps`, on a CPU only, gives int64 [n, words of a note]: the notes of rows in pages.
        """
        self._reads += 1
        if self._side is None:
            at = torch.from_numpy(index)
            rows = select(at)
            self._copy(rows, segments)
            if stamps is not None:
                counts = np.array([segment.rows for segment in segments])
                slots = np.repeat([segment.staging_slot for segment in segments], counts)
                self._memory.area.notes[slots, numbers(counts)] = stamps(at).numpy()
            found = peaks_of(rows).numpy() if stamps is None else _NO_WORDS
            self._is_over(self._reads)
            return self._reads, found
        assert scratch is not None, "an accelerator copies its index from pinned memory"
        host_index = self._memory.tensor(scratch, index.nbytes).view(torch.int64)
        host_index.numpy()[:] = index
        rows = select(host_index.to(self._device, non_blocking=True))
        peaks, number = peaks_of(rows), torch.full((1,), self._reads, device=self._device)

        def copy() -> None:
            # The peaks go where the index lay: after it was read, for which the side stream waits.
            host_index.copy_(peaks, non_blocking=True)
            self._copy(rows, segments)
            self._done.copy_(number, non_blocking=True)

        self._on_side(copy, rows, peaks, number)
        return self._reads, InSlot(scratch, 0, len(index))

    def copy_slot_mapping(self, slot_mapping: torch.Tensor, scratch: int | None) -> Words | InSlot:
        """Start copying this step's slot mapping to the host, int64 [tokens]: its buffer is used again in the next step.

        It is there once the next read is over.
        """
        mapping = slot_mapping.flatten()
        if self._side is None:
            return mapping.to(torch.int64, copy=True).numpy()
        assert scratch is not None, "an accelerator copies into pinned memory"
        snapshot = mapping.to(torch.int64, copy=True)
        host = self._memory.tensor(scratch, snapshot.numel() * WORD_BYTES).view(torch.int64)
        self._on_side(lambda: host.copy_(snapshot, non_blocking=True), snapshot)
        return InSlot(scratch, 0, snapshot.numel())

    def settle(self) -> None:
        """Return once no copy is under way any more. Waits for the device: for when something went wrong."""
        if self._side is not None:
            self._side.synchronize()

    def _is_over(self, number: int) -> None:
        self._memory.area.done_word[0] = number

    def _copy(self, rows: torch.Tensor, segments: Sequence[Segment]) -> None:
        flat = rows.view(torch.uint8).flatten()
        at = 0
        for staging_slot, nbytes in self._runs(segments):
            host = self._memory.tensor(staging_slot, nbytes)
            for begin in range(0, nbytes, COPY_BYTES):
                end = min(begin + COPY_BYTES, nbytes)
                host[begin:end].copy_(flat[at + begin : at + end], non_blocking=True)
            at += nbytes

    def _runs(self, segments: Sequence[Segment]) -> Iterator[tuple[int, int]]:
        """(first slot, bytes) of each stretch of staging that is filled without a gap: small slots share a copy."""
        first = nbytes = 0
        for to in segments:
            if nbytes and (to.staging_slot - first) * self._memory.shape.slot_bytes != nbytes:
                yield first, nbytes
                nbytes = 0
            if not nbytes:
                first = to.staging_slot
            nbytes += to.rows * self._row_bytes
        if nbytes:
            yield first, nbytes

    def _on_side(self, copy: Callable[[], object], *sources: torch.Tensor) -> None:
        side = self._side
        assert side is not None, "a CPU has no side stream"
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            copy()
        for source in sources:
            source.record_stream(side)  # The allocator must not hand its memory out again before the side stream has read it.


def peaks_of(rows: torch.Tensor) -> torch.Tensor:
    """The peak of each row of [n, ...], int64 [n]: see `row_check`."""
    bits, mask = bits_of(rows.dtype)
    flat = rows.flatten(1)
    if flat.device.type == "cpu":
        return (flat.view(bits) & mask).amax(1).to(torch.int64)
    # A norm needs no memory for a copy of the rows.
    peaks: torch.Tensor = torch.linalg.vector_norm(flat, ord=torch.inf, dim=1)
    return peaks.view(bits).to(torch.int64) & mask
