"""slotstream beside vLLM's own example connector for hidden states, on a GPU: the same rows, in both model runners' engines.

usage: python tests/gpu/multi.py [--at-once 4] [--only SUBSTRING ...] [--logs DIR] [--on-cpu]
Needs a GPU and vLLM; says so and exits 0 where there is none. --on-cpu runs the one cell that a CPU can, to try this script.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import tiny_qwen3

TESTS = Path(__file__).resolve().parents[1]
CELL_TIMEOUT_S = 240
LAYER_IDS = [0, 1, 3, tiny_qwen3.LAYERS]
PROMPTS = 32
OUTPUT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Cell:
    """Which engine. `runner` is vLLM's model runner, 1 or 2."""

    runner: int
    eager: bool
    on_cpu: bool = False

    @property
    def name(self) -> str:
        """Also the namespace of its samples."""
        return f"V{self.runner}-{'eager' if self.eager else 'graphs'}"


def cells(only: Sequence[str], on_cpu: bool) -> list[Cell]:
    """The slower ones first."""
    every = [Cell(1, True, True)] if on_cpu else [Cell(r, eager) for eager, r in itertools.product((False, True), (2, 1))]
    return [c for c in every if not only or any(text in c.name for text in only)]


def make_engine(cell: Cell, model: str, server: str, theirs: str) -> Any:
    from vllm import LLM

    ours: dict[str, Any] = {
        "kv_connector": "SlotStreamConnector",
        "kv_connector_module_path": "slotstream.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"server": server, "namespace": cell.name},
    }
    example: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": theirs},
    }
    if cell.on_cpu:
        example |= {"kv_connector": "HiddenStatesOnCpu", "kv_connector_module_path": "support.siblings"}
    options: dict[str, Any] = {
        "enforce_eager": cell.eager,
        "async_scheduling": cell.runner == 2 or cell.on_cpu,  # With V1 on a GPU it is refused: see decode.py.
        "max_num_batched_tokens": 128,
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 1 << 30,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS}},
        },
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"connectors": [ours, example]},
        },
    }
    if not cell.on_cpu:
        options["gpu_memory_utilization"] = 0.08
    if not cell.eager:
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    return LLM(model, **options)


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    def text(tokens: int) -> list[int]:
        return [rng.randrange(2, 500) for _ in range(tokens)]

    shared = text(300)
    return [
        (shared[: rng.randrange(32, 301)] if i % 3 == 0 else []) + text(rng.choice([1, 2, 15, 16, 17, 64, 257, 500]))
        for i in range(count)
    ]


def compare(cell: Cell, model: str, server: str, theirs: str) -> dict[str, Any]:
    """Two turns over the same prompts, so that most of the second is prefix hits; every other one with output rows."""
    import torch
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

    from slotstream.client import connect

    engine = make_engine(cell, model, server, theirs)
    prompts = prompts_of(random.Random(cell.name), PROMPTS)
    rows = differing = outputs = hits = 0
    problems: list[str] = []
    with connect(server) as client:
        for turn in range(2):
            params = [
                SamplingParams(
                    max_tokens=OUTPUT_TOKENS,
                    temperature=0,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={
                        "kv_transfer_params": {
                            "slotstream": {"sample_id": f"t{turn}-{i}"},
                            "include_output_tokens": i % 2 == 1,  # Both connectors heed it.
                        }
                    },
                )
                for i in range(len(prompts))
            ]
            answers = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            # The last requests' output rows go out with a step after theirs; a batch engine makes none by itself.
            engine.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4), use_tqdm=False)
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                said = answer.kv_transfer_params or {}
                if "error" in said.get("slotstream", {"error": 1}) or "hidden_states_path" not in said:
                    problems.append(f"t{turn}-{i}: answered {said}"[:200])
                    continue
                want = prompt + (list(answer.outputs[0].token_ids)[:-1] if i % 2 else [])
                sample = client.get(f"t{turn}-{i}", namespace=cell.name, wait_s=20)
                other = load_hidden_states(said["hidden_states_path"])
                if sample.token_ids.tolist() != want or other["token_ids"].tolist() != want:
                    lengths = (len(sample.token_ids), len(other["token_ids"]), len(want))
                    problems.append(f"t{turn}-{i}: token ids differ; ours, theirs, expected: {lengths}")
                    continue
                if sample.hidden_states.shape != other["hidden_states"].shape:
                    shapes = (tuple(sample.hidden_states.shape), tuple(other["hidden_states"].shape))
                    problems.append(f"t{turn}-{i}: shapes differ; ours, theirs: {shapes}")
                    continue
                differing += int((sample.hidden_states != other["hidden_states"]).flatten(1).any(1).sum())
                if not bool(sample.hidden_states.flatten(1).any(1).all()) or not bool(
                    torch.isfinite(sample.hidden_states).all()
                ):
                    problems.append(f"t{turn}-{i}: rows of zeros, or not finite")
                rows += len(want)
                outputs += len(want) - len(prompt)
                hits += int(sample.metadata["prefix_hit_tokens"])
    return {"rows": rows, "differing": differing, "output_rows": outputs, "prefix_hit_rows": hits, "problems": problems[:5]}


