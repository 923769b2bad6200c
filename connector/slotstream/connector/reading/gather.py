"""Rows copied from the device into staging, ordered after the model's own writes.

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
from slotstream.connector.sending.copies import Arrived, Copied, Gathered, Ticket

WORD_BYTES = 8
# One copy to the host. A GPU does its copies one after another, vLLM's sampled tokens too, which the next step waits for:
# behind a copy of 256 MiB they take 4.3 ms on an H200. In pieces of 2 MiB, 9 us each to begin with, a decode of 64 with 16
# layers went from 0.947 to 0.961 of no capture.
_COPY_BYTES = 2 << 20
Index = npt.NDArray[np.int64]  # Where rows lie in their source.


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
    """The next `rows` gathered rows go to the front of staging slot `staging_slot`."""

    staging_slot: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Gathered:
    """`host`: the peaks [n], pinned, of the rows' dtype."""

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
    """Copies rows [layers, hidden] of one source on `device`, of `row_bytes` bytes each, into staging."""

    def __init__(self, device: torch.device, row_bytes: int, memory: StagingMemory) -> None:
        self._device = device
        self._memory = memory
        self._row_bytes = row_bytes
        self.on_cpu = device.type == "cpu"
        self._side = None if self.on_cpu else torch.Stream(device=device)

    def gather(
        self,
        select: Callable[[torch.Tensor], torch.Tensor],
        index: Index,
        destinations: Sequence[Destination],
        scratch: int | None,
        note: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[Gathered, Index]:
        """Start copying the rows that `select` takes at `index` [n], in order, to `destinations` (their rows add up to n).

        `select` gives rows [n, layers, hidden], contiguous, for an index tensor; `note` gives int64 [n, words] beside them,
        which come back as the second result, [n, 0] without it. `scratch`: a staging slot of n * 8 * (1 + words) bytes or more,
        needed on an accelerator; it and the destinations must stay leased until `wait` returned and both results were read.
        """
        if self._side is None:
            at = torch.from_numpy(index)
            rows = select(at)
            self._copy(rows, destinations)
            notes = np.zeros((len(index), 0), np.int64) if note is None else note(at).numpy()
            return Arrived(_peaks(rows).float().numpy()), notes
        assert scratch is not None, "an accelerator copies its index from pinned memory"
        host_index = self._memory.tensor(scratch, index.nbytes).view(torch.int64)
        host_index.numpy()[:] = index
        at = host_index.to(self._device, non_blocking=True)
        rows = select(at)
        noted = note(at) if note is not None else at.new_empty((len(index), 0))
        # The peaks go where the index lay: after it was read, for which the side stream waits.
        peaks = self._memory.tensor(scratch, len(index) * rows.element_size()).view(rows.dtype)
        whole = self._memory.tensor(scratch, index.nbytes + noted.numel() * WORD_BYTES)
        host_notes = whole[index.nbytes :].view(torch.int64).view(noted.shape)

        def copy() -> None:
            peaks.copy_(_peaks(rows), non_blocking=True)
            if noted.numel():
                host_notes.copy_(noted, non_blocking=True)
            self._copy(rows, destinations)

        return _Gathered(peaks, self._on_side(copy, rows, noted)), host_notes.numpy()

    def copy_slot_mapping(self, slot_mapping: torch.Tensor, scratch: int | None) -> tuple[Index, Ticket]:
        """Start copying this step's slot mapping to the host, int64 [tokens]: its buffer is used again in the next step."""
        mapping = slot_mapping.flatten()
        if self._side is None:
            return mapping.to(torch.int64, copy=True).numpy(), Copied()
        assert scratch is not None, "an accelerator copies into pinned memory"
        snapshot = mapping.to(torch.int64, copy=True)
        host = self._memory.tensor(scratch, snapshot.numel() * WORD_BYTES).view(torch.int64)
        ticket = self._on_side(lambda: host.copy_(snapshot, non_blocking=True), snapshot)
        return host.numpy(), ticket

    def settle(self) -> None:
        """Return once no copy is under way any more. Waits for the device: for when something went wrong."""
        if self._side is not None:
            self._side.synchronize()

    def _copy(self, rows: torch.Tensor, destinations: Sequence[Destination]) -> None:
        flat = rows.view(torch.uint8).flatten()
        at = 0
        for staging_slot, nbytes in self._runs(destinations):
            host = self._memory.tensor(staging_slot, nbytes)
            for begin in range(0, nbytes, _COPY_BYTES):
                end = min(begin + _COPY_BYTES, nbytes)
                host[begin:end].copy_(flat[at + begin : at + end], non_blocking=True)
            at += nbytes

    def _runs(self, destinations: Sequence[Destination]) -> Iterator[tuple[int, int]]:
        """(first slot, bytes) of each stretch of staging that is filled without a gap: small slots share a copy."""
        first = nbytes = 0
        for to in destinations:
            if nbytes and (to.staging_slot - first) * self._memory.slot_bytes != nbytes:
                yield first, nbytes
                nbytes = 0
            if not nbytes:
                first = to.staging_slot
            nbytes += to.rows * self._row_bytes
        if nbytes:
            yield first, nbytes

    def _on_side(self, copy: Callable[[], object], *sources: torch.Tensor) -> Ticket:
        side = self._side
        assert side is not None, "a CPU has no side stream"
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            copy()
            done = torch.Event(device=self._device)
            done.record(side)
        for source in sources:  # The allocator must not hand their memory out again before the side stream has read it.
            source.record_stream(side)
        return _EventTicket(done)


def _peaks(rows: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row, [n]: 0 for a row of zeros, NaN or infinite for one that holds such a value."""
    flat = rows.flatten(1)
    if flat.device.type == "cpu":
        return flat.abs().amax(1)  # A sixth of the norm's time there; on an accelerator it would be memory for a copy.
    peaks: torch.Tensor = torch.linalg.vector_norm(flat, ord=torch.inf, dim=1)
    return peaks
