"""Where rows lie on the device, as the worker sees it: one protocol, and the source that vLLM's `extract_hidden_states` is.

The other source is `row_pages`. The readers of rows know only this protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from slotstream.connector.plan import BlockPlace, RowPlan, StepPlan
from slotstream.connector.reading.gather import RowGather
from slotstream.connector.reading.located import Located, Part
from slotstream.connector.reading.staging_memory import StagingMemory
from slotstream.connector.sending.row_check import MappedRows, RowEvidence, Segment
from slotstream.connector.sending.staging_area import Words
from slotstream.connector.vllm_config import RowKind
from slotstream.wire.errors import ConfigError, SlotMismatch, SlotStreamError


class RowSource(Protocol):
    """Rows [layers, hidden] on `device`. All methods are called in the order of a step, and one at a time: on the engine's
    thread, or on one beside it from `locate` on.
    """

    device: torch.device
    made_for: RowKind
    """What the rows are. Who reads them compares."""
    begins_every_step: bool
    """Whether `begin_step` has something to do where a plan is empty."""

    def use_staging(self, memory: StagingMemory) -> None:
        """Read into this from now on. Once, before anything is read."""

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass: do what the plan asks of the device."""

    def remember_slot_mapping(self, slot_mapping: torch.Tensor) -> None:
        """This step's slot mapping, int [tokens], on the device: only remembered here."""

    def remember_stream(self) -> None:
        """This step's forward pass ran in this thread's current stream. Its rows may be asked for on another thread."""

    def locate(self, plans: Sequence[RowPlan], rows_per_slot: int) -> Located:
        """Where the rows of these plans are, in parts of at most `rows_per_slot` rows."""

    def scratch_slots(self) -> int:
        """How many staging slots the next `read` needs for itself, beside the rows' own."""

    def read(
        self, located: Located, parts: Sequence[Part], segments: Sequence[Segment], scratch: Sequence[int]
    ) -> tuple[int, RowEvidence]:
        """Start reading these parts, which are next to each other in `located`. The read's number, and where to look once it is
        over: see `RowBatch`.

        `scratch`: as many staging slots as `scratch_slots` said. All slots must stay leased until both were looked at.
        """

    def settle(self) -> None:
        """Return once no read is under way any more. Waits for the device: for when something went wrong."""

    def forget(self) -> None:
        """After a fault: trust nothing of what the device holds."""


class CachedRows:
    """The cache layer of `extract_hidden_states`: [blocks, layers, block_size, hidden], with any strides.

    Rows stay where they are for as long as their blocks do, so a step's slot mapping speaks only of rows that the step wrote.
    """

    begins_every_step = True

    def __init__(self, cache: torch.Tensor, made_for: RowKind, hidden: int) -> None:
        """Raises ConfigError for a cache of another shape."""
        layers = len(made_for.layer_ids)
        if cache.ndim != 4 or (cache.shape[1], cache.shape[3]) != (layers, hidden):
            raise ConfigError(
                f"the hidden-state cache has shape {list(cache.shape)}, not [blocks, {layers}, block size, {hidden}]"
            )
        self.device = cache.device
        self.made_for = made_for
        self.block_size = int(cache.shape[2])
        self._words = _words(cache)
        self._dtype = cache.dtype
        self._slot_mapping: torch.Tensor | None = None

    def use_staging(self, memory: StagingMemory) -> None:
        """See `RowSource`."""
        self._gather = RowGather(self.device, memory)

    def begin_step(self, plan: StepPlan) -> None:
        """See `RowSource`."""
        self._slot_mapping = None

    def remember_slot_mapping(self, slot_mapping: torch.Tensor) -> None:
        """See `RowSource`."""
        self._slot_mapping = slot_mapping

    def remember_stream(self) -> None:
        """Not needed: these are read on the engine's thread, by kernels in its current stream."""

    def locate(self, plans: Sequence[RowPlan], rows_per_slot: int) -> Located:
        """See `RowSource`. The columns are the slots of all rows, and what of them this step must have written, else -1."""
        columns: tuple[list[Words], list[Words]] = ([], [])
        parts: list[Part] = []
        failed: list[tuple[str, SlotStreamError]] = []
        count, size = 0, self.block_size
        for plan in plans:
            place = plan.place
            if not isinstance(place, BlockPlace) or plan.stop > len(place.block_ids) * size:
                failed.append((plan.req_id, SlotMismatch("the block table is shorter than the rows to be read")))
                continue
            positions = np.arange(plan.start, plan.stop, dtype=np.int64)
            kv_slots = np.asarray(place.block_ids, dtype=np.int64)[positions // size] * size + positions % size
            columns[0].append(kv_slots)
            columns[1].append(np.where(positions >= place.computed_from, kv_slots, -1))
            for start in range(0, len(positions), rows_per_slot):
                rows = min(rows_per_slot, len(positions) - start)
                parts.append(Part(plan.req_id, plan.first_row + start, rows, count + start))
            count += len(positions)
        return Located(parts, [np.concatenate(column) for column in columns if column], failed)

    def scratch_slots(self) -> int:
        """See `RowSource`."""
        if self.device.type == "cpu":
            return 0
        return 1 + (self._slot_mapping is not None)

    def read(
        self, located: Located, parts: Sequence[Part], segments: Sequence[Segment], scratch: Sequence[int]
    ) -> tuple[int, RowEvidence]:
        """See `RowSource`."""
        mapping = None
        if self._slot_mapping is not None:
            mapping = self._gather.copy_slot_mapping(self._slot_mapping, scratch[1] if scratch else None)
        index, computed = (column[parts[0].at : parts[-1].at + parts[-1].rows] for column in located.columns)
        number, peaks = self._gather.gather(self._select, index, segments, scratch[0] if scratch else None)
        return number, MappedRows(computed, peaks, mapping)

    def settle(self) -> None:
        """See `RowSource`."""
        self._gather.settle()

    def forget(self) -> None:
        """Nothing is kept from step to step."""

    def _select(self, index: torch.Tensor) -> torch.Tensor:
        """Rows [n, layers, hidden], contiguous, of the cache."""
        return self._words[index // self.block_size, :, index % self.block_size].contiguous().view(self._dtype)


def _words(cache: torch.Tensor) -> torch.Tensor:
    """The same memory as elements of 8 bytes, where its shape and strides allow that.

    An indexing kernel moves an element a thread: 64 MiB of bf16 rows take 200 us on an H200, and 64 us as words.
    """
    each = 8 // cache.element_size()
    *outer, inner = cache.stride()
    if inner != 1 or any(elements % each for elements in (cache.shape[-1], *outer, cache.storage_offset())):
        return cache
    return cache.view(torch.int64)
