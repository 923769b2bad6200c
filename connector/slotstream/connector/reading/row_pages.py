"""Row pages on the device: the pool, the table that says whose a page is, and the write that the model's forward pass does.

The pool is [pages * page rows, layers, hidden]; the table maps KV-cache slot // page rows to a page, or to -1. A row is stored
only where its slot is not padding and its page is not -1, so what nobody captures is neither written nor paid for. Beside each
row the device notes for which slot it wrote it, in which step, and the peak of each layer (see `row_check`). All tensors stay
where they are: a CUDA graph's replay does the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slotstream.connector.plan import PagePlace, RowPlan, StepPlan, TableUpdate
from slotstream.connector.reading.cuda_copies import CudaCopier
from slotstream.connector.reading.gather import RowGather, bits_of
from slotstream.connector.reading.located import Located, Part, page_words
from slotstream.connector.reading.page_reads import PageReads
from slotstream.connector.reading.page_table import TableWriter
from slotstream.connector.reading.staging_memory import StagingMemory
from slotstream.connector.row_pool import RowPoolShape
from slotstream.connector.sending.row_check import NotedRows, RowEvidence, Segment, note_words, rows_in_pages
from slotstream.connector.vllm_config import RowKind
from slotstream.wire.errors import ConfigError, InternalFault, SlotMismatch, SlotStreamError


class RowPages:
    """One pool of `rows` rows [layers, `hidden`] on `device`, cut into pages once the KV cache is known.

    `made_for` says what the rows are. Raises ConfigError where there is not so much memory.
    """

    begins_every_step = False

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
        self.bits, self.mask = bits_of(dtype)
        # Of each row the slot, the step, and its peaks. No step is negative, so what was never written is never right.
        self.stamps = torch.full((rows, note_words(layers)), -1, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.table = torch.full((1,), -1, dtype=torch.int32, device=device)
        self.live = 0  # Entries of the table that are not -1.
        self.shape = RowPoolShape(0, 1)
        self._off = False
        self._writer: TableWriter | None = None  # There with the KV cache.
        self.kernel_key: tuple[Any, ...] = ()
        self.kernel_arguments: tuple[Any, ...] = ()
        self.kernel_addresses: tuple[int, ...] = ()
        self._gather: RowGather | None = None
        self._reads: PageReads | None = None

    @property
    def nbytes(self) -> int:
        """Of the pool and what belongs to it."""
        return sum(t.numel() * t.element_size() for t in (self.pool, self.stamps, self.table, self.step))

    def cut(self, shape: RowPoolShape, slots: int) -> None:
        """Make the table for a KV cache of `slots` slots."""
        self.shape = shape
        self.table = torch.full((-(-slots // shape.page_rows),), -1, dtype=torch.int32, device=self.device)
        self._writer = TableWriter(self.table, self.step)
        _, layers, hidden = self.pool.shape
        # What the kernel that writes rows is told of us: this memory stays where it is.
        self.kernel_key = (self.pool.dtype, shape.page_rows, layers, hidden)
        self.kernel_arguments = (
            *(self.table, self.table.shape[0], shape.pages, self.pool.view(self.bits), self.stamps, self.step),
            *(shape.page_rows, layers, hidden, self.mask),
        )
        self.kernel_addresses = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in self.kernel_arguments)
        self.forget()

    def forget(self) -> None:
        """Every page is free, and rows that were written before do not count."""
        if self._reads is not None:
            self._reads.forget()  # First: it has the model's stream wait for reads that still look at what is cleared here.
        self.table.fill_(-1)
        self.stamps.fill_(-1)
        self.live = 0

    def switch_off(self) -> None:
        """After a fault in the forward pass: no page is given any more, and no row is read. A graph keeps its write."""
        self._off = True
        self.forget()

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass, in the model's stream: pages are given, and taken away."""
        if plan.table is not None and not self._off:
            if self._reads is not None:
                self._reads.wait_for(plan.table.entries.values())
            self._update(plan.table)

    def _update(self, update: TableUpdate) -> None:
        if update.clear:
            self.forget()
        assert self._writer is not None, "the table was made with the KV cache"
        self._writer.write(update)
        self.live = update.live

    # What the worker half reads.

    def use_staging(self, memory: StagingMemory) -> None:
        """See `RowSource`."""
        if self.device.type == "cuda":
            self._reads = PageReads(self.pool, self.stamps, memory, self.shape.page_rows, CudaCopier(self.device))
        else:
            self._gather = RowGather(self.device, memory)

    def remember_slot_mapping(self, slot_mapping: torch.Tensor) -> None:
        """The forward pass notes its slots itself."""

    def remember_stream(self) -> None:
        """See `RowSource`."""
        if self._reads is not None:
            self._reads.remember_stream()

    def locate(self, plans: Sequence[RowPlan], rows_per_slot: int) -> Located:
        """See `RowSource`."""
        if self._off:
            error = InternalFault("capture is off until vLLM restarts: rows could not be written, and the log says why")
            return Located((), (), [(plan.req_id, error) for plan in plans])
        size = self.shape.page_rows
        pages, entries, steps = array("q"), array("q"), array("q")
        parts: list[Part] = []
        failed: list[tuple[str, SlotStreamError]] = []
        computed = True
        for plan in plans:
            computed = computed and plan.computed
            place, first, rows = plan.place, plan.start % size, plan.stop - plan.start
            if (
                not isinstance(place, PagePlace)
                or len(place.pages) != -(-(first + rows) // size)
                or not self._exist(place.pages)
            ):
                failed.append(
                    (plan.req_id, SlotMismatch("the plan names other places than row pages, or too few, or none of ours"))
                )
                continue
            behind = len(pages) * size + first
            pages.extend(place.pages)
            entries.extend(place.entries)
            steps.extend(place.steps)
            start = 0
            while start < rows:
                at, here = behind + start, rows - start
                if here > rows_per_slot:
                    here = rows_per_slot
                parts.append(Part(plan.req_id, plan.first_row + start, here, at // size, at % size))
                start += here
        if not len(pages) == len(entries) == len(steps):
            raise ValueError("each page has one entry and one step")
        return Located(parts, (pages, entries, steps), failed, computed)

    def _exist(self, pages: Sequence[int]) -> bool:
        return min(pages) >= 0 and max(pages) < self.shape.pages

    def scratch_slots(self) -> int:
        """See `RowSource`."""
        return 0 if self._reads is None else 1

    def read(
        self, located: Located, parts: Sequence[Part], segments: Sequence[Segment], scratch: Sequence[int]
    ) -> tuple[int, RowEvidence]:
        """See `RowSource`."""
        words = page_words(located, parts, segments, self.shape.page_rows)
        if self._reads is not None:
            return self._reads.read(words, segments, scratch[0], computed=located.computed)
        assert self._gather is not None, "staging comes before the first read"
        kept = np.array(words)
        index, _, _ = rows_in_pages(kept, len(parts), self.shape.page_rows)
        number, _ = self._gather.gather(self._select, index, segments, None, self._select_stamps)
        return number, NotedRows(kept, len(parts), self.shape.page_rows)

    def settle(self) -> None:
        """See `RowSource`."""
        reader = self._reads or self._gather
        if reader is not None:
            reader.settle()

    def _select(self, index: torch.Tensor) -> torch.Tensor:
        return self._words.index_select(0, index).view(self.pool.dtype)

    def _select_stamps(self, index: torch.Tensor) -> torch.Tensor:
        return self.stamps.index_select(0, index)


def _words(pool: torch.Tensor) -> torch.Tensor:
    """The pool as elements of 8 bytes where its rows allow that: an indexing kernel moves an element a thread."""
    return pool.view(torch.int64) if pool.shape[-1] % (8 // pool.element_size()) == 0 else pool
