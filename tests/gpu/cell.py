"""One cell of the GPU matrix: one vLLM engine, truth-model prompts through a running server, every row checked.

usage: cell.py CELL_JSON MODEL SERVER   prints one line `CELL {json}` with what was found.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch

from slotstream.client import connect
from slotstream.demo import truth_model

LAYER_IDS = [1, 3, truth_model.LAYERS]
OUTPUT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Cell:
    """Which engine. `runner` is vLLM's model runner, 1 or 2; one that `sleeps` frees its caches between the two passes."""

    runner: int
    eager: bool
    kind: truth_model.Kind
    prefix_caching: bool
    chunked: bool
    sleeps: bool = False

    @property
    def name(self) -> str:
        """Also the namespace of its samples."""
        parts = [f"V{self.runner}", "eager" if self.eager else "graphs", self.kind]
        parts += ["prefix" if self.prefix_caching else "noprefix", "chunked" if self.chunked else "whole"]
        return "-".join([*parts, "sleep"] if self.sleeps else parts)


def make_engine(cell: Cell, model: str, server: str) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {
        "enforce_eager": cell.eager,
        "async_scheduling": cell.runner == 2,  # With V1 it is refused: see tests/gpu/decode.py.
        "enable_prefix_caching": cell.prefix_caching,
        "max_num_batched_tokens": 128 if cell.chunked else 4096,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 32,
        "enable_sleep_mode": cell.sleeps,
        "gpu_memory_utilization": 0.08,
        "kv_cache_memory_bytes": 2 << 30,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS}},
        },
        "kv_transfer_config": {
            "kv_connector": "SlotStreamConnector",
            "kv_connector_module_path": "slotstream.connector",
            "kv_role": "kv_producer",
            # Few rows a slot in half of the cells: rows for slots next to each other are copied at once. And half of them send
            # from a process of its own.
            "kv_connector_extra_config": {
                "server": server,
                "namespace": cell.name,
                "chunk_bytes": 16 << 10 if cell.chunked else 2 << 20,
                "sender": "process" if cell.prefix_caching else "thread",
            },
        },
    }
    if not cell.eager:
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    if cell.kind == "gdn":
        # On Hopper vLLM would take FlashInfer's kernel; Triton's is the one that every GPU has.
        options["additional_config"] = {"gdn_prefill_backend": "triton"}
        options["mamba_cache_mode"] = "align" if cell.prefix_caching else "none"
        options["max_num_batched_tokens"] = 512 if cell.chunked else 4096  # "align" cuts steps at blocks of a few hundred.
    return LLM(model, **options)


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    def text(tokens: int) -> list[int]:
        first = truth_model.FIRST_TEXT_TOKEN
        return [rng.randrange(first, first + truth_model.TEXT_TOKENS) for _ in range(tokens)]

    shared = text(1024)
    return [
        (shared[: rng.randrange(32, 1025)] if i % 3 == 0 else []) + text(rng.choice([1, 2, 15, 16, 17, 64, 257, 700, 811]))
        for i in range(count)
    ]


def run(cell: Cell, model: str, server: str) -> dict[str, Any]:
    from vllm import SamplingParams

    engine = make_engine(cell, model, server)
    prompts = prompts_of(random.Random(cell.name), 48)
    checked = wrong = hits = outputs = 0
    problems: list[str] = []
    with connect(server) as client:
        for turn in range(2):
            if turn and cell.sleeps:
                engine.sleep(level=1)  # Weights wait in host memory; the caches, hidden states among them, are given back.
                engine.wake_up()
            captures_output = [i % 2 == 1 for i in range(len(prompts))]
            params = [
                SamplingParams(
                    max_tokens=OUTPUT_TOKENS,
                    temperature=0,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={
                        "kv_transfer_params": {"slotstream": {"sample_id": f"t{turn}-{i}", "include_output_tokens": out}}
                    },
                )
                for i, out in enumerate(captures_output)
            ]
            answers = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            for i, (prompt, out, answer) in enumerate(zip(prompts, captures_output, answers, strict=True)):
                said = answer.kv_transfer_params["slotstream"]
                if "error" in said:
                    problems.append(f"{said['sample_id']}: {said['error']['code']}")
                    continue
                want = prompt + list(answer.outputs[0].token_ids)[:-1] if out else prompt
                sample = client.get(f"t{turn}-{i}", namespace=cell.name, wait_s=20)
                if sample.token_ids.tolist() != want:
                    problems.append(f"t{turn}-{i}: {len(sample.token_ids)} token ids, expected {len(want)}")
                    continue
                truth = truth_model.expected(sample.token_ids, LAYER_IDS, kind=cell.kind)
                wrong += int((sample.hidden_states != truth).flatten(1).any(1).sum())
                checked += len(want)
                outputs += len(want) - len(prompt)
                hits += int(sample.metadata["prefix_hit_tokens"])
        extra = sum(1 for _ in client.list(namespace=cell.name)) - 2 * len(prompts) + len(problems)
        if extra:
            problems.append(f"{extra} samples too many")
    return {"rows": checked, "wrong": wrong, "prefix_hit_rows": hits, "output_rows": outputs, "problems": problems[:5]}


def main() -> int:
    cell = Cell(**json.loads(sys.argv[1]))
    began = time.monotonic()
    try:
        found = run(cell, sys.argv[2], sys.argv[3])
    except Exception as error:
        traceback.print_exc()
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        found = {"rows": 0, "wrong": 0, "problems": [problem]}
    import vllm

    found |= {"vllm": vllm.__version__, "torch": torch.__version__, "seconds": round(time.monotonic() - began)}
    print("CELL " + json.dumps({**asdict(cell), "name": cell.name, **found}), flush=True)
    return 0 if found["rows"] and not found["wrong"] and not found["problems"] else 1


if __name__ == "__main__":
    sys.exit(main())
