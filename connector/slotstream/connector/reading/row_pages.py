"""Row pages on the device: the pool, the table that says whose a page is, and the write that the model's forward pass does.

The pool is [pages * page rows, layers, hidden]; the table maps KV-cache slot // page rows to a page, or to -1. A row is stored
only where its slot is not padding and its page is not -1, so what nobody captures is neither written nor paid for. Beside each
row the device notes for which slot it wrote it, and in which step. All tensors stay where they are: a CUDA graph's replay does
the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from slotstream.connector.plan import PagePlace, RowPlan, StepPlan, TableUpdate
from slotstream.connector.reading.gather import Destination, RowGather
from slotstream.connector.reading.row_source import Located
from slotstream.connector.reading.staging_plan import PAGED_WORDS
from slotstream.connector.row_pool import RowPoolShape
from slotstream.connector.sending.copies import Gathered
from slotstream.connector.sending.row_check import RowEvidence, StampEvidence
from slotstream.connector.vllm_config import RowKind
from slotstream.wire.errors import ConfigError, InternalFault, SlotMismatch


class RowPages:
    """One pool of `rows` rows [layers, `hidden`] on `device`, cut into pages once the KV cache is known.

    `made_for` says what the rows are. Raises ConfigError where there is not so much memory.
    """

    words_per_row = PAGED_WORDS

    def __init__(self, rows: int, made_for: RowKind, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.made_for = made_for
        layers = len(made_for.layer_ids)
        try:
            self.pool = torch.zeros(rows, layers, hidden, dtype=dtype, device=device)
        except RuntimeError as error:  # Torch's out-of-memory errors are.
            nbytes = rows * layers * hidden * dtype.itemsize
            raise ConfigError(
                f"{-(-nbytes >> 20)} MiB of device memory for the row pool cannot be had: {str(error).partition(chr(10))[0]}; "
                "set connector option row_pool_bytes lower"
            ) from error
        self._words = _words(self.pool)
        # The slot, and the step in which its row was written. No step is negative, so what was never written is never right.
        self.stamps = torch.full((rows, 2), -1, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.table = torch.full((1,), -1, dtype=torch.int32, device=device)
        self.shape = RowPoolShape(0, 1)
        self._off = False

    @property
    def nbytes(self) -> int:
        """Of the pool and what belongs to it."""
        return sum(t.numel() * t.element_size() for t in (self.pool, self.stamps, self.table, self.step))

    def cut(self, shape: RowPoolShape, slots: int) -> None:
        """Make the table for a KV cache of `slots` slots."""
        self.shape = shape
        self.table = torch.full((-(-slots // shape.page_rows),), -1, dtype=torch.int32, device=self.device)
        self.forget()

    def forget(self) -> None:
        """Every page is nobody's, and no row counts that was written before."""
        self.table.fill_(-1)
        self.stamps.fill_(-1)

    def switch_off(self) -> None:
        """After a fault in the forward pass: no page is given any more, and no row is read. A graph keeps its write."""
        self._off = True
        self.forget()

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass, in the model's stream: pages are given, and taken away."""
        if plan.table is not None and not self._off:
            self._update(plan.table)

    def _update(self, update: TableUpdate) -> None:
        if update.clear:
            self.forget()
        entries: Mapping[int, int] = update.entries
        # One copy: the step, then entries and pages. Pinned memory is not used again before the copy is over: torch sees to it.
        packed = np.empty(1 + 2 * len(entries), dtype=np.int64)
        packed[0] = update.step
        packed[1 : 1 + len(entries)] = list(entries)
        packed[1 + len(entries) :] = list(entries.values())
        host = torch.from_numpy(packed)
        if self.device.type != "cpu":
            host = host.pin_memory()
        sent = host.to(self.device, non_blocking=True)
        self.step.copy_(sent[:1])
        if entries:
            index, pages = sent[1:].view(2, -1)
            self.table.index_copy_(0, index, pages.to(torch.int32))

    # What the worker half reads.

    def remember_slot_mapping(self, slot_mapping: torch.Tensor) -> None:
        """The forward pass notes its slots itself."""

    def locate(self, plan: RowPlan) -> Located:
        """See `RowSource`."""
        if self._off:
            raise InternalFault("capture is off until vLLM restarts: rows could not be written, and the log says why")
        place, size = plan.place, self.shape.page_rows
        if not isinstance(place, PagePlace):
            raise SlotMismatch("the plan names blocks where rows lie in pages")
        positions = np.arange(plan.start, plan.stop, dtype=np.int64)
        at, offset = positions // size - plan.start // size, positions % size
        if at[-1] >= len(place.pages) or not all(0 <= page < self.shape.pages for page in place.pages):
            raise SlotMismatch("the plan names too few pages for its rows, or some that do not exist")
        pages, kv_slots, steps = (np.asarray(values, dtype=np.int64) for values in (place.pages, place.kv_slots, place.steps))
        return Located(pages[at] * size + offset, kv_slots[at] + offset, steps[at])

    def scratch_slots(self) -> int:
        """See `RowSource`."""
        return 0 if self.device.type == "cpu" else 1

    def read(
        self, gather: RowGather, rows: Located, destinations: Sequence[Destination], scratch: Sequence[int]
    ) -> tuple[Gathered, RowEvidence]:
        """See `RowSource`."""
        gathered, stamps = gather.gather(
            self._select, rows.index, destinations, scratch[0] if scratch else None, self._select_stamps
        )
        return gathered, StampEvidence(rows.kv_slots, rows.steps, stamps)

    def _select(self, index: torch.Tensor) -> torch.Tensor:
        return self._words.index_select(0, index).view(self.pool.dtype)

    def _select_stamps(self, index: torch.Tensor) -> torch.Tensor:
        return self.stamps.index_select(0, index)


def _words(pool: torch.Tensor) -> torch.Tensor:
    """The pool as elements of 8 bytes where its rows allow that: an indexing kernel moves an element a thread."""
    return pool.view(torch.int64) if pool.shape[-1] % (8 // pool.element_size()) == 0 else pool
