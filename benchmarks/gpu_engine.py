"""One vLLM engine of the GPU benchmark, in a process of its own: told what to run on stdin, it answers on stdout.

Every line is JSON; answers begin with RESULT, so that vLLM's own output can go between them.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from gpu_readers import WAIT_S, Readers

from slotstream.client import Client, SampleInfo, SampleNotFound, SampleState, connect

_OURS = ("direct", "extraction", "dropped")
_WATCHED_EVERY = 8  # One sample in so many has a reader that waits for it from the start.


def make_engine(options: dict[str, Any]) -> Any:
    """vLLM, with the connector that `options` names."""
    from vllm import LLM

    kind = options["kind"]
    more: dict[str, Any] = {}
    if kind in ("extraction", "example"):
        more["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": options["layers"]}},
        }
    if kind == "example":
        more["kv_transfer_config"] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": options["shared"]},
        }
    elif kind != "none":
        ours = {"server": options["server"], "staging_bytes": options["staging_bytes"], "capture": False}
        ours["chunk_bytes"] = options["chunk_bytes"]
        if kind != "extraction":
            ours["layers"] = options["layers"]
        more["kv_transfer_config"] = {
            "kv_connector": "DroppingConnector" if kind == "dropped" else "SlotStreamConnector",
            "kv_connector_module_path": "dropping_connector" if kind == "dropped" else "slotstream.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": ours | options["connector"],
        }
    return LLM(
        options["model"],
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_batched_tokens=options["step_tokens"],
        max_num_seqs=128,
        worker_extension_cls="gpu_ranks.Ranks",
        enable_prefix_caching=True,  # A KV connector makes vLLM hash blocks with it and without; no prompt here ever hits.
        **more,
        **options["engine"],
    )


class Runner:
    """Runs prompts through the engine, and says how long they took and when their samples were there."""

    def __init__(self, options: dict[str, Any], engine: Any) -> None:
        self._options = options
        self._engine = engine
        self._rng = random.Random(0)
        self._runs = 0

    @cached_property
    def _readers(self) -> Readers:
        return Readers(self._options["server"])

    def run(self, *, capture: bool, prompts: int, tokens: int, output: int, pause_ms: int = 0) -> dict[str, Any]:
        """`prompts` random prompts of `tokens` tokens, `output` sampled tokens each; with a pause one at a time.

        A pause is not counted in what is said of tokens a second.
        """
        from vllm import SamplingParams

        self._runs += 1
        names = [f"{os.getpid()}-{self._runs}-{number}" for number in range(prompts)]
        wants: list[dict[str, Any]] = [
            {"sample_id": name, "capture": capture, "include_output_tokens": output > 1} for name in names
        ]
        params = [
            SamplingParams(
                max_tokens=output,
                temperature=1.0 if output > 1 else 0.0,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": {"slotstream": want}} if self._options["kind"] in _OURS else None,
            )
            for want in wants
        ]
        texts = [{"prompt_token_ids": [self._rng.randrange(1, 8000) for _ in range(tokens)]} for _ in names]
        ours = capture and self._options["kind"] in ("direct", "extraction")
        if ours:
            self._readers.watch(names[:: 1 if pause_ms else _WATCHED_EVERY])
        began = time.perf_counter()
        if pause_ms:
            answers = []
            for text, wanted in zip(texts, params, strict=True):
                time.sleep(pause_ms / 1000)
                answers += self._engine.generate([text], [wanted], use_tqdm=False)
            began += prompts * pause_ms / 1000
        else:
            answers = self._engine.generate(texts, params, use_tqdm=False)
        generated_s = time.perf_counter() - began
        computed = prompts * (tokens + (output if output > 1 else 0))
        found: dict[str, Any] = {"tokens_per_s": computed / generated_s}
        stored_at = time.perf_counter()
        if ours:
            said = [answer.kv_transfer_params["slotstream"] for answer in answers]
            refused = [one["error"]["code"] for one in said if "error" in one]
            names = [name for name, one in zip(names, said, strict=True) if "error" not in one]
            stored_at = self._wait(names)
            found |= self._stored(names)
            found["failed"] += refused
        elif self._options["kind"] == "example":
            stored_at = self._forget_files([answer.kv_transfer_params["hidden_states_path"] for answer in answers])
        found["all_stored_tokens_per_s"] = computed / (stored_at - began)
        return found

    def ranks(self, **load: Any) -> dict[str, Any]:
        """The load once more, while a profiler looks on: what each rank did (gpu_ranks.py)."""
        self._engine.collective_rpc("watch_rank")
        self.run(**load)
        return {"ranks": self._engine.collective_rpc("rank_figures")}

    def _wait(self, names: Sequence[str]) -> float:
        """Returns once every sample ended; when that was."""
        with connect(self._options["server"]) as client:
            for name in reversed(names):
                _ended(client, name)
        return time.perf_counter()

    def _stored(self, names: Sequence[str]) -> dict[str, Any]:
        """What became of the samples, and how long after its last rows each was durable, and readable."""
        rows_at: dict[str, int] = {}  # of those committed
        failed: list[str] = []
        durable_ms: list[float] = []
        nbytes = 0
        with connect(self._options["server"]) as client:
            for name in names:
                info = client.stat(name)
                if info.state is not SampleState.COMMITTED:
                    failed.append(info.error_code or str(info.state))
                else:
                    rows_at[name] = int(info.metadata["last_rows_unix_ns"])
                    assert info.committed_unix_ns is not None
                    assert info.file_bytes is not None
                    nbytes += info.file_bytes
                    durable_ms.append((info.committed_unix_ns - rows_at[name]) / 1e6)
            readable_ms = [(at - rows_at[name]) / 1e6 for name, at in self._readers.seen(rows_at).items()]
            for name in names:
                client.delete(name)
        return {
            "committed": len(rows_at),
            "failed": sorted(failed),
            "bytes": nbytes,
            "durable_ms": _percentiles(durable_ms),
            "readable_ms": _percentiles(readable_ms),
        }

    def _forget_files(self, paths: Sequence[str]) -> float:
        """Wait until vLLM's example connector has written them, as its lock files tell, and remove them; when it had."""
        for path in paths:
            with Path(path + ".lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
        written_at = time.perf_counter()
        for left in Path(self._options["shared"]).iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return written_at


def _ended(client: Client, name: str) -> SampleInfo:
    """What is known of a sample once it is no longer on its way."""
    deadline = time.monotonic() + WAIT_S
    while (info := _known(client, name)) is None or info.state is SampleState.ARRIVING:
        if time.monotonic() > deadline:
            raise RuntimeError(f"sample {name} did not end within {WAIT_S:.0f} s")
        time.sleep(0.002)
    return info


def _known(client: Client, name: str) -> SampleInfo | None:
    """What is known of a sample; None before the server has heard of it."""
    try:
        return client.stat(name)
    except SampleNotFound:
        return None


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 2), "p90": round(cuts[89], 2), "p99": round(cuts[98], 2)}


def main() -> int:
    options = json.loads(sys.argv[1])

    def say(what: dict[str, Any]) -> None:
        print("RESULT " + json.dumps(what), flush=True)

    runner = Runner(options, make_engine(options))
    say({"ready": True})
    commands: dict[str, Callable[..., dict[str, Any]]] = {"run": runner.run, "ranks": runner.ranks}
    for line in sys.stdin:
        question = json.loads(line)
        say(commands[question.pop("what")](**question))
    return 0


if __name__ == "__main__":
    sys.exit(main())
