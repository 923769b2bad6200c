"""Cache resets, pauses and sleep of a running engine: captures end right or say why not, and the next ones are right."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.idle import assert_idle
from support.outage import metric, scrape
from support.stack import Stack, stack
from support.workload import LAYER_IDS, Answer, Ask, assert_rows_are_true, send, text_tokens

from slotstream.client import Client, SampleFailed, connect

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(600)]

RUNNING = 8


@pytest.fixture(scope="module")
def managed(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """An engine that takes orders over HTTP. Asynchronous scheduling: a step is under way when an order comes."""
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    work = tmp_path_factory.mktemp("managed")
    with stack(work, truth_models["dense"], LAYER_IDS, "--async-scheduling", env=env) as running:
        yield running


@pytest.fixture
def client(managed: Stack) -> Iterator[Client]:
    with connect(managed.address) as connected:
        yield connected


def _order(running: Stack, path: str) -> dict[str, Any]:
    """POST to vLLM; returns its JSON answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{running.vllm_port}{path}", method="POST")
    with urllib.request.urlopen(request, timeout=120.0) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed


def _long_outputs(namespace: str) -> list[Ask]:
    rng = random.Random(namespace)
    params = {"namespace": namespace, "include_output_tokens": True}
    return [Ask(text_tokens(rng, 40 * i + 1), params | {"sample_id": f"o{i}"}, max_tokens=120) for i in range(RUNNING)]


def _while_running(running: Stack, asks: Sequence[Ask], act: Callable[[], None]) -> list[Answer]:
    """Send `asks` at once, `act` when all of them run; returns their answers."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(send, running.vllm_port, asks)
        while metric(scrape(running.vllm_port), "vllm:num_requests_running") < len(asks):
            assert not answers.done(), "the requests ended before all of them ran"
        act()
        return answers.result()


def _assert_whole(client: Client, asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
    for ask, answer in zip(asks, answers, strict=True):
        assert len(answer.tokens) == ask.max_tokens
        assert answer.said is not None
        assert "error" not in answer.said, answer.said
        sample = client.get(ask.params["sample_id"], namespace=ask.params["namespace"])
        assert sample.token_ids.tolist() == ask.prompt + answer.tokens[:-1]
        assert_rows_are_true(sample)


def _hit_tokens(running: Stack, client: Client, sample_id: str) -> int:
    """Capture a prompt that is always the same, check its rows; returns how many came out of the prefix cache."""
    prompt = text_tokens(random.Random(0), 500)
    send(running.vllm_port, [Ask(prompt, {"namespace": "same", "sample_id": sample_id})])
    sample = client.get(sample_id, namespace="same")
    assert sample.token_ids.tolist() == prompt
    assert_rows_are_true(sample)
    return int(sample.metadata["prefix_hit_tokens"])


def test_a_cache_reset_between_requests(managed: Stack, client: Client) -> None:
    _hit_tokens(managed, client, "reset-before")
    assert _hit_tokens(managed, client, "reset-cached") > 400
    while not _order(managed, "/reset_prefix_cache?reset_external=true")["success"]:
        pass  # The last request's blocks are freed a step after its answer.
    assert _hit_tokens(managed, client, "reset-after") == 0
    assert _hit_tokens(managed, client, "reset-again") > 400
    assert_idle(managed)


def test_cache_resets_under_running_requests_which_start_over(managed: Stack, client: Client) -> None:
    """vLLM preempts all of them, drops the tokens of the step that is under way, and computes every row again."""
    asks = _long_outputs("restarted")
    preempted = metric(scrape(managed.vllm_port), "vllm:num_preemptions_total")

    def act() -> None:
        assert not _order(managed, "/reset_prefix_cache?reset_external=true")["success"]  # Blocks are in use: no harm done.
        for _ in range(3):
            assert _order(managed, "/reset_prefix_cache?reset_running_requests=true&reset_external=true")["success"]

    _assert_whole(client, asks, _while_running(managed, asks, act))
    assert metric(scrape(managed.vllm_port), "vllm:num_preemptions_total") >= preempted + RUNNING
    assert_idle(managed)


@pytest.mark.parametrize(("pause", "resume"), [("/pause?", "/resume"), ("/sleep?level=2&", "/wake_up")])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_and_what_becomes_of_running_requests(
    managed: Stack, client: Client, pause: str, resume: str, mode: str
) -> None:
    """Memory does not sleep on a CPU, all else is as on a GPU: the scheduler pauses and the caches are cleared."""
    asks = _long_outputs(f"{pause.strip('/?').partition('?')[0]}-{mode}")
    _hit_tokens(managed, client, f"{asks[0].params['namespace']}-before")

    def act() -> None:
        _order(managed, f"{pause}mode={mode}")
        if mode == "abort":  # Told while the engine is paused: no later request has to carry it.
            for ask in asks:
                with pytest.raises(SampleFailed) as caught:
                    client.get(ask.params["sample_id"], namespace=ask.params["namespace"])
                assert caught.value.reason == "ABORTED"
        _order(managed, resume)

    answers = _while_running(managed, asks, act)
    if mode == "abort":
        assert all(len(a.tokens) < ask.max_tokens for a, ask in zip(answers, asks, strict=True))
    else:
        _assert_whole(client, asks, answers)
    assert _hit_tokens(managed, client, f"{asks[0].params['namespace']}-after") == 0
    assert_idle(managed)
