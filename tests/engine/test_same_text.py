"""Greedy text with capture and without: the same offline batch, step for step, each run with fresh caches."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support import tiny_qwen3
from support.offline import capture, generate
from support.threads import same_threads
from support.workload import text_tokens

from slotstream.client import connect
from slotstream.demo.processes import free_port, start_server

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(3600)]

MAX_TOKENS = 150


def test_text_is_the_same_token_for_token(tmp_path: Path) -> None:
    """Two runs without capture say how much of a difference would be vLLM's own: none on a CPU."""
    model = tiny_qwen3.make(tmp_path / "qwen3")
    rng = random.Random(62)
    prompts = [text_tokens(rng, rng.choice([1, 33, 64, 127, 300, 600])) for _ in range(24)]
    threads = same_threads()
    first, again = (generate(tmp_path / name, model, prompts, MAX_TOKENS, env=threads).texts for name in ("first", "again"))
    assert again == first
    port = free_port()
    address = f"127.0.0.1:{port}"
    with start_server(tmp_path / "data", tmp_path / "server.log", port), connect(address) as client:
        params = [{"sample_id": f"p{i}", "include_output_tokens": i % 2 == 1} for i in range(len(prompts))]
        engine = capture(address, [0, 1, 3, "final"])
        captured = generate(tmp_path / "captured", model, prompts, MAX_TOKENS, params=params, env=threads, **engine)
        stored = [client.get(f"p{i}") for i in range(len(prompts))]
    assert captured.texts == first
    assert sum(len(text) for text in first) == MAX_TOKENS * len(prompts)
    for i, sample in enumerate(stored):
        assert sample.token_ids.tolist() == prompts[i] + (first[i][:-1] if i % 2 else [])
