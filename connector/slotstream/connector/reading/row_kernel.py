"""The kernel of `row_write`: one program for each token and layer. Only what runs on a GPU imports this."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


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
    MASK: tl.constexpr,
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
                notes = stamps + at * (2 + LAYERS)  # See `row_check.note_words`.
                if tl.program_id(1) == 0:
                    tl.store(notes, slot)
                    tl.store(notes + 1, tl.load(step))
                for layer in tl.static_range(LAYERS):
                    if tl.program_id(1) == layer:
                        to = (at * LAYERS + layer) * HIDDEN
                        peak = 0
                        for first in range(0, HIDDEN, BLOCK):
                            column = first + tl.arange(0, BLOCK)
                            inside = column < HIDDEN
                            value = tl.load(rows[layer] + token * HIDDEN + column, mask=inside, other=0)
                            tl.store(pool + to + column, value, mask=inside)
                            peak = tl.maximum(peak, tl.reduce((value & MASK).to(tl.int32), 0, larger))
                        tl.store(notes + 2 + layer, peak)
