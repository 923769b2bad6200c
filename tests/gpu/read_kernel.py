"""What a read of captured rows costs the model beside it: one kernel that writes to host memory, or the copy engine.

usage: python tests/gpu/read_kernel.py [--json FILE] [--rounds N] [--quick]      needs a GPU, PyTorch and Triton only

Rows lie in pages of 16 on the device and go to pinned host memory, as the connector's staging is: a memfd, registered. Beside
them a CUDA graph is replayed: a decode of 64 (weights are read), or a step of 1,024 tokens (large products). Ways:

- `blocks N`: one kernel of N blocks on a side stream reads the pages and writes rows and notes straight to the host;
- `pieces`: index_select on the model's stream, then copies of 2 MiB on a side stream (what the connector did before);
- `N small`: the same with 4 warps a block instead of 16;
- `buffer`: one kernel gathers into a fixed buffer on the model's stream, then one copy on a side stream; `buf pieces`: copies
  of 2 MiB.

`GB/s`: of reads alone. `slower`: the graph's time while reads go on all the time, of its time without. `us each`: what one read
adds to the graph. `tokens`: the same with a small copy to the host behind each replay, as vLLM copies its sampled tokens.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined, no-any-return, func-returns-value"
from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

PAGE_ROWS = 16
PIECE = 2 << 20
STAGING = 256 << 20
NOTES = 3  # Words beside a row: slot, step, peak.
HIDDEN, LAYERS = 4096, 14


@triton.jit(do_not_specialize=["runs", "number"])
def read_rows(pool, stamps, ring, runs, staging, notes, arrived, done, number, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Run i of `ring` int64 [runs, 4] is: first row of the pool, rows, where in `staging` (elements), number of its first note.

    `number` goes to `done` behind everything, by the last block to end; 0: by nobody.
    """
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        row = tl.load(ring + run * 4)
        rows = tl.load(ring + run * 4 + 1)
        to = tl.multiple_of(tl.load(ring + run * 4 + 2), 8)
        note = tl.load(ring + run * 4 + 3)
        for i in range(0, rows):
            peak = 0
            for first in range(0, ROW, BLOCK):
                column = first + tl.arange(0, BLOCK)
                inside = column < ROW
                value = tl.load(pool + (row + i) * ROW + column, mask=inside, other=0)
                peak = tl.maximum(peak, tl.max((value & 0x7FFF).to(tl.int32)))
                tl.store(staging + to + i * ROW + column, value, mask=inside)
            tl.store(notes + (note + i) * 3, tl.load(stamps + (row + i) * 2))
            tl.store(notes + (note + i) * 3 + 1, tl.load(stamps + (row + i) * 2 + 1))
            tl.store(notes + (note + i) * 3 + 2, peak.to(tl.int64))
    if number > 0:
        tl.debug_barrier()
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
        if before == tl.num_programs(0) - 1:
            tl.store(arrived, 0)
            tl.atomic_xchg(done, number, sem="release", scope="sys")


@triton.jit(do_not_specialize=["number"])
def write_number(done, number):
    tl.store(done, number)


class Host:
    """Staging as the connector has it: a memfd, mapped and registered; then a ring, notes and the number."""

    def __init__(self) -> None:
        fd = os.memfd_create("read-kernel")
        extra = 1 << 20
        os.ftruncate(fd, STAGING + extra)
        self.map = mmap.mmap(fd, STAGING + extra, flags=mmap.MAP_SHARED)
        self.map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self.map, dtype=torch.uint8)
        error = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
        assert error == 0, f"cudaHostRegister: {error}"
        self.rows = whole[:STAGING]
        words = whole[STAGING:].view(torch.int64)
        self.ring = words[: 4 * 4096].view(4096, 4)
        self.fine_ring = words[16384:32768].view(4096, 4)
        self.notes = words[32768 : 32768 + NOTES * 4096].view(4096, NOTES)
        self.done = words[-1:]
        self.token = words[-128:-64]
        cuda = ctypes.CDLL("libcuda.so.1")
        device_pointer = ctypes.c_uint64()
        error = cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(device_pointer), ctypes.c_void_p(whole.data_ptr()), 0)
        same = device_pointer.value == whole.data_ptr()
        print(f"device pointer of registered memory: error {error}, the same as the host's: {same}")
        self.cuda = cuda


