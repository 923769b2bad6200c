"""The write that the model's forward pass does: rows into their pages, with Triton on a GPU and torch on a CPU."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from slotstream.connector.reading.gather import peaks_of
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
    notes = [kv_slots[rows], pages.step.expand(rows.numel())]
    for number, layer in enumerate(layers):
        written = layer.index_select(0, rows)
        pages.pool[:, number].index_copy_(0, at, written)
        notes.append(peaks_of(written))
    pages.stamps.index_copy_(0, at, torch.stack(notes, 1))


def _write_on_gpu(pages: RowPages, layers: Sequence[torch.Tensor], slots: torch.Tensor, count: int) -> None:
    rows = tuple([layer if layer.is_contiguous() else layer.contiguous() for layer in layers])
    addresses = tuple([layer.data_ptr() for layer in rows])
    at = slots.data_ptr()
    grid = (count, len(rows), 1)
    aligned = not (at | functools.reduce(operator.or_, addresses)) & 15
    key = (pages.kernel_key, slots.dtype) if aligned else None
    if _launch.knows(key):
        _launch(key, grid, addresses, at, *pages.kernel_addresses, _BLOCK)
    else:
        _launch(key, grid, tuple([row.view(pages.bits) for row in rows]), slots, *pages.kernel_arguments, _BLOCK)


def make_kernel() -> Any:
    """The Triton kernel. Triton comes with torch for CUDA."""
    from slotstream.connector.reading.row_kernel import put

    return put


_launch = Launches(make_kernel)
