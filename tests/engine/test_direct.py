"""Layers captured directly, on real vLLM: dense, sliding windows, latent attention; prompts in steps of 64 tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.outage import metric, scrape
from support.stack import Stack, stack
from support.workload import FINAL_ID, Ask, assert_rows_are_true, random_prompts, send, text_tokens

from slotstream.client import Client, connect
from slotstream.truth.model import LAYERS, Kind

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CHOSEN: list[int | str] = [1, 3, LAYERS, "final"]
IDS = [1, 3, LAYERS, FINAL_ID]


@pytest.fixture(scope="module", params=["dense", "swa", "mla"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def running(kind: Kind, truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The layers in no order: rows come ascending, final last. The dense engine sends from a process."""
    layers = list(reversed(CHOSEN))
    sender = "process" if kind == "dense" else "auto"
    with stack(tmp_path_factory.mktemp(kind), truth_models[kind], layers, sender=sender) as started:
        yield started


@pytest.fixture
def client(running: Stack) -> Iterator[Client]:
    with connect(running.address) as connected:
        yield connected


def _check(client: Client, running: Stack, kind: Kind, namespace: str, prompts: list[list[int]], **params: Any) -> None:
    outputs = bool(params.get("include_output_tokens"))
    asks = [
        Ask(prompt, {"namespace": namespace, "sample_id": f"p{i}", **params}, max_tokens=50 if outputs else 4)
        for i, prompt in enumerate(prompts)
    ]
    for ask, answer in zip(asks, send(running.vllm_port, asks), strict=True):
        assert answer.said is not None
        assert "error" not in answer.said, answer.said
        assert answer.said["layer_ids"] == IDS
        sample = client.get(answer.said["sample_id"], namespace=namespace)
        assert sample.token_ids.tolist() == (ask.prompt + answer.tokens[:-1] if outputs else ask.prompt)
        assert sample.layer_names == ("1", "3", str(LAYERS), "final")
        assert "final_norm_applied" not in sample.metadata
        assert_rows_are_true(sample, kind=kind, layer_ids=IDS)


def test_every_row_is_right_and_again_when_the_prompts_are_cached(running: Stack, client: Client, kind: Kind) -> None:
    prompts = random_prompts(random.Random(41), 24)
    _check(client, running, kind, "first", prompts)
    _check(client, running, kind, "second", prompts)
    assert {info.metadata["prefix_hit_tokens"] for info in client.list(namespace="second")} == {"0"}


def test_output_rows_are_those_of_the_confirmed_text(running: Stack, client: Client, kind: Kind) -> None:
    prompts = random_prompts(random.Random(42), 20)
    _check(client, running, kind, "outputs", prompts, include_output_tokens=True)


def test_a_captured_request_fills_the_prefix_cache_for_all_others(running: Stack, client: Client, kind: Kind) -> None:
    if kind == "mla":
        pytest.skip("vLLM on the CPU caches no prefixes of models with MLA")
    prompt = text_tokens(random.Random(43), 600)
    send(running.vllm_port, [Ask(prompt, {"namespace": "hits", "sample_id": "a"})])
    before = metric(scrape(running.vllm_port), "vllm:prefix_cache_hits_total")
    send(running.vllm_port, [Ask(prompt, {"capture": False})])
    assert metric(scrape(running.vllm_port), "vllm:prefix_cache_hits_total") - before >= 512


def test_windows_of_the_prompt_and_of_the_output(running: Stack, client: Client, kind: Kind) -> None:
    prompt = text_tokens(random.Random(44), 300)
    windows: dict[str, list[int | None]] = {"inside": [70, 201], "last": [299, 300], "output": [300, None]}
    asks = [
        Ask(prompt, {"namespace": "w", "sample_id": name, "tokens": window, "include_output_tokens": name == "output"}, 40)
        for name, window in windows.items()
    ]
    answers = send(running.vllm_port, asks)
    for (name, window), answer in zip(windows.items(), answers, strict=True):
        sample = client.get(name, namespace="w")
        assert sample.token_ids.tolist() == (prompt + answer.tokens[:-1])[slice(*window)]
        assert_rows_are_true(sample, kind=kind, layer_ids=IDS)


def test_layers_are_chosen_by_number_and_by_name(running: Stack, client: Client, kind: Kind) -> None:
    prompt = text_tokens(random.Random(45), 40)
    send(running.vllm_port, [Ask(prompt, {"namespace": "l", "sample_id": "s"})])
    sample = client.get("s", namespace="l", layers=["final", 3], start=5, stop=20)
    assert sample.layer_ids == (FINAL_ID, 3)
    assert_rows_are_true(sample, kind=kind, layer_ids=[FINAL_ID, 3])
