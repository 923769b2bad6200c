"""`... integrations.speculators train` on a machine without an accelerator, for tests: speculators wants one."""

from __future__ import annotations

import sys
from typing import Any

import torch

from slotstream.integrations.speculators.__main__ import main

# All that a small draft needs to train on a CPU, always the same way.
ARGUMENTS = [
    *("--draft-attn-impl", "eager", "--loss-implementation", "eager", "--num-workers", "0", "--seed", "7"),
    *("--speculator-type", "eagle3", "--num-layers", "1", "--lr", "1e-3", "--total-seq-len", "256", "--ttt-steps", "2"),
]


def patch() -> None:
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


if __name__ == "__main__":
    patch()
    torch.set_num_threads(1)
    sys.exit(main(["train", *ARGUMENTS, *sys.argv[1:]]))
