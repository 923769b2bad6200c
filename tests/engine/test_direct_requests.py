"""Requests that `extract_hidden_states` does not allow, with `layers`: pooled, embedded, and up to the very last token."""

from __future__ import annotations

import base64
import io
import json
import random
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from support.idle import assert_idle
from support.stack import Stack, stack
from support.waiting import wait_until
from support.workload import FINAL_ID, MODEL_NAME, Ask, assert_rows_are_true, random_prompts, send, text_tokens

from slotstream.client import Client, SampleState, connect
from slotstream.demo.processes import complete
from slotstream.truth.model import HIDDEN, LAYERS, VOCAB, embedding

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(1800)]

CHOSEN: list[int | str] = [0, 3, LAYERS, "final"]
IDS = [0, 3, LAYERS, FINAL_ID]
MODEL_LEN = 1024
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def running(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("requests"), truth_models["dense"], CHOSEN) as started:
        yield started


@pytest.fixture(scope="module")
def drafting(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = ["--speculative-config", json.dumps(NGRAM)]
    with stack(tmp_path_factory.mktemp("drafting"), truth_models["dense"], CHOSEN, *options) as started:
        yield started


def _check(client: Client, port: int, namespace: str, asks: list[Ask]) -> None:
    """Each sample holds its request's prompt, and its output where it asked for that; every row is true."""
    for ask, answer in zip(asks, send(port, asks), strict=True):
        assert answer.said is not None
        assert "error" not in answer.said, answer.said
        assert len(answer.tokens) == ask.max_tokens
        sample = client.get(answer.said["sample_id"], namespace=namespace)
        assert sample.token_ids.tolist() == ask.prompt + (answer.tokens[:-1] if ask.params.get("include_output_tokens") else [])
        assert_rows_are_true(sample, layer_ids=IDS)


def _to_the_end(namespace: str) -> list[Ask]:
    """Prompts and texts that have MODEL_LEN tokens together."""
    rng = random.Random(71)
    outputs = (1, 2, 3, 31, 32, 33, 65, 200)
    return [
        Ask(
            text_tokens(rng, MODEL_LEN - more),
            {"namespace": namespace, "sample_id": f"end{more}", "include_output_tokens": True},
            max_tokens=more,
        )
        for more in outputs
    ]


def test_every_row_up_to_the_last_token_that_the_model_may_have(running: Stack) -> None:
    with connect(running.address) as client:
        _check(client, running.vllm_port, "end", _to_the_end("end"))


def test_every_row_up_to_the_last_token_with_drafts_that_would_go_beyond(drafting: Stack) -> None:
    with connect(drafting.address) as client:
        _check(client, drafting.vllm_port, "end", _to_the_end("end"))
    assert_idle(drafting)


def test_pooled_requests_are_captured_by_default_ids(truth_models: dict[str, Path], tmp_path: Path) -> None:
    """They have no answer to tell an id in: each sample is found by its tokens."""
    prompts = random_prompts(random.Random(73), 16)
    options = ("--runner=pooling", "--convert=embed")
    with stack(tmp_path, truth_models["dense"], CHOSEN, *options) as running, connect(running.address) as client:
        body = {"model": MODEL_NAME, "input": prompts}
        request = urllib.request.Request(
            f"http://127.0.0.1:{running.vllm_port}/v1/embeddings",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300.0) as reply:
            assert len(json.load(reply)["data"]) == len(prompts)
        wait_until(lambda: sum(1 for _ in client.list(state="committed")) == len(prompts), "a sample of each prompt")
        infos = list(client.list())
        samples = [client.get(info.sample_id) for info in infos]
        assert sorted(sample.token_ids.tolist() for sample in samples) == sorted(prompts)
        assert {info.state for info in client.list()} == {SampleState.COMMITTED}
        for sample in samples:
            assert_rows_are_true(sample, layer_ids=IDS)


def test_prompts_of_embeddings_beside_captures(truth_models: dict[str, Path], tmp_path: Path) -> None:
    """They are refused where they ask for a capture, their text goes on, and every row of the others is right."""
    rng = random.Random(79)
    embedded = embedding(VOCAB, HIDDEN)

    def ask_with_embeddings(port: int, number: int) -> dict[str, object]:
        contents = io.BytesIO()
        torch.save(embedded[text_tokens(random.Random(number), 20 + 30 * number)].to(torch.bfloat16), contents)
        body = {
            "model": MODEL_NAME,
            "prompt_embeds": base64.b64encode(contents.getvalue()).decode(),
            "max_tokens": 30,
            "temperature": 0,
            "ignore_eos": True,
            "kv_transfer_params": {"slotstream": {"sample_id": f"embedded{number}"}},
        }
        answer = complete(port, body)
        assert answer["usage"]["completion_tokens"] == 30
        said: dict[str, object] = answer["kv_transfer_params"]["slotstream"]
        return said

    asks = [
        Ask(prompt, {"namespace": "beside", "sample_id": f"p{i}", "include_output_tokens": True}, max_tokens=40)
        for i, prompt in enumerate(random_prompts(rng, 16))
    ]
    with (
        stack(tmp_path, truth_models["dense"], CHOSEN, "--enable-prompt-embeds") as running,
        connect(running.address) as client,
    ):
        with ThreadPoolExecutor(8) as pool:
            refused = pool.map(partial(ask_with_embeddings, running.vllm_port), range(8))
            _check(client, running.vllm_port, "beside", asks)
            for said in refused:
                error = said["error"]
                assert isinstance(error, dict)
                assert error["code"] == "UNSUPPORTED_REQUEST"
        assert_idle(running)