class Reads:
    """Reads of `count` rows of `row_bytes` each, in each way."""

    def __init__(self, host: Host, row_bytes: int, count: int) -> None:
        self.host, self.row_bytes, self.count = host, row_bytes, count
        pool_rows = max(2048, (512 << 20) // row_bytes)
        self.row = row_bytes // 2
        self.pool = torch.randint(-30000, 30000, (pool_rows, self.row), dtype=torch.int16, device="cuda")
        self.stamps = torch.arange(2 * pool_rows, dtype=torch.int64, device="cuda").view(pool_rows, 2)
        self.arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
        # Three in turn, so that the model need not wait for a copy.
        self.buffers = [torch.empty(count * row_bytes, dtype=torch.uint8, device="cuda") for _ in range(3)]
        self.buffer_notes = [torch.empty(count, NOTES, dtype=torch.int64, device="cuda") for _ in range(3)]
        self.copied = [torch.cuda.Event() for _ in range(3)]
        self.turn = 0
        self.side = torch.cuda.Stream()
        self.runs = count // PAGE_ROWS
        pages = torch.randperm(pool_rows // PAGE_ROWS)[: self.runs]
        ring = host.ring[: self.runs]
        ring[:, 0] = pages * PAGE_ROWS
        ring[:, 1] = PAGE_ROWS
        ring[:, 2] = torch.arange(self.runs) * PAGE_ROWS * self.row
        ring[:, 3] = torch.arange(self.runs) * PAGE_ROWS
        self.index = (ring[:, :1] + torch.arange(PAGE_ROWS)).flatten()
        self.device_index = self.index.cuda()
        fine = host.fine_ring[:count]  # A row each, for a kernel of many blocks.
        fine[:, 0] = self.index
        fine[:, 1] = 1
        fine[:, 2] = torch.arange(count) * self.row
        fine[:, 3] = torch.arange(count)
        self.number = 0
        self.ready = torch.cuda.Event()
        self.kernels = {}
        for warps, block in ((16, 16384), (4, 4096)):
            args = self.args(host.rows, host.notes, 1, block)
            self.kernels[warps] = read_rows.warmup(*args, num_warps=warps, grid=(1,)), block
        self.small = write_number.warmup(host.done, 1, num_warps=1, grid=(1,))

    def args(self, staging: torch.Tensor, notes: torch.Tensor, number: int, block: int, fine: bool = False) -> tuple[Any, ...]:
        host = self.host
        runs = (host.fine_ring, self.count) if fine else (host.ring, self.runs)
        to = staging.view(torch.int16)
        return self.pool, self.stamps, *runs, to, notes, self.arrived, host.done, number, self.row, block

    def launch(
        self, blocks: int, staging: torch.Tensor, notes: torch.Tensor, number: int, stream: int, warps: int = 16
    ) -> None:
        kernel, block = self.kernels[warps]
        kernel[(blocks, 1, 1)](*self.args(staging, notes, number, block), stream=stream)

    def by_kernel(self, blocks: int, *, numbered: bool = True, warps: int = 16) -> None:
        self.ready.record()
        self.side.wait_event(self.ready)
        self.number += numbered
        number = self.number if numbered else 0
        self.launch(blocks, self.host.rows, self.host.notes, number, self.side.cuda_stream, warps)

    def by_pieces(self) -> None:
        rows = self.pool.view(torch.int64).index_select(0, self.device_index).view(torch.uint8).flatten()
        notes = self.stamps.index_select(0, self.device_index)
        self.ready.record()
        self.side.wait_event(self.ready)
        with torch.cuda.stream(self.side):
            self.host.notes.flatten()[: notes.numel()].view_as(notes).copy_(notes, non_blocking=True)
            for begin in range(0, rows.numel(), PIECE):
                self.host.rows[begin : begin + PIECE].copy_(rows[begin : begin + PIECE], non_blocking=True)
        rows.record_stream(self.side)
        notes.record_stream(self.side)

    def by_buffer(self, piece: int = STAGING) -> None:
        main, turn = torch.cuda.current_stream(), self.turn
        self.turn = (turn + 1) % 3
        main.wait_event(self.copied[turn])
        kernel, block = self.kernels[4]
        args = self.args(self.buffers[turn], self.buffer_notes[turn], 0, block, fine=True)
        kernel[(min(self.count, 512), 1, 1)](*args, stream=main.cuda_stream)
        self.ready.record()
        self.side.wait_event(self.ready)
        rows = self.buffers[turn]
        with torch.cuda.stream(self.side):
            self.host.notes[: self.count].copy_(self.buffer_notes[turn], non_blocking=True)
            for begin in range(0, rows.numel(), piece):
                end = min(begin + piece, rows.numel())
                self.host.rows[begin:end].copy_(rows[begin:end], non_blocking=True)
        self.copied[turn].record(self.side)


def make_graph(tokens: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Layers of an 8B shape: the products of attention and MLP. The graph, and what it needs to live."""
    shapes = [(HIDDEN, 6144), (HIDDEN, HIDDEN), (HIDDEN, 28672), (14336, HIDDEN)]
    weights = [[torch.randn(shape, dtype=torch.bfloat16, device="cuda") / 64 for shape in shapes] for _ in range(LAYERS)]
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def run() -> torch.Tensor:
        h = x
        for qkv, out, up, down in weights:
            h = h + (h @ qkv)[:, :HIDDEN] @ out * 0.01
            h = h + (h @ up)[:, :14336] @ down * 0.01
        return h

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph, (weights, x)


def check(reads: Reads, blocks: int) -> str:
    """The number is looked at in host memory, and rows and notes must be there once it shows."""
    host, wrong, late = reads.host, 0, 0
    want_rows = reads.pool[reads.device_index].cpu()
    want_stamps = reads.stamps[reads.device_index].cpu()
    want_peaks = (want_rows & 0x7FFF).max(1).values.to(torch.int64)
    got = host.rows[: reads.count * reads.row_bytes].view(torch.int16).view(reads.count, reads.row)
    done = host.done.numpy()
    for turn in range(60):
        got.zero_()
        host.notes.zero_()
        torch.cuda.synchronize()
        separate = turn % 2 == 1
        if separate:
            reads.by_kernel(blocks, numbered=False)
            reads.number += 1
            reads.small[(1, 1, 1)](host.done, reads.number, stream=reads.side.cuda_stream)
        else:
            reads.by_kernel(blocks)
        until = time.monotonic() + 5
        while done[0] != reads.number and time.monotonic() < until:
            pass
        late += done[0] != reads.number
        right = torch.equal(got[-1], want_rows[-1]) and torch.equal(got, want_rows)
        notes = host.notes[: reads.count]
        wrong += not (right and torch.equal(notes[:, :2], want_stamps) and torch.equal(notes[:, 2], want_peaks))
    return f"{wrong} wrong and {late} late of 60"


def timed(
    reads: Callable[[], None], graph: torch.cuda.CUDAGraph, window_s: float, each_s: float, graph_s: float, token: Any
) -> tuple[float, float]:
    """(seconds of one replay, reads that ended in a replay's time) while reads go on all the time."""
    replays = max(4, round(window_s / graph_s))
    # Not quite as many as the link takes, nor so many that the host's calls are the bound.
    per_replay = min(0.85 * graph_s / each_s, 8.0)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    owed, issued = 1.0, 0
    for _ in range(replays):
        graph.replay()
        if token is not None:
            token.host.token.copy_(token.pool.view(torch.int64).flatten()[:64], non_blocking=True)
        owed += per_replay
        while owed >= 1:
            reads()
            issued += 1
            owed -= 1
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / replays, issued / replays


def plain(graph: torch.cuda.CUDAGraph, window_s: float, graph_s: float, token: Any) -> float:
    replays = max(4, round(window_s / graph_s))
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
        if token is not None:
            token.host.token.copy_(token.pool.view(torch.int64).flatten()[:64], non_blocking=True)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / replays


def alone(read: Callable[[], None], side: torch.cuda.Stream) -> float:
    """Seconds of one read, of several behind each other."""
    read()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(side)
    for _ in range(6):
        read()
    end.record(side)
    end.synchronize()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 6e3


def call_cost(call: Callable[[], object], times: int = 400, group: int = 20) -> float:
    """Microseconds of the host's thread for one call, with little queued."""
    call()
    spent = 0.0
    for _ in range(times // group):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(group):
            call()
        spent += time.perf_counter() - began
    torch.cuda.synchronize()
    return spent / times * 1e6


def call_costs(reads: Reads) -> dict[str, float]:
    host, side = reads.host, reads.side
    main = torch.cuda.current_stream()
    raw = side.cuda_stream
    kernel, block = reads.kernels[16]
    launch_args = args = reads.args(host.rows, host.notes, 0, block)
    addresses = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in launch_args)
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata
    write = host.cuda.cuStreamWriteValue64_v2
    write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
    address = host.done.data_ptr()
    index_host = reads.index.pin_memory()
    plain_event, side_stream = torch.cuda.Event(), side

    def pinned() -> None:
        torch.from_numpy(reads.index.numpy()).pin_memory().to("cuda", non_blocking=True)

    costs = {
        "Triton, jitted call": lambda: read_rows[(4,)](*args, num_warps=16),
        "Triton, compiled kernel [grid]()": lambda: kernel[(4, 1, 1)](*launch_args, stream=raw),
        "Triton, compiled kernel .run, tensors": lambda: run(4, 1, 1, raw, function, packed, None, None, None, *launch_args),
        "Triton, compiled kernel .run, addresses": lambda: run(4, 1, 1, raw, function, packed, None, None, None, *addresses),
        "number: small compiled kernel": lambda: reads.small[(1, 1, 1)](host.done, 1, stream=raw),
        "number: cuStreamWriteValue64": lambda: write(raw, address, 1, 0),
        "event record + wait": lambda: (plain_event.record(main), side_stream.wait_event(plain_event)),
        "event query": plain_event.query,
        "index to the device": lambda: index_host.to("cuda", non_blocking=True),
        "index pinned and to the device": pinned,
        "index_select": lambda: reads.pool.view(torch.int64).index_select(0, reads.device_index),
        "one copy": lambda: host.rows[: reads.row_bytes].copy_(reads.buffers[0][: reads.row_bytes], non_blocking=True),
        "before: whole read by pieces": reads.by_pieces,
        "kernel: whole read with its events": lambda: reads.by_kernel(4),
        "buffer: whole read with its events": reads.by_buffer,
    }
    found = {}
    for name, call in costs.items():
        try:
            found[name] = call_cost(call)
        except Exception as error:  # One of them must not cost the rest.
            print(f"  {name}: {type(error).__name__}: {error}")
    result = write(raw, address, 77, 0)
    torch.cuda.synchronize()
    print(f"cuStreamWriteValue64 answers {result}; the host reads {int(host.done[0])} for 77")
    return found


def measure(
    reads: Reads, graphs: dict[str, torch.cuda.CUDAGraph], base: dict[str, float], rounds: int, window_s: float
) -> list[dict[str, Any]]:
    """Every way, beside every graph."""
    row_bytes, count = reads.row_bytes, reads.count
    ways: dict[str, Callable[[], None]] = {
        **{f"blocks {n}": (lambda n=n: reads.by_kernel(n)) for n in (1, 2, 4, 8, 16)},  # type: ignore[misc]
        **{f"{n} small": (lambda n=n: reads.by_kernel(n, warps=4)) for n in (4, 8, 16)},  # type: ignore[misc]
        "pieces": reads.by_pieces,
        "buffer": reads.by_buffer,
        "buf pieces": lambda: reads.by_buffer(PIECE),
    }
    each = {way: alone(read, reads.side) for way, read in ways.items()}
    beside = (("decode 64", False), ("decode 64", True), ("step 1024", False))
    cells: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, tokens in beside:
            token = reads if tokens else None
            without = plain(graphs[name], window_s, base[name], token)
            for way, read in ways.items():
                with_s, per = timed(read, graphs[name], window_s, each[way], base[name], token)
                cells.setdefault((way, name, tokens), []).append((with_s / without, (with_s - without) / per))
    print(f"\nrows of {row_bytes >> 10} KiB, {count} a read ({count * row_bytes >> 20} MiB)")
    print(f"{'':12}{'GB/s':>8}{'ms':>8}" + "".join(f"{name + ', tokens' * tokens:>22}" for name, tokens in beside))
    found = []
    for way in ways:
        line = f"{way:12}{count * row_bytes / each[way] / 1e9:8.1f}{each[way] * 1e3:8.3f}"
        record: dict[str, Any] = {"row_bytes": row_bytes, "rows": count, "way": way, "read_s": each[way]}
        for name, tokens in beside:
            slower, each_s = (statistics.median(values) for values in zip(*cells[way, name, tokens], strict=True))
            line += f"{slower:12.3f}{each_s * 1e6:7.0f} us"
            record[name + " tokens" * tokens] = {"slower": slower, "us_each": each_s * 1e6}
        print(line, flush=True)
        found.append(record)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    host = Host()
    made = {"decode 64": make_graph(64), "step 1024": make_graph(1024)}
    graphs = {name: graph for name, (graph, _) in made.items()}
    window_s = 0.02 if asked.quick else 0.06
    found: list[dict[str, Any]] = []
    base: dict[str, float] = {}
    for name, graph in graphs.items():
        plain(graph, 0.05, 0.01, None)
        base[name] = plain(graph, 0.1, 0.005, None)
        print(f"{name}: {base[name] * 1e3:.3f} ms a replay")
    calls: dict[str, float] = {}
    for row_bytes in (32 << 10, 128 << 10):
        for count in (64, 512, 1024):
            reads = Reads(host, row_bytes, count)
            if count != 512:
                print(f"rows of {row_bytes >> 10} KiB, {count} a read, number before rows: {check(reads, 4)}", flush=True)
            if not calls:
                calls = call_costs(reads)
                print("calls, us: " + json.dumps({name: round(us, 2) for name, us in calls.items()}, indent=1), flush=True)
            found += measure(reads, graphs, base, asked.rounds, window_s)
            del reads
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    if asked.json:
        Path(asked.json).write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "calls_us": calls, "reads": found}, indent=1)
        )


if __name__ == "__main__":
    main()
