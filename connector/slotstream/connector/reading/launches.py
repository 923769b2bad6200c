"""Triton kernels that are launched in every step, without Triton's own look-up of what to run by the arguments.

On one H100's host that takes 11 us, and the look-up 33. Seen with Triton 3.6 and 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

Grid = tuple[int, int, int]


class Launches:
    """Of one kernel, which `make` builds: Triton is imported there, and comes with torch for CUDA."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._kernel: Any = None
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable | None, grid: Grid, *arguments: Any) -> None:
        """Launch on the current stream. The arguments are the kernel's, in its order.

        Arguments of one `key` are of the same types, their tensors' memory is aligned to 16 bytes, and what the kernel wants to
        know at compile time is the same: what its first launch compiled is right for all. None: Triton looks.
        """
        compiled = None if key is None else self._compiled.get(key)
        if compiled is not None:
            stream = torch.cuda.current_stream().cuda_stream
            compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
            return
        if self._kernel is None:
            self._kernel = self._make()
        compiled = self._kernel[grid](*arguments)  # None in Triton's interpreter.
        if key is not None:
            self._compiled[key] = compiled