def main_of_cell(cell: Cell, model: str, server: str, theirs: str) -> int:
    """Prints one line `CELL {json}` with what was found."""
    began = time.monotonic()
    try:
        found = compare(cell, model, server, theirs)
    except Exception as error:
        traceback.print_exc()
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        found = {"rows": 0, "differing": 0, "problems": [problem]}
    import vllm

    found |= {"name": cell.name, "vllm": vllm.__version__, "seconds": round(time.monotonic() - began)}
    print("CELL " + json.dumps(found), flush=True)
    return 0 if is_green(found) else 1


def run_cell(cell: Cell, model: Path, server: str, work: Path, logs: Path) -> dict[str, Any]:
    log = logs / f"multi-{cell.name}.log"
    theirs = work / "theirs" / cell.name
    theirs.mkdir(parents=True)
    command = [sys.executable, str(Path(__file__)), "--cell", json.dumps(asdict(cell)), str(model), server, str(theirs)]
    paths = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "VLLM_USE_V2_MODEL_RUNNER": str(cell.runner - 1),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as out, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env, timeout=CELL_TIMEOUT_S, check=False)
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("CELL ")]
    if said:
        found: dict[str, Any] = json.loads(said[-1][5:])
    else:
        found = {"name": cell.name, "rows": 0, "differing": 0, "problems": ["the engine did not finish"]}
    if not is_green(found):
        print(f"--- end of the log of {cell.name}", *lines[-25:], sep="\n", flush=True)
    return found


def is_green(found: dict[str, Any]) -> bool:
    return bool(found["rows"] and not found["differing"] and not found["problems"])


def as_table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| engine | vLLM | rows | of them output | of prefix hits | differing | seconds | verdict |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for f in found:
        verdict = "the same" if is_green(f) else "; ".join(f["problems"]) or "rows differ"
        lines.append(
            f"| {f['name']} | {f.get('vllm', '?')} | {f['rows']:,} | {f.get('output_rows', 0):,} | "
            f"{f.get('prefix_hit_rows', 0):,} | {f['differing']} | {f.get('seconds', '?')} | {verdict} |"
        )
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--cell"]:
        return main_of_cell(Cell(**json.loads(sys.argv[2])), *sys.argv[3:6])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=4, help="engines that share the GPU at a time (default: %(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only engines whose name contains TEXT")
    parser.add_argument("--logs", type=Path, default=None, help="keep the engines' logs here")
    parser.add_argument("--on-cpu", action="store_true", help="try this script where there is no GPU")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not arguments.on_cpu:
        print("no GPU here: nothing to run")
        return 0
    from slotstream.demo.processes import free_port, start_server

    with tempfile.TemporaryDirectory(prefix="slotstream-multi-") as scratch:
        work = Path(scratch)
        logs = arguments.logs or work
        logs.mkdir(parents=True, exist_ok=True)
        model = tiny_qwen3.make(work / "model")
        port = free_port()
        chosen = cells(arguments.only, arguments.on_cpu)
        with start_server(work / "data", logs / "server.log", port), ThreadPoolExecutor(arguments.at_once) as pool:
            found = list(pool.map(lambda c: run_cell(c, model, f"127.0.0.1:{port}", work, logs), chosen))
    print(as_table(found))
    return 0 if found and all(is_green(f) for f in found) else 1


if __name__ == "__main__":
    sys.exit(main())
