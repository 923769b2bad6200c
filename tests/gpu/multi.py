"""slotstream beside vLLM's own example connector for hidden states, on a GPU: the same rows, in both model runners' engines.

usage: python tests/gpu/multi.py [--at-once 4] [--only SUBSTRING ...] [--logs DIR] [--on-cpu]
Needs a GPU and vLLM; says so and exits 0 where there is none. --on-cpu runs the one cell that a CPU can, to try this script.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import engines
from support import tiny_qwen3

from slotstream.client import connect

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
    return [cell for cell in every if engines.is_chosen(cell.name, only)]


def options_of(cell: Cell, server: str, theirs: Path) -> dict[str, Any]:
    """vLLM's arguments. `theirs`: where the example connector writes."""
    on_cpu = {"kv_connector": "HiddenStatesOnCpu", "kv_connector_module_path": "support.siblings"} if cell.on_cpu else {}
    both = [engines.slotstream(server, namespace=cell.name), engines.example(theirs, **on_cpu)]
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"connectors": both}}
    options = engines.small(
        enforce_eager=cell.eager,
        async_scheduling=cell.runner == 2 or cell.on_cpu,  # With V1 on a GPU it is refused: see decode.py.
        max_num_batched_tokens=128,
        kv_transfer_config=several,
        **engines.extraction(LAYER_IDS),
    )
    if not cell.eager:
        options |= engines.graphs()
    return engines.on_a_cpu(options) if cell.on_cpu else options


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    def text(tokens: int) -> list[int]:
        return [rng.randrange(2, 500) for _ in range(tokens)]

    shared = text(300)
    return [
        (shared[: rng.randrange(32, 301)] if i % 3 == 0 else []) + text(rng.choice([1, 2, 15, 16, 17, 64, 257, 500]))
        for i in range(count)
    ]


def compare(cell: Cell, model: str, server: str, theirs: Path) -> dict[str, Any]:
    """Two turns over the same prompts, so that most of the second is prefix hits; every other one with output rows."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

    engine = engines.make(model, options_of(cell, server, theirs))
    prompts = prompts_of(random.Random(cell.name), PROMPTS)
    rows = differing = outputs = hits = 0
    problems: list[str] = []
    with connect(server) as client:
        for turn in range(2):
            # Both connectors heed include_output_tokens.
            asked = [
                {"slotstream": {"sample_id": f"t{turn}-{i}"}, "include_output_tokens": i % 2 == 1} for i in range(len(prompts))
            ]
            answers = engines.generate(engine, prompts, [engines.sampling(params, OUTPUT_TOKENS) for params in asked])
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
    return {"rows": rows, "wrong": differing, "output_rows": outputs, "prefix_hit_rows": hits, "problems": problems[:5]}


def run_cell(cell: Cell, model: Path, here: engines.Place) -> dict[str, Any]:
    log, theirs = here.logs / f"multi-{cell.name}.log", here.work / "theirs" / cell.name
    theirs.mkdir(parents=True)
    asked = ("--cell", json.dumps(asdict(cell)), str(model), here.server, str(theirs))
    engines.run_script(__file__, *asked, log=log, runner=cell.runner, timeout_s=CELL_TIMEOUT_S)
    found = engines.found_in(log, {"name": cell.name})
    if not engines.is_green(found):
        print(f"--- end of the log of {cell.name}", *log.read_text(errors="replace").splitlines()[-25:], sep="\n", flush=True)
    return found


def as_table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| engine | vLLM | rows | of them output | of prefix hits | differing | seconds | verdict |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for f in found:
        verdict = "the same" if engines.is_green(f) else "; ".join(f["problems"]) or "rows differ"
        lines.append(
            f"| {f['name']} | {f.get('vllm', '?')} | {f['rows']:,} | {f.get('output_rows', 0):,} | "
            f"{f.get('prefix_hit_rows', 0):,} | {f['wrong']} | {f.get('seconds', '?')} | {verdict} |"
        )
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--cell"]:
        cell, (of, server, theirs) = Cell(**json.loads(sys.argv[2])), sys.argv[3:6]
        return engines.tell({"name": cell.name}, lambda: compare(cell, of, server, Path(theirs)))
    parser = engines.command_line(__doc__, only="engines", on_cpu="try this script where there is no GPU", at_once=4)
    arguments = parser.parse_args()
    if not arguments.on_cpu and not engines.has_gpus():
        return 0
    chosen = cells(arguments.only, arguments.on_cpu)
    with engines.place(arguments.logs) as here, ThreadPoolExecutor(arguments.at_once) as pool:
        model = tiny_qwen3.make(here.work / "model")
        found = list(pool.map(lambda cell: run_cell(cell, model, here), chosen))
    print(as_table(found))
    return 0 if found and all(map(engines.is_green, found)) else 1


if __name__ == "__main__":
    sys.exit(main())
