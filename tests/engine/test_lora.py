"""Requests with LoRA adapters, with the option `layers`: rows are the adapted model's, also of two adapters in a batch."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.adapters import OTHER, TUNED, adapter, assert_rows_are_adapted
from support.stack import Stack, stack
from support.workload import LAYER_IDS, MODEL_NAME, assert_rows_are_true, text_tokens

from slotstream.client import Client, Sample, connect
from slotstream.demo.processes import complete

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(900)]


def _captured(running: Stack, client: Client, model: str, number: int) -> Sample:
    prompt = text_tokens(random.Random(number), 40 + 13 * number)
    params = {"namespace": model, "sample_id": f"s{number}", "include_output_tokens": number % 2 == 0}
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 30, "ignore_eos": True, "temperature": 0}
    complete(running.vllm_port, {**body, "kv_transfer_params": {"slotstream": params}})
    return client.get(f"s{number}", namespace=model)


def test_rows_are_those_of_the_requests_adapter(truth_models: dict[str, Path], tmp_path: Path) -> None:
    """Base requests have batches of their own: on the CPU build they get the last adapter beside requests that have one."""
    options = ["--enable-lora", "--max-loras=2", "--lora-modules"]
    options += [f"tuned={adapter(tmp_path / 'tuned', TUNED)}", f"other={adapter(tmp_path / 'other', OTHER)}"]
    with stack(tmp_path, truth_models["dense"], LAYER_IDS, *options) as running, connect(running.address) as client:
        with ThreadPoolExecutor(12) as pool:
            mixed = [(model, number) for number in range(6) for model in ("tuned", "other")]
            samples = list(pool.map(lambda ask: _captured(running, client, *ask), mixed))
        for (model, _), sample in zip(mixed, samples, strict=True):
            assert sample.metadata["lora_name"] == model
            assert_rows_are_adapted(sample, TUNED if model == "tuned" else OTHER, LAYER_IDS)
        with ThreadPoolExecutor(6) as pool:
            for sample in pool.map(lambda number: _captured(running, client, MODEL_NAME, number), range(6)):
                assert "lora_name" not in sample.metadata
                assert_rows_are_true(sample)
