"""What other streams do to a model's CUDA graph: kernels and copies to the host, while they run and afterwards.

usage: python tests/gpu/beside.py      needs a GPU, PyTorch and Triton only; says so and exits 0 where there is no GPU.

A graph of 500 small kernels is replayed alone, beside work on another stream, and again after that, at once and seconds later.
Times are us a replay, medians. What this shows is why copies read captured rows (`connector/reading/page_reads.py`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

_KERNELS, _REPLAYS, _MIB = 500, 20, 1 << 20
_AFTER_S = (0.0, 1.0, 4.0)


@triton.jit
def move(source, to, blocks, BLOCK: tl.constexpr):
    for at in range(tl.program_id(0), blocks, tl.num_programs(0)):
        column = at * BLOCK + tl.arange(0, BLOCK)
        tl.store(to + column, tl.load(source + column))


class Rig:
    """The graph on the model's stream, a stream beside it, and 32 MiB on the device and the host."""

    def __init__(self) -> None:
        self.model, self.side = torch.cuda.Stream(), torch.cuda.Stream()
        self.rows = torch.zeros(32 * _MIB // 8, dtype=torch.int64, device="cuda")
        self.other = torch.zeros_like(self.rows)
        self.host = torch.zeros(32 * _MIB // 8, dtype=torch.int64, pin_memory=True)
        x = torch.zeros(_MIB, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.model):
            x.add_(1)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.model):
                for _ in range(_KERNELS):
                    x.add_(1)

    def replay(self, beside: Callable[[], object] = lambda: None) -> float:
        """us of a replay; `beside` begins together with it."""
        times: list[float] = []
        with torch.cuda.stream(self.model):
            for _ in range(_REPLAYS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.graph.replay()
                begin.record(self.model)
                beside()
                self.graph.replay()
                end.record(self.model)
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times)

    def copies(self) -> None:
        with torch.cuda.stream(self.side):
            for at in range(0, len(self.host), _MIB // 4):
                piece = slice(at, at + _MIB // 4)
                self.host[piece].copy_(self.rows[piece], non_blocking=True)

    def kernel(self, to: torch.Tensor) -> None:
        with torch.cuda.stream(self.side):
            move[(2,)](self.rows, to, len(to) // 4096, BLOCK=4096, num_warps=16)


def main() -> None:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was tried")
        return
    rig = Rig()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a graph of {_KERNELS} kernels")
    print(f"{'':34}{'beside':>10}" + "".join(f"{f'{after:g} s after':>14}" for after in _AFTER_S))
    print(f"{'alone':34}{rig.replay():10.1f}")
    ways: dict[str, Callable[[], object]] = {
        "copies of 2 MiB to the host": rig.copies,
        "a kernel of 2 blocks, on the device": lambda: rig.kernel(rig.other),
        "a kernel of 2 blocks, to the host": lambda: rig.kernel(rig.host),
    }
    for name, beside in ways.items():
        line = f"{name:34}{rig.replay(beside):10.1f}"
        for after in _AFTER_S:
            time.sleep(after)
            line += f"{rig.replay():14.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
