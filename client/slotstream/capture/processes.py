"""The engine and the server that a capture starts for itself, and that end with it, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slotstream.client import ServerUnavailable, connect
from slotstream.demo.processes import Running, connector_options, free_port, healthy, vllm_command

_UP_S, _ENGINE_UP_S = 60.0, 3600.0  # A large model takes long to load.
# The kernel tells a child that its parent died, also where that was killed. The call outlives the exec.
_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[1]), 0, 0, 0); "
    "os.getppid() == int(sys.argv[2]) or sys.exit(1); os.execvp(sys.argv[3], sys.argv[3:])"
)


def _with_parent(number: signal.Signals, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", _WITH_PARENT, str(int(number)), str(os.getpid()), *command]


@contextlib.contextmanager
def server(data: Path, log: Path) -> Iterator[str]:
    """`slotstream serve` on `data`, up; its address, a private socket. Raises ProcessFailed."""
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slotstream-") as folder:
        address = f"unix:{folder}/s"
        command = [sys.executable, "-m", "slotstream.cli.main", "serve", "--listen", address, "--data", str(data)]
        # Killed, it loses nothing that it acknowledged, and the next run finds the folder free.
        with Running("slotstream serve", _with_parent(signal.SIGKILL, command), log) as running:
            running.wait_until(lambda: _answers(address), _UP_S)
            yield address


def _answers(address: str) -> bool:
    try:
        with connect(address, connect_timeout_s=0.5):
            return True
    except ServerUnavailable:
        return False


@contextlib.contextmanager
def engine(model: str, address: str, layers: Any, options: Sequence[str], log: Path) -> Iterator[str]:
    """vLLM serving `model` with a connector to the server at `address`, up; its URL. Raises ProcessFailed."""
    port = free_port()
    command = [*vllm_command(model, port), *connector_options(server=address, layers=layers), *options]
    with vllm(command, port, log):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def vllm(
    command: Sequence[str], port: int, log: Path, up_s: float = _ENGINE_UP_S, waiting: Callable[[], None] = lambda: None
) -> Iterator[Running]:
    """vLLM's own command, up on 127.0.0.1:`port`; `waiting` is called until it is. Raises ProcessFailed."""

    def up() -> bool:
        waiting()
        return healthy(port)

    with Running("vLLM", _with_parent(signal.SIGTERM, command), log) as running:
        running.wait_until(up, up_s)
        yield running
