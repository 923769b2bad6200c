"""Offline inference in a process of its own, step for step the same each time: vLLM's engine core runs in it too.

Run as a script it reads what to do from the file that it is given, and prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.demo.processes import SMALL_ENGINE_ENV

_SAID = "SAID "
_UNCAPTURED = {"kv_transfer_params": {"slotstream": {"capture": False}}}
# Without prefix caching and with as many blocks in every run, nothing but the capture differs between two of them.
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 600,
    "disable_log_stats": False,
    "seed": 0,
}


@dataclass(frozen=True, slots=True)
class Generated:
    """What a run gave: the tokens of each prompt, vLLM's counts of drafts, and all that it logged."""

    texts: list[list[int]]
    drafts: dict[str, float]
    log: str


def capture(server: str, layers: Sequence[int | str], **options: Any) -> dict[str, Any]:
    """The engine's arguments that capture `layers` to the server at `server`."""
    transfer = {
        "kv_connector": "SlotStreamConnector",
        "kv_connector_module_path": "slotstream.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"server": server, "layers": list(layers), **options},
    }
    return {"kv_transfer_config": transfer}


def generate(work: Path, model: Path, prompts: Sequence[list[int]], max_tokens: int, **how: Any) -> Generated:
    """Greedy texts of exactly `max_tokens` tokens. `how`: see `_run`."""
    ended, log = _run(work, model, prompts, max_tokens, **how)
    assert ended.returncode == 0, log[-4000:]
    said = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith(_SAID))[len(_SAID) :])
    return Generated(said["texts"], said["drafts"], log)


def refusal(work: Path, model: Path, **how: Any) -> str:
    """The log of an engine that does not start. `how`: see `_run`."""
    ended, log = _run(work, model, [], 1, **how)
    assert ended.returncode != 0, log[-4000:]
    return log


def cache_root(work: Path) -> Path:
    """A root of vLLM's caches below `work`. What it knows of its model classes is shared: finding out takes another start."""
    known = Path("~/.cache/vllm/modelinfos").expanduser()
    known.mkdir(parents=True, exist_ok=True)
    root = work / "cache"
    root.mkdir()
    (root / "modelinfos").symlink_to(known)
    return root


def _run(
    work: Path,
    model: Path,
    prompts: Sequence[list[int]],
    max_tokens: int,
    *,
    params: Sequence[dict[str, Any]] | None = None,
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = 900.0,
    **engine: Any,
) -> tuple[subprocess.CompletedProcess[str], str]:
    """A run that has ended, and its log.

    `params` are the prompts' own for slotstream, `engine` vLLM's arguments beside ENGINE. `work` is made, and holds vLLM's
    caches. `env` is added to this process's; None takes a variable out.
    """
    work.mkdir()
    asked = {
        "engine": {"model": str(model), **ENGINE, **engine},
        "prompts": list(prompts),
        "max_tokens": max_tokens,
        "extra": [{"kv_transfer_params": {"slotstream": own}} for own in params] if params else None,
    }
    (work / "asked.json").write_text(json.dumps(asked))
    tests = str(Path(__file__).resolve().parents[1])
    paths = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    chosen: dict[str, str | None] = {
        **os.environ,
        **SMALL_ENGINE_ENV,
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_CACHE_ROOT": str(cache_root(work)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **(env or {}),
    }
    environment = {name: value for name, value in chosen.items() if value is not None}
    command = [sys.executable, "-m", "support.offline", str(work / "asked.json")]
    ended = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    log = ended.stdout + ended.stderr
    (work / "vllm.log").write_text(log)
    return ended, log


def _main() -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**asked["engine"])
    extra = asked["extra"] or [None] * len(asked["prompts"])
    params = [
        SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True, extra_args=one or {}) for one in extra
    ]
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], params, use_tqdm=False)
    # The last rows of an output are read one step after it ended: an engine core in a process of its own makes that step.
    llm.generate({"prompt_token_ids": [2]}, SamplingParams(max_tokens=1, extra_args=_UNCAPTURED), use_tqdm=False)
    drafts = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    said = {"texts": [list(answer.outputs[0].token_ids) for answer in answers], "drafts": drafts}
    print(_SAID + json.dumps(said), flush=True)


if __name__ == "__main__":
    _main()
