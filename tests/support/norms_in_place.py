"""Norms that add to their residual in place on the CPU too, as vLLM's CUDA norms do: `worker_extension_cls` of an engine."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.layernorm import RMSNorm


class NormsInPlace:
    """Mixed into vLLM's worker; importing this module is what counts."""


_plain = RMSNorm.forward_native


def _in_place(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    if residual is None:
        return _plain(self, x)
    normed, total = _plain(self, x, residual)
    return x.copy_(normed), residual.copy_(total)


setattr(RMSNorm, "forward_cpu", _in_place)  # noqa: B010  (mypy: a method is no variable)
