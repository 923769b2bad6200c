"""Where rows lie on the device, as the worker sees it: one protocol, and the source that vLLM's `extract_hidden_states` is.

The other source is `row_pages`. Whatever reads rows knows only this protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from slotstream.connector.plan import BlockPlace, RowPlan, StepPlan
from slotstream.connector.reading.gather import Destination, Index, RowGather
from slotstream.connector.sending.copies import Gathered, KvSlots
from slotstream.connector.sending.row_check import MappingEvidence, RowEvidence, StepMapping
from slotstream.connector.vllm_config import RowKind
from slotstream.wire.errors import ConfigError, SlotMismatch


@dataclass(frozen=True, slots=True)
class Located:
    """Rows of one plan. int64 [n] each: `index` in the source, and what the device has to say of each row.

    `kv_slots`: the slot that it wrote the row for, -1 where that cannot be known any more. `steps`: the step from which on it
    did; 0 where that does not matter.
    """

    index: Index
    kv_slots: KvSlots
    steps: Index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice) -> Located:
        return Located(self.index[rows], self.kv_slots[rows], self.steps[rows])

    @classmethod
    def join(cls, parts: Sequence[Located]) -> Located:
        """The rows of all parts, in order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("index", "kv_slots", "steps")))


class RowSource(Protocol):
    """Rows [layers, hidden] on `device`. All methods are called on the engine's thread, in the order of a step."""

    device: torch.device
    words_per_row: int
    """How many words of 8 bytes a gather needs in scratch for each row."""
    made_for: RowKind
    """What the rows are. Who reads them compares."""

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass: do what the plan asks of the device."""

    def remember_slot_mapping(self, slot_mapping: torch.Tensor) -> None:
        """This step's slot mapping, int [tokens], on the device: only remembered here."""

    def locate(self, plan: RowPlan) -> Located:
        """Where a plan's rows are. Raises SlotMismatch when the plan cannot be right."""

    def scratch_slots(self) -> int:
        """How many staging slots the next `read` needs for itself, beside the rows' own."""

    def read(
        self, gather: RowGather, rows: Located, destinations: Sequence[Destination], scratch: Sequence[int]
    ) -> tuple[Gathered, RowEvidence]:
        """Start copying rows into staging. `scratch`: as many staging slots as `scratch_slots` said."""

    def forget(self) -> None:
        """After a fault: trust nothing of what the device holds."""


class CachedRows:
    """The cache layer of `extract_hidden_states`: [blocks, layers, block_size, hidden], with any strides.

    Rows stay where they are for as long as their blocks do, so a step's slot mapping speaks only of rows that the step wrote.
    """

    words_per_row = 1

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
        self._mapping: StepMapping | None = None

    def begin_step(self, plan: StepPlan) -> None:
        """See `RowSource`."""
        self._slot_mapping = self._mapping = None

    def remember_slot_mapping(self, slot_mapping: torch.Tensor) -> None:
        """See `RowSource`."""
        self._slot_mapping = slot_mapping

    def locate(self, plan: RowPlan) -> Located:
        """See `RowSource`."""
        place, size = plan.place, self.block_size
        if not isinstance(place, BlockPlace) or plan.stop > len(place.block_ids) * size:
            raise SlotMismatch("the block table is shorter than the rows to be read")
        positions = np.arange(plan.start, plan.stop, dtype=np.int64)
        kv_slots = np.asarray(place.block_ids, dtype=np.int64)[positions // size] * size + positions % size
        computed = np.where(positions >= place.computed_from, kv_slots, -1)
        return Located(kv_slots, computed, np.zeros_like(kv_slots))

    def scratch_slots(self) -> int:
        """See `RowSource`."""
        if self.device.type == "cpu":
            return 0
        return 1 + self._wants_mapping

    def read(
        self, gather: RowGather, rows: Located, destinations: Sequence[Destination], scratch: Sequence[int]
    ) -> tuple[Gathered, RowEvidence]:
        """See `RowSource`."""
        if self._wants_mapping:
            assert self._slot_mapping is not None
            self._mapping = StepMapping(*gather.copy_slot_mapping(self._slot_mapping, scratch[1] if scratch else None))
        gathered, _ = gather.gather(self._select, rows.index, destinations, scratch[0] if scratch else None)
        return gathered, MappingEvidence(rows.kv_slots, self._mapping)

    def forget(self) -> None:
        """Nothing is kept from step to step."""

    @property
    def _wants_mapping(self) -> bool:
        return self._mapping is None and self._slot_mapping is not None

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
