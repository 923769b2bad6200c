"""The write that the model's forward pass does: rows into their pages, with Triton on a GPU and torch on a CPU."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from slotstream.connector.reading.launches import Launches
from slotstream.connector.reading.row_pages import RowPages

_BLOCK = 1024  # Elements that a program moves at a time.


def write_rows(pages: RowPages, layers: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """Store row i of each of `layers` ([tokens, hidden], in the order of the pool) for slot `slots[i]`; padding slots are < 0.

    Rows beyond the slots, and slots beyond the rows, are left out: graphs pad either. Reads nothing that a step changes but the
    tensors themselves, so that a CUDA graph can replay it.
    """
    count = min(slots.shape[0], layers[0].shape[0])
    if count == 0:
        return
    if pages.device.type == "cpu":
        _write_on_cpu(pages, layers, slots[:count])
    else:
        _write_on_gpu(pages, layers, slots, count)


def _write_on_cpu(pages: RowPages, layers: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    if pages.table.shape[0] == 1 and pages.shape.pages == 0:
        return  # The KV cache is not there yet: vLLM tries the model out.
    kv_slots = slots.to(torch.int64)
    page_rows = pages.shape.page_rows
    entries = torch.div(kv_slots, page_rows, rounding_mode="floor")
    owned = pages.table[entries.clamp(0, pages.table.shape[0] - 1)].to(torch.int64)
    wanted = (kv_slots >= 0) & (entries < pages.table.shape[0]) & (owned >= 0) & (owned < pages.shape.pages)
    rows = torch.nonzero(wanted).flatten()
    if rows.numel() == 0:
        return
    at = owned[rows] * page_rows + kv_slots[rows] % page_rows
    for number, layer in enumerate(layers):
        pages.pool[:, number].index_copy_(0, at, layer.index_select(0, rows))
    pages.stamps.index_copy_(0, at, torch.stack((kv_slots[rows], pages.step.expand(rows.numel())), 1))


def _write_on_gpu(pages: RowPages, layers: Sequence[torch.Tensor], slots: torch.Tensor, count: int) -> None:
    rows = tuple([layer if layer.is_contiguous() else layer.contiguous() for layer in layers])
    addresses = tuple([layer.data_ptr() for layer in rows])
    at = slots.data_ptr()
    grid = (count, len(rows), 1)
    if (at | functools.reduce(operator.or_, addresses)) & 15:
        _launch(None, grid, rows, slots, *pages.kernel_arguments, _BLOCK)
        return
    key = (pages.kernel_key, slots.dtype)
    if _launch.knows(key):
        _launch(key, grid, addresses, at, *pages.kernel_addresses, _BLOCK)
    else:
        _launch(key, grid, rows, slots, *pages.kernel_arguments, _BLOCK)


def make_kernel() -> Any:
    """The Triton kernel: one program for each token and layer."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["entries", "pages"])  # type: ignore[untyped-decorator]
    def put(  # type: ignore[no-untyped-def]
        rows,
        slots,
        table,
        entries,
        pages,
        pool,
        stamps,
        step,
        PAGE_ROWS: tl.constexpr,
        LAYERS: tl.constexpr,
        HIDDEN: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            entry = slot // PAGE_ROWS
            if entry < entries:
                page = tl.load(table + entry).to(tl.int64)
                if (page >= 0) & (page < pages):
                    at = page * PAGE_ROWS + slot % PAGE_ROWS
                    if tl.program_id(1) == 0:
                        tl.store(stamps + at * 2, slot)
                        tl.store(stamps + at * 2 + 1, tl.load(step))
                    for layer in tl.static_range(LAYERS):
                        if tl.program_id(1) == layer:
                            to = (at * LAYERS + layer) * HIDDEN
                            for first in range(0, HIDDEN, BLOCK):
                                column = first + tl.arange(0, BLOCK)
                                inside = column < HIDDEN
                                value = tl.load(rows[layer] + token * HIDDEN + column, mask=inside)
                                tl.store(pool + to + column, value, mask=inside)

    return put


_launch = Launches(make_kernel)
