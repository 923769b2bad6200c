"""The kernel of `page_reads`. Triton comes with torch for CUDA, so only what runs on a GPU imports this."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["scratch", "parts", "number"])  # type: ignore[untyped-decorator]
def read(  # type: ignore[no-untyped-def]
    pool,
    stamps,
    words,
    staging,
    notes,
    done,
    arrived,
    scratch,
    parts,
    number,
    PAGE_ROWS: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    SLOT: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    ROW: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = words + scratch.to(tl.int64) * SLOT_WORDS
    pages = part + parts * 4
    for _ in range(0, parts):
        slot = tl.load(part)
        first = tl.load(part + 1)
        offset = tl.load(part + 2)
        stop = offset + tl.load(part + 3)
        part += 4
        for at in range(tl.program_id(0), (stop + PAGE_ROWS - 1) // PAGE_ROWS, tl.num_programs(0)):
            page = tl.load(pages + first + at)
            begin = at * PAGE_ROWS
            for behind in range(tl.maximum(offset, begin), tl.minimum(stop, begin + PAGE_ROWS)):
                row = page * PAGE_ROWS + behind - begin
                to = behind - offset
                peak = 0
                for start in range(0, ROW, BLOCK):
                    column = start + tl.arange(0, BLOCK)
                    inside = column < ROW
                    value = tl.load(pool + row * ROW + column, mask=inside, other=0)
                    peak = tl.maximum(peak, tl.reduce((value & MASK).to(tl.int32), 0, larger))
                    tl.store(staging + slot * SLOT + to * ROW + column, value, mask=inside)
                note = notes + (slot * SLOT_ROWS + to) * 3
                tl.store(note, tl.load(stamps + row * 2))
                tl.store(note + 1, tl.load(stamps + row * 2 + 1))
                tl.store(note + 2, peak)
    # What a block wrote is there before it counts itself, and the count of all before the number.
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
    if before == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        tl.atomic_xchg(done, number.to(tl.int64), sem="release", scope="sys")
