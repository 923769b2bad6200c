"""The options of `slotstream demo`, without what a demo needs: its help is shown where torch is not installed."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `slotstream demo`."""
    parser.add_argument("--requests", type=int, default=12, help="completions to send (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: %(default)s)")
    parser.add_argument(
        "--stay",
        action="store_true",
        help="leave server and vLLM running after the check, until Ctrl-C, and say how to use them",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep model, samples and logs in DIR, which must not exist")
