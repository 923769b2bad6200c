"""How many tokens vLLM's KV cache holds with capture on, as a part of what it holds without.

usage: python tests/gpu/memory.py [--only SUBSTRING ...] [--logs DIR] [--on-cpu]
Needs a GPU and vLLM; says so and exits 0 where there is none. Each engine is `vllm serve` with its defaults and dummy weights,
alone on the GPU, and is stopped as soon as its log says "KV cache size". --on-cpu tries this script with a small model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def tokens_in_cache(
    directory: Path, model: dict[str, Any], log: Path, more: Sequence[str], *, capture: bool, server: str
) -> int:
    """What one engine's log says. Raises RuntimeError with the log's end when it says nothing."""
    from slotstream.demo.processes import free_port

    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(directory),
        "--port",
        str(free_port()),
    ]
    if model is _MLA:
        command += ["--attention-backend", "TRITON_MLA"]  # The one that every GPU has.
    command += ["--load-format", "dummy", "--dtype", "bfloat16", "--skip-tokenizer-init", *more]
    if capture:
        transfer = {
            "kv_connector": "SlotStreamConnector",
            "kv_connector_module_path": "slotstream.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"server": server, "layers": layers_of(model)},
        }
        command += ["--kv-transfer-config", json.dumps(transfer)]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only models whose name contains TEXT")
    parser.add_argument("--logs", type=Path, default=None, help="keep the engines' logs here")
    parser.add_argument("--on-cpu", action="store_true", help="a small model, where there is no GPU")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: no process stays behind.
    import torch

    from slotstream.demo.processes import SMALL_ENGINE_ENV, free_port, start_server

    if not torch.cuda.is_available() and not arguments.on_cpu:
        print("no GPU here: nothing to run")
        return 0
    if arguments.on_cpu:
        os.environ.update(SMALL_ENGINE_ENV)
    models = {"small": _SMALL} if arguments.on_cpu else _MODELS
    green = True
    with tempfile.TemporaryDirectory(prefix="slotstream-gpu-") as scratch:
        work = Path(scratch)
        logs = arguments.logs or work
        logs.mkdir(parents=True, exist_ok=True)
        port = free_port()
        with start_server(work / "data", logs / "server.log", port):
            for name, model in models.items():
                if arguments.only and not any(text in name for text in arguments.only):
                    continue
                directory = work / name.replace(" ", "-")
                directory.mkdir()
                (directory / "config.json").write_text(json.dumps({**model, "torch_dtype": "bfloat16"}))
                found = {
                    capture: tokens_in_cache(
                        directory,
                        model,
                        logs / f"{directory.name}-{capture}.log",
                        ["--enforce-eager", "--block-size=32"] if arguments.on_cpu else [],
                        capture=capture,
                        server=f"127.0.0.1:{port}",
                    )
                    for capture in (False, True)
                }
                ratio = found[True] / found[False]
                green &= ratio >= LEAST
                verdict = "ok " if ratio >= LEAST else "BAD"
                print(
                    f"{verdict} {name}: {found[False]:,} tokens without capture, {found[True]:,} with: {ratio:.3f}", flush=True
                )
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
