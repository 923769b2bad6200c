"""Reads of row pages on a GPU beside other work: every byte and note is there once the number is; and what a read costs.

usage: python tests/gpu/page_reads.py [--reads N] [--each]      needs a GPU; says so and exits 0 where there is none.

vLLM is not needed: PYTHONPATH=connector:client:server:proto will do.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from slotstream.connector.plan import PagePlace, RowPlan
from slotstream.connector.reading.gather import bits_of
from slotstream.connector.reading.row_pages import RowPages
from slotstream.connector.reading.staging_memory import StagingMemory
from slotstream.connector.row_pool import RowPoolShape
from slotstream.connector.sending.row_check import RowEvidence, Segment, note_words
from slotstream.connector.sending.staging_pool import StagingShape
from slotstream.connector.vllm_config import RowKind

PAGE_ROWS, PAGES = 16, 512
SLOTS, SLOT_BYTES = 64, 2 << 20


class Rig:
    """A pool of rows of `row_bytes` bytes, staging, and work for the model's stream."""

    def __init__(self, row_bytes: int, dtype: torch.dtype) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        rows, row = PAGES * PAGE_ROWS, row_bytes // dtype.itemsize
        self.pages = RowPages(rows, RowKind("", (0, 1), "BF16"), row // 2, dtype, device)
        self.pages.cut(RowPoolShape(PAGES, PAGE_ROWS), rows)
        self.pool, self.stamps = self.pages.pool, self.pages.stamps
        self.pool.copy_(torch.randn(rows, 2, row // 2, device=device))
        bits, mask = bits_of(dtype)
        peaks = (self.pool.view(bits) & mask).amax(2).cpu().to(torch.int64)
        self.stamps.copy_(torch.cat((torch.stack((torch.arange(rows), torch.full((rows,), 5)), 1), peaks), 1))
        self.shape = StagingShape(SLOTS, 0, SLOT_BYTES, row_bytes, note_words(2))
        self.memory = StagingMemory(self.shape, device, shared=True)
        self.pages.use_staging(self.memory)
        assert self.pages._reads is not None
        self.reads = self.pages._reads
        self.a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def plans(self, rng: random.Random, count: int, rows: int, *, computed: bool = False) -> list[RowPlan]:
        pages = iter(rng.sample(range(PAGES), PAGES))
        plans = []
        for number in range(count):
            start = rng.randrange(40)
            stop = start + rows
            named = [next(pages) for _ in range(start // PAGE_ROWS, (stop - 1) // PAGE_ROWS + 1)]
            # The entry of a page has its number, so a row's slot is its place in the pool.
            place = PagePlace(array("q", named), array("q", named), array("q", [5] * len(named)))
            plans.append(RowPlan(f"r{number}", start, stop, 0, place, computed))
        return plans

    def start(
        self, plans: list[RowPlan], free: Sequence[int] = range(SLOTS)
    ) -> tuple[int, RowEvidence, list[Segment], np.ndarray, float]:
        """Of a read into the `free` slots: its number, evidence, segments, rows in the pool, and this thread's seconds."""
        index = []
        for plan in plans:
            assert isinstance(plan.place, PagePlace)
            at = range(plan.start % PAGE_ROWS, plan.start % PAGE_ROWS + plan.stop - plan.start)
            index += [plan.place.pages[row // PAGE_ROWS] * PAGE_ROWS + row % PAGE_ROWS for row in at]
        scratch, slots = free[0], random.sample(free[1:], len(free) - 1)
        began = time.perf_counter()
        located = self.pages.locate(plans, self.shape.rows_per_slot)
        segments = [
            Segment(part.req_id, part.first_row, part.rows, slot) for part, slot in zip(located.parts, slots, strict=False)
        ]
        number, evidence = self.pages.read(located, located.parts, segments, [scratch])
        return number, evidence, segments, np.array(index), time.perf_counter() - began

    def wait(self, number: int) -> float:
        began = time.monotonic()
        while self.memory.area.done < number:
            if time.monotonic() - began > 10:
                raise SystemExit("the number of a read did not come within 10 s")
        return time.monotonic() - began


def check(rig: Rig, reads: int) -> int:
    """How many of so many reads were wrong once their number was there."""
    rng, wrong = random.Random(0), 0
    for turn in range(reads):
        rig.memory.memory.fill_(turn % 251)
        computed = turn % 8 > 3
        if computed:
            torch.cuda.synchronize()
        for _ in range(turn % 3):
            rig.a @ rig.a
        plans = rig.plans(rng, rng.choice((1, 3, 16)), rng.choice((1, 15, 40)), computed=computed)
        number, evidence, segments, index, _ = rig.start(plans)
        if turn % 4 == 3:  # The pages are given away at once: the model's stream waits, and then writes them over.
            rig.reads.wait_for([int(row) // PAGE_ROWS for row in index])
            kept = rig.pool[torch.from_numpy(index).cuda()]  # Read by the model's stream, before that.
            before = rig.stamps.clone()
            rig.stamps.fill_(-9)
            rig.stamps.copy_(before)
            rig.pool[torch.from_numpy(index).cuda()] = -kept
        else:
            kept = rig.pool[torch.from_numpy(index).cuda()]
        rig.wait(number)
        found = evidence.find(rig.memory.area, segments)
        bits = {2: torch.int16, 4: torch.int32}[rig.pool.element_size()]
        got = torch.cat([rig.memory.tensor(s.staging_slot, s.rows * rig.shape.row_bytes) for s in segments])
        want = kept.view(torch.uint8).flatten().cpu()
        peaks = (kept.flatten(1).view(bits) & (2 ** (8 * rig.pool.element_size() - 1) - 1)).amax(1).cpu().numpy()
        bad_bytes = (got != want).view(len(index), -1)
        bad_peaks = np.flatnonzero(found.peaks != peaks)
        problem = found.problem(0, len(index))
        if bad_bytes.any() or len(bad_peaks) or problem:
            wrong += 1
            at = bad_bytes.nonzero()
            some = bad_peaks[:8]
            print(
                f"  turn {turn}, {len(segments)} parts, {len(index)} rows: {problem}; {len(at)} bytes wrong, {at[:3].tolist()},"
            )
            print(f"  last {at[-1:].tolist()}; peaks {some} {found.peaks[some]} for {peaks[some]}")
            time.sleep(0.2)
            later = torch.cat([rig.memory.tensor(s.staging_slot, s.rows * rig.shape.row_bytes) for s in segments])
            again = evidence.find(rig.memory.area, segments)
            print(f"  later {int((later != want).sum())} bytes, {int((again.peaks != peaks).sum())} peaks")
            sys.stdout.flush()
    return wrong


def check_several(rig: Rig, turns: int) -> int:
    """Of so many turns, in how many a read was wrong: five are under way, and the pages of one are given away at once."""
    rng, wrong, reads = random.Random(1), 0, 5
    each = SLOTS // reads
    for turn in range(turns):
        rig.memory.memory.fill_(turn % 251)
        plans, started = rig.plans(rng, 3 * reads, rng.choice((15, 40))), []
        for at in range(reads):
            rig.a @ rig.a
            started.append(rig.start(plans[at::reads], range(at * each, (at + 1) * each)))
        kept = [rig.pool[torch.from_numpy(index).cuda()] for _, _, _, index, _ in started]
        given = turn % reads
        rig.reads.wait_for([int(row) // PAGE_ROWS for row in started[given][3]])
        for index, rows in zip([one[3] for one in started[: given + 1]], kept, strict=False):
            rig.pool[torch.from_numpy(index).cuda()] = -rows
        rig.wait(started[-1][0])
        for (_, evidence, segments, index, _), rows in zip(started, kept, strict=True):
            got = torch.cat([rig.memory.tensor(s.staging_slot, s.rows * rig.shape.row_bytes) for s in segments])
            same = torch.equal(got, rows.view(torch.uint8).flatten().cpu())
            if not same or evidence.find(rig.memory.area, segments).problem(0, len(index)):
                wrong += 1
                print(f"  turn {turn}: a read is wrong, where the pages of read {given} of {reads} were given away")
                break
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reads", type=int, default=200)
    parser.add_argument("--only", type=int, default=0, metavar="BYTES", help="rows of so many bytes, and no others")
    parser.add_argument("--each", action="store_true", help="a call for each copy, and numbers by copies: as under WSL")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was tried")
        return 0
    print(torch.cuda.get_device_name(), torch.__version__)
    failed = 0
    for row_bytes, dtype in (
        (32 << 10, torch.bfloat16),
        (128 << 10, torch.float16),
        (14436, torch.bfloat16),
        (8 << 10, torch.float32),
    ):
        if asked.only not in (0, row_bytes):
            continue
        rig = Rig(row_bytes, dtype)
        if asked.each:
            rig.reads._device._copies._batch = None  # type: ignore[attr-defined]
            rig.reads._device._done._copy_from_now_on()  # type: ignore[attr-defined]
        wrong, wrong_turns = check(rig, asked.reads), check_several(rig, asked.reads // 4)
        failed += wrong + wrong_turns
        print(f"rows of {row_bytes} bytes, {dtype}: {wrong} of {asked.reads} reads wrong", flush=True)
        print(f"  five at a time: wrong in {wrong_turns} of {asked.reads // 4} turns", flush=True)
        for count, rows in ((1, 32), (16, 32), (1, 1024 if row_bytes <= 32 << 10 else 256)):
            spent, took = [], []
            for turn in range(50):
                torch.cuda.synchronize()
                number, *_, seconds = rig.start(rig.plans(random.Random(turn), count, rows))
                took.append(rig.wait(number))
                spent.append(seconds)
            us, ms = statistics.median(spent[5:]) * 1e6, statistics.median(took[5:]) * 1e3
            print(f"  {count} x {rows} rows: {us:.0f} us of the engine's thread, over after {ms:.2f} ms", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
