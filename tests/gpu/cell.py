"""One cell of the GPU matrix: one vLLM engine, truth-model prompts through a running server, every row checked.

usage: cell.py CELL_JSON MODEL SERVER   prints one line for `engines.found_in`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import engines

from slotstream.client import Client, SampleFailed, SampleNotFound, connect
from slotstream.truth import model as truth_model

FINAL_ID = truth_model.LAYERS + 1
OUTPUT_TOKENS = 48
SPECIALS = ("", "sleep1", "sleep2", "ngram", "preempted", "tiny pool", "aborts")


@dataclass(frozen=True, slots=True)
class Cell:
    """Which engine. `runner` is vLLM's model runner, 1 or 2; `mode` is eager, piecewise or full; `special` is one of SPECIALS.

    `source`: layers, captured directly, or extract_hidden_states.
    """

    source: str
    runner: int
    mode: str
    kind: truth_model.Kind
    prefix_caching: bool
    chunked: bool
    special: str = ""

    @property
    def name(self) -> str:
        """Also the namespace of its samples."""
        parts = ["direct" if self.source == "layers" else "extract", f"V{self.runner}", self.mode, self.kind]
        parts += ["prefix" if self.prefix_caching else "noprefix", "chunked" if self.chunked else "whole"]
        return "-".join([*parts, self.special.replace(" ", "")] if self.special else parts)

    @property
    def residual_ids(self) -> list[int]:
        """Layer 0 is the embedding; vLLM's DeepSeek does not give it."""
        return [*([] if self.kind == "mla" else [0]), 1, 3, truth_model.LAYERS]

    @property
    def layer_ids(self) -> list[int]:
        """As stored: with direct capture the last norm's output, too."""
        return [*self.residual_ids, FINAL_ID] if self.source == "layers" else self.residual_ids


@dataclass
class Found:
    """What the samples of a cell held."""

    rows: int = 0
    wrong: int = 0
    output_rows: int = 0
    prefix_hit_rows: int = 0
    explained: int = 0  # Samples that are missing for a reason that the cell is about.
    problems: list[str] = field(default_factory=list)


def options_of(cell: Cell, server: str) -> dict[str, Any]:
    """vLLM's arguments."""
    # Few rows a slot in half of the cells: rows for slots next to each other are copied at once. And half of them send from a
    # process of its own.
    connector: dict[str, Any] = {
        "namespace": cell.name,
        "chunk_bytes": 16 << 10 if cell.chunked else 2 << 20,
        "sender": "process" if cell.prefix_caching else "thread",
        "output_rows_per_chunk": 32 if cell.chunked else None,  # Answers are read several times, or at their end.
    }
    options = engines.small(
        disable_log_stats=False,  # Its preemptions are counted.
        enforce_eager=cell.mode == "eager",
        enable_prefix_caching=cell.prefix_caching,
        max_num_batched_tokens=128 if cell.chunked else 4096,
        max_model_len=2048,
        enable_sleep_mode=cell.special.startswith("sleep"),
        kv_cache_memory_bytes=2 << 30,
        **engines.of_kind(cell.kind),
    )
    if cell.source == "layers":
        connector["layers"] = [*cell.residual_ids, "final"]
    else:
        options["async_scheduling"] = cell.runner == 2  # With V1 it is refused: see tests/gpu/decode.py.
        options |= engines.extraction(cell.residual_ids)
    if cell.mode != "eager":
        direct = "PIECEWISE" if cell.mode == "piecewise" else "FULL_AND_PIECEWISE"
        options |= engines.graphs(direct if cell.source == "layers" else "")
    if cell.kind == "gdn":
        options["mamba_cache_mode"] = "align" if cell.prefix_caching else "none"
        options["max_num_batched_tokens"] = 512 if cell.chunked else 4096  # "align" cuts steps at blocks of a few hundred.
    if cell.special == "ngram":
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    if cell.special == "preempted":
        options["num_gpu_blocks_override"] = 260  # Of 16 tokens: room for two of the longest requests.
        options["kv_cache_memory_bytes"] = None
    if cell.special == "tiny pool":
        connector["row_pool_bytes"] = 12 * 32 * len(cell.layer_ids) * truth_model.HIDDEN * 2
    return {**options, "kv_transfer_config": engines.slotstream(server, **connector)}


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    def text(tokens: int) -> list[int]:
        first = truth_model.FIRST_TEXT_TOKEN
        return [rng.randrange(first, first + truth_model.TEXT_TOKENS) for _ in range(tokens)]

    shared = text(1024)
    return [
        (shared[: rng.randrange(32, 1025)] if i % 3 == 0 else []) + text(rng.choice([1, 2, 15, 16, 17, 64, 257, 700, 811]))
        for i in range(count)
    ]


