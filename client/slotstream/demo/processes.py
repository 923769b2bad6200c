"""Real processes for the demo and the end-to-end tests: a storage server, and vLLM's OpenAI server with the connector."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

POLL_S = 0.1
STOP_S = 30.0


class ProcessFailed(RuntimeError):
    """A process ended, or did not come up; the message ends with the tail of its log."""


class Running:
    """A child process with its output in a file; leaving the `with` block stops it, and all that it started."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                list(command),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**_inherited(), **(env or {})},
                start_new_session=True,  # So that a signal to its group reaches vLLM's engine and workers too.
            )

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Return once `ready()`. Raises ProcessFailed when the process ends first or the time passes."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.check_alive()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self.name} was not ready after {timeout_s:.0f} s:\n{self.tail()}")
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raises ProcessFailed when the process has ended."""
        if self.process.poll() is not None:
            raise ProcessFailed(f"{self.name} exited with {self.process.returncode}:\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout_s: float = STOP_S) -> int:
        """SIGTERM, then SIGKILL for what is left of its process group; returns the exit status."""
        try:
            if self.process.poll() is None:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout_s)
        finally:  # Also after a second Ctrl-C.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _inherited() -> dict[str, str]:
    """This process's environment, but for what is about the user's own server and its service manager."""
    return {k: v for k, v in os.environ.items() if not k.startswith("SLOTSTREAM_SERVE_") and k != "NOTIFY_SOCKET"}


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    """Whether somebody accepts connections on 127.0.0.1:`port`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False


def start_server(data: Path, log: Path, port: int, *options: str) -> Running:
    """`slotstream serve` on 127.0.0.1:`port`, up and listening."""
    command = [sys.executable, "-m", "slotstream.cli.main", "serve", "--listen", f"127.0.0.1:{port}", "--data", str(data)]
    server = Running("slotstream serve", [*command, *options], log)
    try:
        server.wait_until(lambda: listening(port), 30.0)
    except BaseException:  # Also when this process is told to end: nobody else knows of the child yet.
        server.stop()
        raise
    return server


def vllm_command(model: Path | str, port: int) -> list[str]:
    """vLLM's OpenAI server; the CPU distribution has no working `vllm` command, its module does the same."""
    script = Path(sys.executable).with_name("vllm")
    try:
        importlib.metadata.version("vllm")
        works = script.exists()  # Not where vLLM was unpacked and not installed.
    except importlib.metadata.PackageNotFoundError:
        works = False
    if works:
        command = [str(script), "serve", str(model)]
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [*command, "--host", "127.0.0.1", "--port", str(port)]


def extraction_options(layer_ids: Sequence[int]) -> list[str]:
    """The vLLM option that extracts these layers."""
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}}
    config = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}
    return ["--speculative-config", json.dumps(config)]


def connector_options(name: str = "SlotStreamConnector", module: str = "slotstream.connector", **extra: Any) -> list[str]:
    """The vLLM option that loads the connector (or a subclass of it) with these options."""
    config = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    return ["--kv-transfer-config", json.dumps(config)]


# A tiny model on a CPU: starts in about half a minute, and cuts prompts into steps of 64 tokens.
SMALL_ENGINE = (
    "--enforce-eager",
    "--block-size=32",
    "--max-model-len=1024",
    "--max-num-batched-tokens=64",
    "--max-num-seqs=16",
    "--enable-prefix-caching",
)
SMALL_ENGINE_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def start_vllm(
    model: Path, log: Path, port: int, *options: str, env: Mapping[str, str] | None = None, timeout_s: float = 480.0
) -> Running:
    """vLLM serving `model` on 127.0.0.1:`port`, up and healthy; `env` is added to this process's."""
    engine = Running("vLLM", [*vllm_command(model, port), *options], log, {**SMALL_ENGINE_ENV, **(env or {})})
    try:
        engine.wait_until(lambda: healthy(port), timeout_s)
    except BaseException:  # Also when this process is told to end: nobody else knows of the child yet.
        engine.stop()
        raise
    return engine


def open_here(request: urllib.request.Request | str, timeout_s: float) -> Any:
    """As `urlopen`, for this machine: through no proxy of the environment's, which would look for 127.0.0.1 on its own."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s)


def healthy(port: int) -> bool:
    """Whether vLLM serves on 127.0.0.1:`port`."""
    try:
        with open_here(f"http://127.0.0.1:{port}/health", 2.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def complete(port: int, body: Mapping[str, Any], timeout_s: float = 300.0) -> dict[str, Any]:
    """POST `body` to vLLM's /v1/completions; returns its JSON answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with open_here(request, timeout_s) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed
