"""Contenders of the online benchmark: `vllm serve` in processes of its own, and the `slotstream serve` that it sends to."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from children import changed_environment, family, tasks
from machine import of_same_core

from slotstream.client import SampleState, connect
from slotstream.demo.processes import Running, connector_options, free_port, start_server, vllm_command

_BENCHMARKS = Path(__file__).parent
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_START_S, _STORE_S, _ANSWER_S, _STOP_S = 400.0, 60.0, 60.0, 10.0
_CAPTURE_SIZES = [1, 2, 4, *range(8, 129, 8)]
BEFORE = "-before"
_SECOND = "none2"
AGAIN = "again"
"""Not an engine: the one without capture takes a second turn."""
# Kind of contender -> connector options. Everything is captured, output rows too, but by "idle": no request asks it to.
_KINDS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "nixl": {"transport": "nixl"},
    "grpc": {"transport": "grpc"},
    "nixl-idle": {"transport": "nixl", "capture": False},
    "grpc-idle": {"transport": "grpc", "capture": False},
    "nixl-thread": {"transport": "nixl", "sender": "thread"},
    "grpc-thread": {"transport": "grpc", "sender": "thread"},
}
NAMES = (*_KINDS, _SECOND)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all engines of a run share."""

    model: Path
    tiny: bool
    layers: tuple[int, ...]
    kv_cache_bytes: int
    step_tokens: int
    work: Path
    data: Path
    before: Path | None
    """An older slotstream: its checkout, or an export of one."""


def known(name: str) -> bool:
    """Whether a contender has this name."""
    return name.removesuffix(BEFORE) in NAMES or name == AGAIN


def needs_before(name: str) -> bool:
    return name.endswith(BEFORE)


class Contender:
    """One vLLM, with a server beside it where it captures. Starting takes a while: `start`, then `wait_ready`."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self._setting = setting
        self._connector = _KINDS[name.removesuffix(BEFORE).replace(_SECOND, "none")]
        self._stack = ExitStack()
        self.port = free_port()
        self.server: str | None = None
        self._processes: list[tuple[str, Running]] = []

    @property
    def captures(self) -> bool:
        """Whether requests that say nothing are captured."""
        return self._connector is not None and bool(self._connector.get("capture", True))

    def start(self) -> None:
        setting = self._setting
        environment = {"PYTHONPATH": self._path(), "VLLM_SERVER_DEV_MODE": "1"}  # For the RPC that asks for the notes.
        options: list[str] = []
        if self._connector is not None:
            port = free_port()
            with changed_environment(environment):
                server = start_server(setting.data / self.name, setting.work / f"{self.name}-server.log", port)
            self._keep("server", server)
            self.server = f"127.0.0.1:{port}"
            extra = {"layers": list(setting.layers), "server": self.server, "include_output_tokens": True, **self._connector}
            options = connector_options("TimedConnector", "timed_connector", **extra)
        command = [*vllm_command(setting.model, self.port), *_engine_options(setting), *options]
        log = setting.work / f"{self.name}.log"
        self._keep("engine", Running(f"vLLM ({self.name})", command, log, environment))

    def _keep(self, part: str, running: Running) -> None:
        self._processes.append((part, running))
        self._stack.callback(running.stop, _STOP_S)

    def wait_ready(self) -> None:
        """Return once it serves. Raises ProcessFailed."""
        _, engine = self._processes[-1]
        engine.wait_until(lambda: _healthy(self.port), _START_S)

    def _path(self) -> str:
        """PYTHONPATH: an older slotstream comes before the one that runs this."""
        roots: list[Path] = []
        if needs_before(self.name):
            assert self._setting.before is not None, "checked with the options"
            parts = ("client", "connector", "server", "proto")
            roots = [self._setting.before / part for part in parts if (self._setting.before / part / "slotstream").is_dir()]
        return os.pathsep.join([*map(str, roots), str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])

    def ask(self, method: str) -> dict[str, Any]:
        """Call a method of online_watch.Watch in the engine's process."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/collective_rpc",
            data=json.dumps({"method": method}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            found: dict[str, Any] = json.load(answer)["results"][0]
            return found

    def pin(self, core: int, cores: Iterable[int]) -> None:
        """Have the engine's own thread alone on `core`, of these `cores`: all others of the benchmark leave it.

        They leave the other hardware thread of that core, too.
        """
        others = set(cores) - of_same_core(core) or {core}
        for pid in family(os.getpid()):
            for task in tasks(pid):
                with contextlib.suppress(ProcessLookupError):  # It ended meanwhile.
                    os.sched_setaffinity(int(task.name), others)
        _, engine = self._processes[-1]
        for pid in family(engine.process.pid):
            if _process_name(pid) == "EngineCore":
                os.sched_setaffinity(pid, {core})  # Of the thread of that number, which is the main one.

    def cpu(self) -> dict[str, float]:
        """Seconds of processor so far, by part, process and thread."""
        total: dict[str, float] = {}
        for part, running in self._processes:
            for name, seconds in _threads(running.process.pid):
                total[f"{part}/{name}"] = total.get(f"{part}/{name}", 0.0) + seconds
        return total

    def forget_samples(self) -> dict[str, int]:
        """Wait until every sample has ended, count and delete them. Not measured."""
        if self.server is None:
            return {}
        deadline = time.monotonic() + _STORE_S
        with connect(self.server) as client:
            while any(True for _ in client.list(state=SampleState.ARRIVING, limit=1)) and time.monotonic() < deadline:
                time.sleep(0.01)
            counts: dict[str, int] = {}
            found = list(client.list())
            for info in found:
                counts[str(info.state)] = counts.get(str(info.state), 0) + 1
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(client.delete, [info.sample_id for info in found]))
        return counts

    def close(self) -> None:
        self._stack.close()


