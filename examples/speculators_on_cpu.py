"""`python examples/speculators_on_cpu.py train ...`: `... integrations.speculators train` on a machine without an accelerator.

speculators wants one. What it asks of an accelerator is answered here with the processor: enough for a small draft.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from slotstream.integrations.speculators.__main__ import main

# All that a small draft needs to train on a CPU, always the same way.
ARGUMENTS = (
    *("--draft-attn-impl", "eager", "--loss-implementation", "eager", "--num-workers", "0", "--seed", "7"),
    *("--speculator-type", "eagle3"),
)


def patch() -> None:
    """To be called before speculators is imported."""
    from slotstream.integrations.speculators import backend  # Before speculators reads who is registered.

    assert backend.NAME
    import speculators.train.trainer as trainer
    from torch.utils.data import DataLoader

    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.current_accelerator = lambda check_available=False: None if check_available else torch.device("cpu")
    torch.accelerator.is_available = lambda: False
    made = DataLoader.__init__

    def without_pinning(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **{**options, "pin_memory": False})

    setattr(DataLoader, "__init__", without_pinning)  # noqa: B010  (a method)


def run(command: str, *words: str) -> int:
    """The exit code."""
    patch()
    return main([command, *ARGUMENTS, *words])


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
