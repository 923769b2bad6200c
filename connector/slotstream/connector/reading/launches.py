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
        self._compiled: dict[Hashable, tuple[Any, Any, Any]] = {}

    def knows(self, key: Hashable | None) -> bool:
        """Whether the kernel is compiled for such arguments: then tensors may be given as addresses, which costs less."""
        return key in self._compiled

    def __call__(self, key: Hashable | None, grid: Grid, *arguments: Any) -> None:
        """Launch on the current stream. The arguments are the kernel's, in its order.

        Arguments of one `key` are of the same types, their tensors' memory is aligned to 16 bytes, and what the kernel wants to
        know at compile time is the same: what its first launch compiled is right for all. None: Triton looks.
        """
        if key in self._compiled:
            run, function, metadata = self._compiled[key]
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            run(*grid, stream, function, metadata, None, None, None, *arguments)
            return
        if self._kernel is None:
            self._kernel = self._make()
        compiled = self._kernel[grid](*arguments)
        if key is not None and compiled is not None:  # None in Triton's interpreter.
            self._compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata)
