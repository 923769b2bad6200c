"""`python -m slotstream.integrations.speculators train|launch`: speculators' own commands, with rows out of a store."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

_USAGE = """\
usage: python -m slotstream.integrations.speculators train [arguments of `speculators train`] [--slotstream-server ADDR ...]
       python -m slotstream.integrations.speculators launch MODEL [--slotstream-server ADDR ...] [-- flags of `vllm serve`]

train: trains with --hidden-states-backend slotstream. launch: starts vLLM with a connector that online training can read from.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words.pop(0) if words else ""
    if command == "train":
        return train(words)
    if command == "launch":
        return launch(words)
    print(_USAGE, end="", file=sys.stdout if command in ("-h", "--help") else sys.stderr)
    return 0 if command in ("-h", "--help") else 2


def train(words: Sequence[str]) -> int:
    """`speculators train` with our backend, which it must know before it reads its arguments."""
    name = _registered()
    from speculators.train.cli import main as run
    from speculators.train.config import TrainConfig

    given = any(word == "--hidden-states-backend" or word.startswith("--hidden-states-backend=") for word in words)
    chosen = [] if given else ["--hidden-states-backend", name]
    run(TrainConfig.resolve([*words, *chosen]))
    return 0


def _registered() -> str:
    from slotstream.integrations.speculators.backend import NAME

    return NAME


def launch(words: Sequence[str]) -> int:
    """vLLM in place of this process."""
    command = launch_command(words)
    os.execvp(command[0], command)


def launch_command(words: Sequence[str]) -> list[str]:
    """What starts vLLM's server with our connector."""
    from slotstream.integrations.speculators.backend import SlotStreamBackend

    at = list(words).index("--") if "--" in words else len(words)
    own, flags = words[:at], words[at + 1 :]
    parser = argparse.ArgumentParser(prog="python -m slotstream.integrations.speculators launch")
    parser.add_argument("model", help="the verifier, as speculators' --verifier-name-or-path has it")
    SlotStreamBackend.add_launch_args(parser)
    args = parser.parse_args(own)
    config = json.dumps(SlotStreamBackend.build_kv_transfer_config(args))
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
    # speculators asks for the model by the name that it was given.
    return [*server, "--served-model-name", args.model, "--kv-transfer-config", config, *flags]


if __name__ == "__main__":
    sys.exit(main())
