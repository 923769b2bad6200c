"""speculators asks vLLM for rows as it trains: they are those of a capture, and what it asked for is gone afterwards."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import torch
from support import read_online, tiny_qwen3
from support.stack import stack
from support.workload import MODEL_NAME, Ask, send, text_tokens

from slotstream.client import connect
from slotstream.client.exports.index import write_index

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(900)]

LAST = tiny_qwen3.LAYERS


def test_rows_that_training_asks_for_are_those_of_a_capture_and_are_deleted(tmp_path: Path) -> None:
    model, rng = tiny_qwen3.make(tmp_path / "model"), random.Random(3)
    prompts = [text_tokens(rng, n) for n in (2, 33, 65, 200)]
    data = tmp_path / "data"
    data.mkdir()
    write_index(data, ((array("q", prompt), bytes(len(prompt))) for prompt in prompts))
    with stack(tmp_path, model, [1, 2, 3, LAST], response_handle=True, namespace="live") as running:
        send(running.vllm_port, [Ask(p, {"sample_id": f"mine{i}"}) for i, p in enumerate(prompts)], at_once=1)
        endpoint, out = f"http://127.0.0.1:{running.vllm_port}/v1", tmp_path / "out.pt"
        words = [data, endpoint, MODEL_NAME, running.address, "live", out]
        environment = {**os.environ, "PYTHONPATH": str(Path(sys.prefix) / "trainers")}
        subprocess.run([sys.executable, read_online.__file__, *map(str, words)], check=True, env=environment, timeout=600)
        with connect(running.address) as client:
            assert {info.sample_id for info in client.list(namespace="live")} == {f"mine{i}" for i in range(len(prompts))}
            samples = [client.get(f"mine{i}", namespace="live") for i in range(len(prompts))]
    for sample, held in zip(samples, torch.load(out), strict=True):
        assert torch.equal(held["input_ids"], sample.token_ids)
        rows = torch.cat([held["hidden_states"], held["verifier_last_hidden_states"]], dim=1).float()
        mine = sample.hidden_states.flatten(1).float()
        # Alone in its batch both times; another shape of it rounds otherwise.
        assert float((rows - mine).norm() / mine.norm()) < 0.01