def generate(engine: Any, cell: Cell, turn: int, prompts: list[list[int]]) -> list[tuple[dict[str, Any], Any]]:
    """Run the prompts: what each asked of slotstream, and vLLM's answer, None for a request that was aborted."""
    asked = []
    for i, prompt in enumerate(prompts):
        want: dict[str, Any] = {"sample_id": f"t{turn}-{i}", "include_output_tokens": i % 2 == 1}
        if cell.special == "aborts" and i % 4 == 2:
            want["tokens"] = [len(prompt) // 3, len(prompt)]
        asked.append(want)
    params = [engines.sampling({"slotstream": want}, OUTPUT_TOKENS) for want in asked]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    if cell.special != "aborts":
        return list(zip(asked, engine.generate(inputs, params, use_tqdm=False), strict=True))
    core = engine.llm_engine
    answers: dict[str, Any] = {}
    for i, (text, one) in enumerate(zip(inputs, params, strict=True)):
        core.add_request(f"{turn}-{i}", text, one)
    steps = 0
    while core.has_unfinished_requests():
        answers |= {out.request_id: out for out in core.step() if out.finished}
        steps += 1
        if steps % 5 == 0 and steps // 5 * 3 < len(prompts):
            core.abort_request([f"{turn}-{steps // 5 * 3}"])
    return [(want, answers.get(f"{turn}-{i}")) for i, want in enumerate(asked)]


def check(client: Client, cell: Cell, prompt: list[int], want: dict[str, Any], answer: Any, found: Found) -> None:
    """One sample: every row of it, or why there is none."""
    name = want["sample_id"]
    said = None if answer is None else answer.kv_transfer_params["slotstream"]
    try:
        if said is not None and "error" in said:
            raise SampleFailed(said["error"]["message"], said["error"]["code"])
        sample = client.get(name, namespace=cell.name, wait_s=20 if answer is not None else 0)
    except (SampleFailed, SampleNotFound) as error:
        reason = getattr(error, "reason", error.code)
        expected = {"aborts": answer is None and reason in ("ABORTED", "NOT_FOUND"), "tiny pool": reason == "ROW_POOL_FULL"}
        if expected.get(cell.special):
            found.explained += 1
        else:
            found.problems.append(f"{name}: {reason}")
        return
    start, _ = want.get("tokens", (0, None))
    tokens = prompt[start:]
    if answer is not None and want["include_output_tokens"]:
        tokens = tokens + list(answer.outputs[0].token_ids)[:-1]
    kept = sample.token_ids.tolist()
    if kept != tokens if answer is not None else kept[: len(tokens)] != tokens:
        found.problems.append(f"{name}: {len(kept)} token ids, expected {len(tokens)}")
        return
    found.wrong += len(truth_model.wrong_rows(sample.hidden_states, sample.token_ids, cell.layer_ids, kind=cell.kind))
    found.rows += len(kept)
    found.output_rows += len(kept) - len(prompt[start:])
    found.prefix_hit_rows += int(sample.metadata["prefix_hit_tokens"])


def run(cell: Cell, model: str, server: str) -> dict[str, Any]:
    engine = engines.make(model, options_of(cell, server))
    (mode,) = engine.collective_rpc(_graph_mode)[:1]
    prompts = prompts_of(random.Random(cell.name), 48)
    found = Found()
    with connect(server) as client:
        for turn in range(2):
            if turn and cell.special.startswith("sleep"):
                engine.sleep(level=int(cell.special[-1]))  # The caches, and what lies beside them, are given back.
                engine.wake_up()
                if cell.special == "sleep2":  # Weights, too: they are read again.
                    engine.collective_rpc("reload_weights")
            for prompt, (want, answer) in zip(prompts, generate(engine, cell, turn, prompts), strict=True):
                check(client, cell, prompt, want, answer, found)
        if (extra := sum(1 for _ in client.list(namespace=cell.name)) - 2 * len(prompts)) > 0:
            found.problems.append(f"{extra} samples too many")
    preemptions = sum(m.value for m in engine.get_metrics() if m.name == "vllm:num_preemptions")
    if cell.special == "preempted" and not preemptions:
        found.problems.append("nothing was preempted")
    return {**asdict(found), "problems": found.problems[:5], "graphs": mode, "preemptions": preemptions}


def _graph_mode(worker: Any) -> str:
    """What vLLM made of the mode that was asked for."""
    return str(worker.model_runner.compilation_config.cudagraph_mode.name)


def main() -> int:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # For _graph_mode, which the worker runs.
    cell = Cell(**json.loads(sys.argv[1]))
    return engines.tell({**asdict(cell), "name": cell.name}, lambda: run(cell, *sys.argv[2:4]))


if __name__ == "__main__":
    sys.exit(main())
