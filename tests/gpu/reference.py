"""Every layer and `final` of random weights against transformers: latent attention, gated delta nets and plain attention.

usage: python tests/gpu/reference.py [--only TEXT ...] [--logs DIR] [--on-cpu]
Needs a GPU and vLLM; says so and exits 0 where there is none. Both runners, with CUDA graphs and without; prompts in chunks,
half of them with output rows. The engines share the GPU. --on-cpu tries this script on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import tiny_kinds, tiny_qwen3
from support.offline import capture, generate
from support.reference import OTHER_LAYER_ERROR_MIN, RELATIVE_ERROR_MAX, row_errors
from support.workload import text_tokens

from slotstream.client import Client, connect
from slotstream.demo.processes import free_port, start_server

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
_GPU: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    "block_size": None,
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "num_gpu_blocks_override": None,
    "max_num_batched_tokens": 512,
}


def engine_of(kind: str, mode: str, *, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments over `support.offline`'s; None is vLLM's own default."""
    engine: dict[str, Any] = {} if on_cpu else dict(_GPU)
    if mode == "eager" and not on_cpu:
        engine |= {"enforce_eager": True, "compilation_config": None}
    if kind == "gdn" and not on_cpu:
        engine["additional_config"] = {"gdn_prefill_backend": "triton"}
    if kind == "mla" and not on_cpu:
        engine["attention_config"] = {"backend": "TRITON_MLA"}
    return engine


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only engines whose name contains TEXT")
    parser.add_argument("--logs", type=Path, default=None, help="work here, and keep the engines' logs")
    parser.add_argument("--on-cpu", action="store_true", help="where there is no GPU")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: no process stays behind.
    import torch

    if not torch.cuda.is_available() and not arguments.on_cpu:
        print("no GPU here: nothing to run")
        return 0
    modes, runners = (("eager",), (1,)) if arguments.on_cpu else (("full", "eager"), (2, 1))
    every = itertools.product(KINDS, modes, runners)
    names = {f"{kind}-V{runner}-{mode}": (kind, mode, runner) for kind, mode, runner in every}
    chosen = {name: which for name, which in names.items() if not arguments.only or any(t in name for t in arguments.only)}
    with tempfile.TemporaryDirectory(prefix="slotstream-gpu-") as scratch:
        work = Path(scratch) if arguments.logs is None else arguments.logs.absolute()
        work.mkdir(parents=True, exist_ok=True)
        models = {"dense": tiny_qwen3.make(work / "dense")}
        models |= {kind: tiny_kinds.make(work / kind, kind) for kind in ("mla", "gdn")}
        port = free_port()
        address = f"127.0.0.1:{port}"

        one_at_a_time = threading.Lock()  # transformers sets PyTorch's default type while it loads.

        def run(name: str) -> str:
            kind, mode, runner = chosen[name]
            first, last, error_max = KINDS[kind]
            layers: Sequence[int | str] = [*range(first, last + 1), "final"]
            params = [{"sample_id": f"p{i}", "include_output_tokens": i % 2 == 1} for i in range(len(PROMPTS))]
            env = {} if arguments.on_cpu else {"VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)}
            options = {**engine_of(kind, mode, on_cpu=arguments.on_cpu), **capture(address, layers, namespace=name)}
            generate(work / name, models[kind], PROMPTS, OUTPUT_TOKENS, params=params, env=env, **options)
            with one_at_a_time, connect(address) as client:
                rows, own, other = worst(client, name, models[kind])
            green = own < error_max and (other > OTHER_LAYER_ERROR_MIN or kind == "gdn")
            verdict = "ok " if green else "BAD"
            return f"{verdict} {name}: {rows:,} rows of {len(layers)} layers, at most {own:.3f} off, other layers {other:.2f}"

        with start_server(work / "data", work / "server.log", port), ThreadPoolExecutor(1 if arguments.on_cpu else 6) as pool:
            runs = {name: pool.submit(run, name) for name in chosen}
            said = [run.result() if run.exception() is None else f"BAD {n}: {run.exception()}" for n, run in runs.items()]
    print("\n".join(said), flush=True)
    return 0 if all(line.startswith("ok") for line in said) else 1


if __name__ == "__main__":
    sys.exit(main())
