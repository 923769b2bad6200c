"""What the scripts of this folder share: an engine's arguments, a process of its own for it, a server, the command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.demo.processes import Running, free_port, start_server

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))  # For the scripts: each imports this module before `support`.
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_FOUND = "CELL "
_KILL_S = 5.0  # That an engine has to end by itself once the time is over.


# An engine's arguments.


def small(**options: Any) -> dict[str, Any]:
    """Of an engine that shares its GPU with others and a small model. `options` come on top; None is vLLM's own default."""
    shared = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "gpu_memory_utilization": 0.08,
        "kv_cache_memory_bytes": 1 << 30,  # Profiling would take what another engine frees meanwhile for its own.
    }
    return {**shared, **options}


def on_a_cpu(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same engine where there is no GPU to share."""
    return {**options, "block_size": 32, "gpu_memory_utilization": None}


def slotstream(server: str, **options: Any) -> dict[str, Any]:
    """The connector, as vLLM's `kv_transfer_config`."""
    return {
        "kv_connector": "SlotStreamConnector",
        "kv_connector_module_path": "slotstream.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"server": server, **options},
    }


def example(directory: Path, **options: Any) -> dict[str, Any]:
    """vLLM's own connector for hidden states, likewise. It writes below `directory`."""
    written = {"kv_connector_extra_config": {"shared_storage_path": str(directory)}}
    return {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer", **written, **options}


def extraction(layer_ids: Sequence[int]) -> dict[str, Any]:
    """The arguments that make vLLM extract these layers itself."""
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    return {"speculative_config": {**method, "draft_model_config": layers}}


def of_kind(kind: str) -> dict[str, Any]:
    """What a kind of truth model asks for: on Hopper vLLM would take other kernels; Triton's run on every GPU."""
    return {
        "gdn": {"additional_config": {"gdn_prefill_backend": "triton"}},
        "mla": {"attention_config": {"backend": "TRITON_MLA"}},
    }.get(kind, {})


def graphs(mode: str = "", sizes: Sequence[int] = GRAPH_SIZES) -> dict[str, Any]:
    """CUDA graphs of these batch sizes. `mode`: vLLM's name of one, or its own choice."""
    return {"compilation_config": {"cudagraph_capture_sizes": list(sizes)} | ({"cudagraph_mode": mode} if mode else {})}


def flags(options: Mapping[str, Any]) -> list[str]:
    """The same arguments for `vllm serve`."""
    said = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            said.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            said.append(f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return said


def runner_env(runner: int) -> dict[str, str]:
    """The environment of an engine with vLLM's model runner 1 or 2."""
    return {"VLLM_USE_V2_MODEL_RUNNER": str(runner - 1), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def make(model: str, options: Mapping[str, Any]) -> Any:
    """vLLM's `LLM`, without the arguments that are None."""
    from vllm import LLM

    return LLM(model, **{name: value for name, value in options.items() if value is not None})


def sampling(params: Mapping[str, Any], max_tokens: int, temperature: float = 0.0) -> Any:
    """vLLM's SamplingParams of exactly `max_tokens` tokens. `params`: the request's `kv_transfer_params`."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": dict(params)},
    )


def generate(engine: Any, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
    """vLLM's answers, after one step more: it sends the last rows of the outputs, and a batch engine makes none by itself."""
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], list(params), use_tqdm=False)
    engine.generate([{"prompt_token_ids": [5, 6, 7]}], sampling({"slotstream": {"capture": False}}, 4), use_tqdm=False)
    return list(answers)


# Processes.


def run_script(script: str, *arguments: str, log: Path, runner: int, timeout_s: float, **env: str) -> int | None:
    """Run a script in a process of its own, its output in `log`; the exit status, None when the time was over."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    chosen = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **runner_env(runner), **env}
    with log.open("w") as out, contextlib.suppress(subprocess.TimeoutExpired):
        command = [sys.executable, script, *arguments]
        return subprocess.run(command, stdout=out, stderr=out, env=chosen, timeout=timeout_s, check=False).returncode
    return None


def tell(about: Mapping[str, Any], check: Callable[[], Mapping[str, Any]]) -> int:
    """In such a process: print what `check` found, or why it found nothing, as one line for `found_in`; the exit status."""
    import torch
    import vllm

    began = time.monotonic()
    try:
        found = dict(check())
    except Exception as error:
        traceback.print_exc()
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        found = {"rows": 0, "wrong": 0, "problems": [problem]}
    found |= {"vllm": vllm.__version__, "torch": torch.__version__, "seconds": round(time.monotonic() - began)}
    print(_FOUND + json.dumps({**about, **found}), flush=True)
    return 0 if is_green(found) else 1


def found_in(log: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What a process told, or that it told nothing."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(_FOUND)]
    if lines:
        found: dict[str, Any] = json.loads(lines[-1].removeprefix(_FOUND))
        return found
    return {**about, "rows": 0, "wrong": 0, "problems": ["the engine did not finish"]}


def is_green(found: Mapping[str, Any]) -> bool:
    return bool(found["rows"] and not found["wrong"] and not found["problems"])


# A script.


def command_line(about: str | None, *, only: str = "", on_cpu: str = "", at_once: int = 0) -> argparse.ArgumentParser:
    """The options that the scripts have in common. `only`: what is chosen by name; `on_cpu`: what that does."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if at_once:
        what = "engines that share a GPU at a time (default: %(default)s)"
        parser.add_argument("--at-once", type=int, default=at_once, help=what)
    if only:
        what = f"only {only} whose name contains TEXT"
        parser.add_argument("--only", action="append", default=[], metavar="TEXT", help=what)
    parser.add_argument("--logs", type=Path, default=None, help="keep the engines' logs here")
    if on_cpu:
        parser.add_argument("--on-cpu", action="store_true", help=on_cpu)
    return parser


def is_chosen(name: str, only: Sequence[str]) -> bool:
    """Whether `--only` takes it."""
    return not only or any(text in name for text in only)


def has_gpus(count: int = 1) -> bool:
    """Whether there are so many; says so where not."""
    import torch

    if torch.cuda.device_count() >= count:
        return True
    print(f"not {count} GPUs here: nothing to run" if count > 1 else "no GPU here: nothing to run")
    return False


class Deadline:
    """When a script has to end: `for_s` seconds from now, or never. What runs then is stopped."""

    def __init__(self, for_s: float = math.inf) -> None:
        self._ends_at = time.monotonic() + for_s
        self._lock = threading.Lock()
        self._running: set[Running] = set()
        self._timer = threading.Timer(for_s, self.end) if math.isfinite(for_s) else None
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def left_s(self) -> float:
        """Seconds, 0 once it is over."""
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return not self.left_s()

    @contextlib.contextmanager
    def ends(self, running: Running) -> Iterator[None]:
        """A process of this block is stopped when the time is over."""
        with self._lock:
            self._running.add(running)
        if self.is_over:
            running.stop(_KILL_S)
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(running)

    def end(self) -> None:
        """It is over now."""
        self._ends_at = min(self._ends_at, time.monotonic())
        with self._lock:
            left = list(self._running)
        for running in left:
            running.process.terminate()
        for running in left:
            running.stop(_KILL_S)

    def close(self) -> None:
        """The script ends by itself."""
        if self._timer is not None:
            self._timer.cancel()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a script works: a directory that goes, one for logs, the address of a running server, and until when."""

    work: Path
    logs: Path
    server: str
    time: Deadline


@contextlib.contextmanager
def place(logs: Path | None, for_s: float = math.inf) -> Iterator[Place]:
    """A server that runs until the block ends. `logs`: where they stay. `for_s`: see `Deadline`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: no process stays behind.
    with tempfile.TemporaryDirectory(prefix="slotstream-gpu-") as scratch:
        work = Path(scratch)
        kept = logs.absolute() if logs is not None else work
        kept.mkdir(parents=True, exist_ok=True)
        port = free_port()
        with (
            start_server(work / "data", kept / "server.log", port),
            contextlib.closing(Deadline(for_s)) as deadline,
        ):
            yield Place(work, kept, f"127.0.0.1:{port}", deadline)
