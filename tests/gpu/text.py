"""Greedy text with capture and without, token for token: the same offline batch, CUDA graphs on, runner V2.

usage: python tests/gpu/text.py [--logs DIR] [--on-cpu]
Needs a GPU and vLLM; says so and exits 0 where there is none. Two engines without capture say how much of a difference is
vLLM's own; a third captures. All three share the GPU. --on-cpu tries this script with a small model.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engines
from support import tiny_qwen3
from support.offline import capture, generate
from support.threads import same_threads

from slotstream.client import connect

PROMPTS, MAX_TOKENS = 256, 400  # 102,400 tokens.


def gpu_options() -> dict[str, Any]:
    """vLLM's arguments over `support.offline`'s: three engines of a large model share a GPU."""
    options = engines.small(max_model_len=2048, max_num_seqs=128, gpu_memory_utilization=0.28, kv_cache_memory_bytes=None)
    options |= {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": False, "block_size": 16}
    options |= {"max_num_batched_tokens": 4096, "num_gpu_blocks_override": 12000}
    return options | engines.graphs("FULL_AND_PIECEWISE", sizes=(1, 8, 64, 128))


def make_8b(directory: Path) -> Path:
    """A Qwen3 of 8 billion parameters; its weights are vLLM's dummies."""
    from transformers import Qwen3Config

    Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(directory)
    return directory


def differences(one: Sequence[list[int]], other: Sequence[list[int]]) -> tuple[int, list[str]]:
    """How many tokens differ, and where each text begins to."""
    count, where = 0, []
    for number, (left, right) in enumerate(zip(one, other, strict=True)):
        at = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
        count += len(at)
        where += [f"text {number} from token {at[0]} on"] if at else []
    return count, where


def main() -> int:
    arguments = engines.command_line(__doc__, on_cpu="a small model, where there is no GPU").parse_args()
    if not arguments.on_cpu and not engines.has_gpus():
        return 0
    with engines.place(arguments.logs) as here:
        rng = random.Random(1)
        if arguments.on_cpu:
            model, prompts, tokens = tiny_qwen3.make(here.work / "model"), 4, 20
            engine: dict[str, Any] = {}
            layers: list[int | str] = [1, tiny_qwen3.LAYERS, "final"]
        else:
            model, engine, prompts, tokens = make_8b(here.work / "model"), gpu_options(), PROMPTS, MAX_TOKENS
            layers = [2, 18, 33, "final"]
        inputs = [[rng.randrange(1, 60) for _ in range(rng.choice([1, 17, 64, 255, 700]))] for _ in range(prompts)]
        env = same_threads() if arguments.on_cpu else engines.runner_env(2)
        with ThreadPoolExecutor(1 if arguments.on_cpu else 3) as pool:
            params = [{"sample_id": f"p{i}", "include_output_tokens": True} for i in range(prompts)]
            more: dict[str, dict[str, Any]] = {"captured": {"params": params, **capture(here.server, layers)}}
            runs = {
                name: pool.submit(generate, here.logs / name, model, inputs, tokens, env=env, **engine, **more.get(name, {}))
                for name in ("first", "again", "captured")
            }
            first, again, captured = (run.result().texts for run in runs.values())
            with connect(here.server) as client:
                stored = [client.get(f"p{i}", wait_s=30).token_ids.tolist() for i in range(prompts)]
    assert stored == [prompt + text[:-1] for prompt, text in zip(inputs, first, strict=True)] or captured != first
    total = sum(map(len, first))
    noise, _ = differences(first, again)
    ours, where = differences(first, captured)
    print(f"{total:,} tokens; {noise} differ between two runs without capture, {ours} between one of them and one with capture")
    print("\n".join(where[:20]))
    return 0 if ours <= noise else 1


if __name__ == "__main__":
    sys.exit(main())