def _engine_options(setting: Setting) -> list[str]:
    options = ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "4096"]
    options += ["--max-num-batched-tokens", str(setting.step_tokens), "--max-num-seqs", "128", "--no-enable-prefix-caching"]
    options += ["--kv-cache-memory-bytes", str(setting.kv_cache_bytes), "--worker-extension-cls", "online_watch.Watch"]
    options += ["--disable-uvicorn-access-log"]
    if setting.tiny:  # vLLM's CPU build would put its worker into a process of its own; on a GPU it is in the engine's.
        options += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
        return [*options, "--enforce-eager", "--block-size", "32", "--gpu-memory-utilization", "0.05"]
    sizes = json.dumps({"cudagraph_capture_sizes": _CAPTURE_SIZES})
    return [*options, "--gpu-memory-utilization", "0.1", "--compilation-config", sizes]


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _threads(pid: int) -> list[tuple[str, float]]:
    """(process and thread, seconds of processor) of a process and all that it started. Threads that ended are left out."""
    found: list[tuple[str, float]] = []
    for one in family(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It ended meanwhile.
            process = _process_name(one)
            for task in Path(f"/proc/{one}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # So did a thread.
                    head, _, rest = (task / "stat").read_text().rpartition(")")
                    fields = rest.split()
                    thread = "main" if task.name == str(one) else head.partition("(")[2]
                    found.append((f"{process}/{thread}", (int(fields[11]) + int(fields[12])) / _TICKS_PER_S))
    return found


def _process_name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    modules = [after for word, after in itertools.pairwise(words) if word == "-m"]
    if modules:
        return "sender" if "sending" in modules[0] else "front end" if "vllm" in modules[0] else "serve"
    if any("resource_tracker" in word for word in words):
        return "tracker"
    return words[0].partition("::")[2] or ("front end" if any("vllm" in word for word in words[:2]) else Path(words[0]).name)


def start(names: Sequence[str], setting: Setting, stack: ExitStack) -> dict[str, Contender]:
    """Contenders by name, started at the same time and not ready yet; `stack` will close them. Raises ProcessFailed."""
    contenders = {name: Contender(name, setting) for name in names}
    stack.callback(_close_all, list(contenders.values()))
    for contender in contenders.values():
        contender.start()
    return contenders


def _close_all(contenders: Sequence[Contender]) -> None:
    if contenders:
        with ThreadPoolExecutor(len(contenders)) as pool:
            list(pool.map(Contender.close, contenders))
