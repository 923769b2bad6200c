"""The kernel of `page_reads`. Triton comes with torch for CUDA, so only what runs on a GPU imports this."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["scratch", "count", "number"])  # type: ignore[untyped-decorator]
def read(  # type: ignore[no-untyped-def]
    pool,
    stamps,
    words,
    staging,
    notes,
    done,
    arrived,
    scratch,
    count,
    number,
    SLOT_WORDS: tl.constexpr,
    SLOT: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    ROW: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    runs = words + scratch.to(tl.int64) * SLOT_WORDS
    for run in range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.load(runs + run * 6)
        rows = tl.load(runs + run * 6 + 1)
        slot = tl.load(runs + run * 6 + 2)
        at = tl.load(runs + run * 6 + 3)
        for i in range(0, rows):
            peak = 0
            for first in range(0, ROW, BLOCK):
                column = first + tl.arange(0, BLOCK)
                inside = column < ROW
                value = tl.load(pool + (row + i) * ROW + column, mask=inside, other=0)
                peak = tl.maximum(peak, tl.reduce((value & MASK).to(tl.int32), 0, larger))
                tl.store(staging + slot * SLOT + (at + i) * ROW + column, value, mask=inside)
            note = notes + (slot * SLOT_ROWS + at + i) * 3
            tl.store(note, tl.load(stamps + (row + i) * 2))
            tl.store(note + 1, tl.load(stamps + (row + i) * 2 + 1))
            tl.store(note + 2, peak)
    # What a block wrote is there before it counts itself, and the count of all before the number.
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
    if before == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        tl.atomic_xchg(done, number.to(tl.int64), sem="release", scope="sys")
