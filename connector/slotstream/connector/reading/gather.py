"""The only device code: read rows out of the cache at given slots, into staging, ordered after the model's own writes.

On an accelerator the gather runs on the model's stream (so it sees this step's rows and not the next step's), the copy to
pinned memory on a side stream (so the model does not wait for it). On a CPU both happen at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slotstream.connector.reading.staging_memory import StagingMemory
from slotstream.connector.sending.copies import Arrived, Copied, Gathered, KvSlots, Ticket

INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class _EventTicket:
    event: torch.Event

    @property
    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True, slots=True)
class Destination:
    """The next `rows` gathered rows go to the front of staging slot `slot`."""

    slot: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Gathered:
    """`host`: the peaks [n], pinned, of the cache's dtype."""

    host: torch.Tensor
    ticket: Ticket

    @property
    def is_done(self) -> bool:
        return self.ticket.is_done

    def wait(self) -> None:
        self.ticket.wait()

    def peaks(self) -> npt.NDArray[np.float32]:
        return self.host.float().numpy()


class RowGather:
    """Reads rows of one cache tensor [blocks, layers, block_size, hidden] (its strides may be any) into staging."""

    def __init__(self, cache: torch.Tensor, memory: StagingMemory) -> None:
        self._words = _words(cache)
        self._dtype = cache.dtype
        self._memory = memory
        self.block_size = int(cache.shape[2])
        self.row_bytes = int(cache.shape[1] * cache.shape[3] * cache.element_size())
        self.on_cpu = cache.device.type == "cpu"
        self._side = None if self.on_cpu else torch.Stream(device=cache.device)

    def gather(self, slots: KvSlots, destinations: Sequence[Destination], scratch: int | None) -> Gathered:
        """Start copying the rows at `slots` [n], in order, to `destinations` (their rows add up to n).

        `scratch` is a staging slot of at least n * 8 bytes for the index, and then the peaks, needed on an accelerator; it
        and the destinations must stay leased until `wait` returned and the peaks were read.
        """
        if self._side is None:
            rows = self._rows(torch.from_numpy(slots))
            self._copy(rows, destinations)
            return Arrived(_peaks(rows).float().numpy())
        assert scratch is not None, "an accelerator copies its index from pinned memory"
        index = self._memory.tensor(scratch, slots.nbytes).view(torch.int64)
        index.numpy()[:] = slots
        rows = self._rows(index.to(self._words.device, non_blocking=True))
        peaks = self._memory.tensor(scratch, len(slots) * rows.element_size()).view(rows.dtype)

        def copy() -> None:
            peaks.copy_(_peaks(rows), non_blocking=True)  # After the index was read: the side stream waits for that.
            self._copy(rows, destinations)

        return _Gathered(peaks, self._on_side(copy, rows))

    def copy_slot_mapping(self, slot_mapping: torch.Tensor, scratch: int | None) -> tuple[KvSlots, Ticket]:
        """Start copying this step's slot mapping to the host, int64 [tokens]: its buffer is used again in the next step."""
        mapping = slot_mapping.flatten()
        if self._side is None:
            return mapping.to(torch.int64, copy=True).numpy(), Copied()
        assert scratch is not None, "an accelerator copies into pinned memory"
        snapshot = mapping.to(torch.int64, copy=True)
        host = self._memory.tensor(scratch, snapshot.numel() * INDEX_BYTES).view(torch.int64)
        ticket = self._on_side(lambda: host.copy_(snapshot, non_blocking=True), snapshot)
        return host.numpy(), ticket

    def settle(self) -> None:
        """Return once no copy is under way any more. Waits for the device: for when something went wrong."""
        if self._side is not None:
            self._side.synchronize()

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows [n, layers, hidden], contiguous, of the cache."""
        return self._words[slots // self.block_size, :, slots % self.block_size].contiguous().view(self._dtype)

    def _copy(self, rows: torch.Tensor, destinations: Sequence[Destination]) -> None:
        flat = rows.view(torch.uint8).flatten()
        at = 0
        for slot, nbytes in self._runs(destinations):
            self._memory.tensor(slot, nbytes).copy_(flat[at : at + nbytes], non_blocking=True)
            at += nbytes

    def _runs(self, destinations: Sequence[Destination]) -> Iterator[tuple[int, int]]:
        """(first slot, bytes) of each stretch of staging that is filled without a gap: a copy costs 20 us to begin with."""
        first = nbytes = 0
        for to in destinations:
            if nbytes and (to.slot - first) * self._memory.slot_bytes != nbytes:
                yield first, nbytes
                nbytes = 0
            if not nbytes:
                first = to.slot
            nbytes += to.rows * self.row_bytes
        if nbytes:
            yield first, nbytes

    def _on_side(self, copy: Callable[[], object], source: torch.Tensor) -> Ticket:
        side = self._side
        assert side is not None, "a CPU has no side stream"
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            copy()
            done = torch.Event(device=self._words.device)
            done.record(side)
        # The allocator must not hand the source's memory out again before the side stream has read it.
        source.record_stream(side)
        return _EventTicket(done)


def _words(cache: torch.Tensor) -> torch.Tensor:
    """The same memory as elements of 8 bytes, where its shape and strides allow that.

    An indexing kernel moves an element a thread: 64 MiB of bf16 rows take 200 us on an H200, and 64 us as words.
    """
    each = 8 // cache.element_size()
    *outer, inner = cache.stride()
    if inner != 1 or any(elements % each for elements in (cache.shape[-1], *outer, cache.storage_offset())):
        return cache
    return cache.view(torch.int64)


def _peaks(rows: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row, [n]: 0 for a row of zeros, NaN or infinite for one that holds such a value."""
    flat = rows.flatten(1)
    if flat.device.type == "cpu":
        return flat.abs().amax(1)  # A sixth of the norm's time there; on an accelerator it would be memory for a copy.
    peaks: torch.Tensor = torch.linalg.vector_norm(flat, ord=torch.inf, dim=1)
    return peaks
