"""Every layer and `final` of random weights against transformers: latent attention, gated delta nets and plain attention.

usage: python tests/gpu/reference.py [--only TEXT ...] [--logs DIR] [--on-cpu]
Needs a GPU and vLLM; says so and exits 0 where there is none. Both runners, with CUDA graphs and without; prompts in chunks,
half of them with output rows. The engines share the GPU. --on-cpu tries this script on the CPU.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engines
from support import tiny_kinds, tiny_qwen3
from support.offline import capture, generate
from support.reference import OTHER_LAYER_ERROR_MIN, RELATIVE_ERROR_MAX, row_errors
from support.workload import text_tokens

from slotstream.client import Client, connect

OUTPUT_TOKENS = 40
PROMPTS = [text_tokens(random.Random(81), n) for n in (1, 5, 127, 128, 200, 411)]
# The first layer that can be had (vLLM's DeepSeek has no residual stream before its first), the last, and what a row may be
# off. Latent attention is computed in another order than transformers', and a recurrent state adds up over hundreds of tokens:
# both round in more places.
KINDS: dict[str, tuple[int, int, float]] = {
    "dense": (0, tiny_qwen3.LAYERS, RELATIVE_ERROR_MAX),
    "mla": (1, tiny_kinds.LAYERS, 0.12),
    "gdn": (0, tiny_kinds.LAYERS, 0.15),
}


def engine_of(kind: str, mode: str, *, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments over `support.offline`'s; None is vLLM's own default."""
    if on_cpu:
        return {}
    eager = mode == "eager"
    options = engines.small(enforce_eager=eager, max_num_batched_tokens=512, max_num_seqs=16, gpu_memory_utilization=0.1)
    options |= {"block_size": None, "num_gpu_blocks_override": None, **engines.of_kind(kind)}
    return options if eager else options | engines.graphs("FULL_AND_PIECEWISE", sizes=(1, 2, 4, 8, 16))


def worst(client: Client, namespace: str, model: Path) -> tuple[int, float, float]:
    """How many rows, how far the worst is from its own layer's, and how near (in the middle) they come to another's."""
    rows, own, other = 0, 0.0, float("inf")
    for i in range(len(PROMPTS)):
        sample = client.get(f"p{i}", namespace=namespace, wait_s=30)
        same, others = row_errors(sample, model)
        rows += len(sample.token_ids)
        own, other = max(own, float(same.max())), min(other, float(others.median(0).values.min()))
    return rows, own, other


def main() -> int:
    arguments = engines.command_line(__doc__, only="engines", on_cpu="where there is no GPU").parse_args()
    if not arguments.on_cpu and not engines.has_gpus():
        return 0
    modes, runners = (("eager",), (1,)) if arguments.on_cpu else (("full", "eager"), (2, 1))
    every = itertools.product(KINDS, modes, runners)
    names = {f"{kind}-V{runner}-{mode}": (kind, mode, runner) for kind, mode, runner in every}
    chosen = {name: which for name, which in names.items() if engines.is_chosen(name, arguments.only)}
    with engines.place(arguments.logs) as here:
        models = {"dense": tiny_qwen3.make(here.work / "dense")}
        models |= {kind: tiny_kinds.make(here.work / kind, kind) for kind in ("mla", "gdn")}
        one_at_a_time = threading.Lock()  # transformers sets PyTorch's default type while it loads.

        def run(name: str) -> str:
            kind, mode, runner = chosen[name]
            first, last, error_max = KINDS[kind]
            layers: Sequence[int | str] = [*range(first, last + 1), "final"]
            params = [{"sample_id": f"p{i}", "include_output_tokens": i % 2 == 1} for i in range(len(PROMPTS))]
            env = {} if arguments.on_cpu else engines.runner_env(runner)
            options = {**engine_of(kind, mode, on_cpu=arguments.on_cpu), **capture(here.server, layers, namespace=name)}
            generate(here.logs / name, models[kind], PROMPTS, OUTPUT_TOKENS, params=params, env=env, **options)
            with one_at_a_time, connect(here.server) as client:
                rows, own, other = worst(client, name, models[kind])
            green = own < error_max and (other > OTHER_LAYER_ERROR_MIN or kind == "gdn")
            verdict = "ok " if green else "BAD"
            return f"{verdict} {name}: {rows:,} rows of {len(layers)} layers, at most {own:.3f} off, other layers {other:.2f}"

        with ThreadPoolExecutor(1 if arguments.on_cpu else 6) as pool:
            runs = {name: pool.submit(run, name) for name in chosen}
            said = [run.result() if run.exception() is None else f"BAD {n}: {run.exception()}" for n, run in runs.items()]
    print("\n".join(said), flush=True)
    return 0 if all(line.startswith("ok") for line in said) else 1


if __name__ == "__main__":
    sys.exit(main())
