"""How many tokens vLLM's KV cache holds with capture on, as a part of what it holds without.

usage: python tests/gpu/memory.py [--only SUBSTRING ...] [--logs DIR] [--on-cpu]
Needs a GPU and vLLM; says so and exits 0 where there is none. Each engine is `vllm serve` with its defaults and dummy weights,
alone on the GPU, and is stopped as soon as its log says "KV cache size". --on-cpu tries this script with a small model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import engines

from slotstream.demo.processes import SMALL_ENGINE_ENV, free_port, vllm_command

LEAST = 0.97  # Of no capture.
ENGINE_TIMEOUT_S = 240
_SAID = re.compile(r"KV cache size: ([\d,]+) tokens")
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
}
_WINDOWS = {
    **_LLAMA,
    "sliding_window": 4096,
    "layer_types": ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(32)],
}
_MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 27,  # Dense MLPs: what matters here is the cache.
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "moe_intermediate_size": 1408,
    "vocab_size": 102400,
    "max_position_embeddings": 32768,
}
_SMALL = {
    **_LLAMA,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
}
_MODELS: dict[str, dict[str, Any]] = {"dense 8B": _LLAMA, "sliding windows 8B": _WINDOWS, "MLA": _MLA}


def layers_of(model: dict[str, Any]) -> list[int | str]:
    """Four, spread over the model, the last norm's output among them."""
    count = int(model["num_hidden_layers"])
    return [2, count // 2, count - 3, "final"] if count > 5 else [1, 2, 3, "final"]


def tokens_in_cache(directory: Path, log: Path, options: dict[str, Any]) -> int:
    """What one engine's log says. Raises RuntimeError with the log's end when it says nothing."""
    command = [*vllm_command(directory, free_port()), *engines.flags(options)]
    with log.open("w") as out:
        engine = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + ENGINE_TIMEOUT_S
        while engine.poll() is None and time.monotonic() < deadline:
            if found := _SAID.search(log.read_text(errors="replace")):
                return int(found[1].replace(",", ""))
            time.sleep(0.5)
    finally:
        with contextlib.suppress(ProcessLookupError):  # It ended by itself, and too early.
            os.killpg(engine.pid, signal.SIGKILL)  # It has nothing to lose, and the next one wants its memory.
        engine.wait()
    raise RuntimeError("\n".join([f"the engine said nothing of its KV cache ({log}):", *log.read_text().splitlines()[-15:]]))


def main() -> int:
    arguments = engines.command_line(__doc__, only="models", on_cpu="a small model, where there is no GPU").parse_args()
    if not arguments.on_cpu and not engines.has_gpus():
        return 0
    if arguments.on_cpu:
        os.environ.update(SMALL_ENGINE_ENV)
    models = {"small": _SMALL} if arguments.on_cpu else _MODELS
    green = True
    with engines.place(arguments.logs) as here:
        for name, model in models.items():
            if not engines.is_chosen(name, arguments.only):
                continue
            directory = here.work / name.replace(" ", "-")
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps({**model, "torch_dtype": "bfloat16"}))
            options = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True}
            options |= engines.of_kind("mla" if model is _MLA else "dense")
            if arguments.on_cpu:
                options |= {"enforce_eager": True, "block_size": 32}
            ours = {"kv_transfer_config": engines.slotstream(here.server, layers=layers_of(model))}
            found = {
                capture: tokens_in_cache(
                    directory, here.logs / f"{directory.name}-{capture}.log", options | (ours if capture else {})
                )
                for capture in (False, True)
            }
            ratio = found[True] / found[False]
            green &= ratio >= LEAST
            verdict = "ok " if ratio >= LEAST else "BAD"
            print(f"{verdict} {name}: {found[False]:,} tokens without capture, {found[True]:,} with: {ratio:.3f}", flush=True)
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
