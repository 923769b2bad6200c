"""What the examples begin with: a small model, prompts out of Python's own documentation, and a store of their rows."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from slotstream.demo.processes import SMALL_ENGINE, SMALL_ENGINE_ENV, free_port, start_server
from slotstream.truth.model import write_tokenizer

_MODULES = (
    "argparse",
    "asyncio",
    "email",
    "http.client",
    "inspect",
    "json",
    "logging",
    "pathlib",
    "tarfile",
    "typing",
    "unittest",
)
PROMPT_CHARS = 300


def make_model(path: Path) -> Path:
    """A Qwen3 of four layers with random weights, which reads bytes; needs transformers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=80,
        max_position_embeddings=4096,
        initializer_range=0.1,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    write_tokenizer(path)
    return path


def documentation() -> list[str]:
    """Paragraphs of Python's own documentation, each once."""
    found: dict[str, None] = {}
    for name in _MODULES:
        for thing in vars(importlib.import_module(name)).values():
            text = getattr(thing, "__doc__", None)
            if isinstance(text, str) and len(text) > PROMPT_CHARS:
                found[text[:PROMPT_CHARS]] = None
    return list(found)


def write_prompts(path: Path, count: int) -> Path:
    """A line for each prompt. Every fifth is kept for the test."""
    lines = (
        json.dumps({"prompt": text, "tags": {"split": "test" if number % 5 == 0 else "train"}})
        for number, text in enumerate(documentation()[:count])
    )
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@contextlib.contextmanager
def store(work: Path, layers: str, prompts: int) -> Iterator[str]:
    """The address of a server that holds these layers of the prompts' tokens."""
    model = make_model(work / "model")
    lines = write_prompts(work / "prompts.jsonl", prompts)
    command = [sys.executable, "-m", "slotstream.cli.main", "capture", str(lines), "--layers", layers]
    command += ["--to", str(work / "data"), "--model", str(model), "--", *SMALL_ENGINE]
    subprocess.run(command, check=True, env={**os.environ, **SMALL_ENGINE_ENV})
    port = free_port()
    with start_server(work / "data", work / "server.log", port):
        yield f"127.0.0.1:{port}"
