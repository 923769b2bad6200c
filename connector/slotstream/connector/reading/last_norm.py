"""The last norm of a loaded model: layer L is the row before it, "final" the row after it. Trainers may have to apply it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import torch

FINAL_NORM_KEY = "final_norm"  # In a sample's metadata.
_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # As vLLM's norms call it, torch's, and others.


def describe_last_norm(model: torch.nn.Module, num_layers: int) -> str | None:
    """Its class and epsilon as JSON, `{"class": "RMSNorm", "epsilon": 1e-06}`; None where the model does not show which."""
    try:
        return _described(model, num_layers)
    except Exception:  # A model's attributes may do anything, and an engine must not stop for what is only told.
        return None


def _described(model: torch.nn.Module, num_layers: int) -> str | None:
    found = {json.dumps({"class": type(norm).__name__, "epsilon": epsilon}) for norm, epsilon in _last_norms(model, num_layers)}
    return found.pop() if len(found) == 1 else None


def _last_norms(model: torch.nn.Module, num_layers: int) -> Iterator[tuple[torch.nn.Module, float]]:
    """Norms that stand behind a list of all layers, in the module that has the list. Of several parts, the text's counts."""
    text = model
    with contextlib.suppress(Exception):  # Not every model of several parts says which one that is.
        named = model.get_language_model()  # type: ignore[operator]
        text = named if isinstance(named, torch.nn.Module) else model
    for owner in text.modules():
        behind = False
        for child in owner.children():
            if isinstance(child, torch.nn.ModuleList):
                behind = behind or len(child) == num_layers
                continue
            epsilon = next((value for name in _EPSILONS if (value := getattr(child, name, None)) is not None), None)
            if behind and isinstance(epsilon, float):
                yield child, epsilon
