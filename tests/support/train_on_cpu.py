"""`... integrations.speculators train` on a machine without an accelerator, with what the tests' small drafts need."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ARGUMENTS = ["--num-layers", "1", "--lr", "1e-3", "--total-seq-len", "256", "--ttt-steps", "2"]

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import speculators_on_cpu

    torch.set_num_threads(1)
    sys.exit(speculators_on_cpu.run("train", *ARGUMENTS, *sys.argv[1:]))
