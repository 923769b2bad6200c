"""The kernels that write rows and change the page table, on a GPU, against the CPU's own way; and what a launch of each costs.

    PYTHONPATH=connector:client:server:proto:tests python tests/gpu/page_writes.py

Needs a GPU, PyTorch and Triton, no vLLM, and half a minute; says so and exits 0 where there is none.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

import torch

from slotstream.connector.plan import StepPlan, TableUpdate
from slotstream.connector.reading.row_pages import RowPages
from slotstream.connector.reading.row_write import write_rows
from slotstream.connector.row_pool import pool_shape
from slotstream.connector.vllm_config import RowKind

BLOCK, SLOTS, ROWS = 16, 4096 * 16, 512 * 16


def _pages(layers: int, hidden: int, device: str) -> RowPages:
    kind = RowKind("gpu", tuple(range(layers)), "BF16")
    pages = RowPages(ROWS, kind, hidden, torch.bfloat16, torch.device(device))
    pages.cut(pool_shape(ROWS, BLOCK), SLOTS)
    return pages


class _Pair:
    """The same updates and writes on the CPU and on the GPU."""

    def __init__(self, layers: int, hidden: int) -> None:
        self.rng = random.Random(layers * 10000 + hidden)
        self.layers, self.hidden = layers, hidden
        self.cpu, self.gpu = _pages(layers, hidden, "cpu"), _pages(layers, hidden, "cuda")
        self.step = 0

    def update(self, count: int) -> None:
        self.step += 1
        entries = {at: self.rng.randrange(-1, 512) for at in self.rng.sample(range(SLOTS // BLOCK), count)}
        plan = StepPlan(table=TableUpdate(self.step, entries, clear=self.step == 1, live=count))
        self.cpu.begin_step(plan)
        self.gpu.begin_step(plan)

    def write(self, count: int, *, aligned: bool = True) -> None:
        owned = (self.cpu.table >= 0).nonzero().flatten().tolist()
        # A page is one entry's, as the planner sees to: of two, the CPU and the GPU might each let another one win.
        first = {int(self.cpu.table[entry]): entry for entry in owned}
        slots = [entry * BLOCK + at for entry in first.values() for at in range(BLOCK)]
        chosen = self.rng.sample(slots, min(count, len(slots)))
        chosen += [-1] * (count - len(chosen))
        self.rng.shuffle(chosen)
        rows = [torch.randn(count + 1, self.hidden).to(torch.bfloat16) for _ in range(self.layers)]
        on_gpu = [row.cuda() for row in rows]
        if not aligned:  # Rows that begin in the middle of 16 bytes.
            on_gpu = [torch.cat([row.flatten()[:1], row.flatten()])[1:].view(row.shape) for row in on_gpu]
        mapping = torch.tensor(chosen, dtype=torch.int64)
        write_rows(self.cpu, rows, mapping)
        write_rows(self.gpu, on_gpu, mapping.cuda())

    def wrong(self) -> int:
        torch.cuda.synchronize()
        pairs = [(self.cpu.table, self.gpu.table), (self.cpu.stamps, self.gpu.stamps), (self.cpu.step, self.gpu.step)]
        found = sum(int((mine != theirs.cpu()).sum()) for mine, theirs in pairs)
        return found + int((self.cpu.pool.view(torch.int16) != self.gpu.pool.cpu().view(torch.int16)).sum())


def _same(layers: int, hidden: int) -> int:
    pair = _Pair(layers, hidden)
    wrong = 0
    for round_ in range(200):  # More than the ring has places, and so quickly that the device is behind.
        pair.update(pair.rng.choice([0, 1, 8, 64, 300, 1500]))
        if round_ % 10 == 0:
            pair.write(pair.rng.choice([1, 64, 1000]), aligned=round_ % 20 == 0)
            wrong += pair.wrong()
    return wrong + pair.wrong()


def _in_a_graph() -> int:
    """A write that was recorded while nobody had a page writes the rows of those who have one at its replay."""
    pages = _pages(4, 4096, "cuda")
    rows = [torch.zeros(64, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    slots = torch.full((64,), -1, dtype=torch.int64, device="cuda")
    write_rows(pages, rows, slots)
    write_rows(pages, rows, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_rows(pages, rows, slots)
    pages.begin_step(StepPlan(table=TableUpdate(7, {5: 3}, clear=True, live=1)))
    for row in rows:
        row.normal_()
    slots[:16] = torch.arange(5 * BLOCK, 6 * BLOCK, device="cuda")
    graph.replay()
    torch.cuda.synchronize()
    wanted = torch.stack([row[:16] for row in rows], 1)
    wrong = int((pages.pool[3 * BLOCK : 4 * BLOCK] != wanted).sum())
    return wrong + int((pages.stamps[3 * BLOCK : 4 * BLOCK, 1] != 7).sum()) + int((pages.stamps >= 0).sum() != 16 * 6)


def _cost(call: Callable[[], object]) -> float:
    """us of the engine's thread a call, while the device has time for it."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(400):
        call()
        if number % 20 == 0:
            torch.cuda.synchronize()
    return (time.perf_counter() - began) / 400 * 1e6


def main() -> int:
    """Prints what was found; 1 where something is wrong."""
    if not torch.cuda.is_available():
        print("this needs a GPU")
        return 0
    wrong = {f"{layers} layers of {hidden}": _same(layers, hidden) for layers, hidden in ((1, 64), (4, 4096), (19, 1030))}
    wrong["in a graph"] = _in_a_graph()
    print("wrong:", wrong)
    pages = _pages(4, 4096, "cuda")
    rows = [torch.zeros(64, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    slots = torch.arange(64, dtype=torch.int64, device="cuda")
    numbers = iter(range(1, 1 << 30))
    for entries in (1, 8, 64):
        changed = {at: at for at in range(entries)}
        us = _cost(
            lambda changed=changed: pages.begin_step(  # type: ignore[misc]
                StepPlan(table=TableUpdate(next(numbers), changed, clear=False, live=1))
            )
        )
        print(f"table update of {entries}: {us:.1f} us")
    print(f"write of 64 rows of 4 layers: {_cost(lambda: write_rows(pages, rows, slots)):.1f} us")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
