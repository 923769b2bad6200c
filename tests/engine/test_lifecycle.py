"""Cache resets, pauses and sleep of a running engine: captures end right or say why not, and the next ones are right."""

from __future__ import annotations

import json
import random
import shutil
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.idle import assert_idle
from support.outage import metric, scrape
from support.stack import Stack, stack
from support.workload import LAYER_IDS, Answer, Ask, assert_rows_are_true, send, text_tokens

from slotstream.client import Client, Sample, SampleFailed, connect
from slotstream.truth import model as truth_model

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(600)]

RUNNING = 8
ATTEMPTS = 5


@pytest.fixture(scope="module")
def managed(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """An engine that takes orders over HTTP. Asynchronous scheduling: a step is under way when an order comes."""
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    work = tmp_path_factory.mktemp("managed")
    with stack(work, truth_models["dense"], LAYER_IDS, "--async-scheduling", env=env, extract=True) as running:
        yield running


@pytest.fixture(scope="module")
def other_weights(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose rows of a token spell the next one."""
    path = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(truth_models["dense"], path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(-1, 0).contiguous()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture
def client(managed: Stack) -> Iterator[Client]:
    with connect(managed.address) as connected:
        yield connected


def _order(running: Stack, path: str, **body: Any) -> dict[str, Any]:
    """POST to vLLM; returns its JSON answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{running.vllm_port}{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json"} if body else {},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=120.0) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed


def _long_outputs(namespace: str, attempt: int) -> list[Ask]:
    rng = random.Random(f"{namespace} {attempt}")
    params = {"namespace": namespace, "include_output_tokens": True}
    return [
        Ask(text_tokens(rng, 40 * i + 1), params | {"sample_id": f"o{attempt}.{i}"}, max_tokens=600) for i in range(RUNNING)
    ]


def _while_running(running: Stack, namespace: str, act: Callable[[list[Ask]], None]) -> tuple[list[Ask], list[Answer]]:
    """Send requests with long outputs at once, `act` when all of them run; returns them and their answers.

    Where vLLM's front end stood still until they had ended, as it does for seconds on a busy host, others are sent.
    """
    for attempt in range(ATTEMPTS):
        asks = _long_outputs(namespace, attempt)
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(send, running.vllm_port, asks)
            while not answers.done():
                if metric(scrape(running.vllm_port), "vllm:num_requests_running") == len(asks):
                    act(asks)
                    return asks, answers.result()
            answers.result()
    raise AssertionError(f"the requests ended before all of them ran, {ATTEMPTS} times")


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
    preempted = metric(scrape(managed.vllm_port), "vllm:num_preemptions_total")

    def act(asks: list[Ask]) -> None:
        assert not _order(managed, "/reset_prefix_cache?reset_external=true")["success"]  # Blocks are in use: no harm done.
        for _ in range(3):
            assert _order(managed, "/reset_prefix_cache?reset_running_requests=true&reset_external=true")["success"]

    _assert_whole(client, *_while_running(managed, "restarted", act))
    assert metric(scrape(managed.vllm_port), "vllm:num_preemptions_total") >= preempted + RUNNING
    assert_idle(managed)


@pytest.mark.parametrize(("pause", "resume"), [("/pause?", "/resume"), ("/sleep?level=2&", "/wake_up")])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_and_what_becomes_of_running_requests(
    managed: Stack, client: Client, pause: str, resume: str, mode: str
) -> None:
    """Memory does not sleep on a CPU, all else is as on a GPU: the scheduler pauses and the caches are cleared."""
    name = f"{pause.strip('/?').partition('?')[0]}-{mode}"
    _hit_tokens(managed, client, f"{name}-before")

    def act(asks: list[Ask]) -> None:
        _order(managed, f"{pause}mode={mode}")
        if mode == "abort":  # Told while the engine is paused: no later request has to carry it.
            for ask in asks:
                with pytest.raises(SampleFailed) as caught:
                    client.get(ask.params["sample_id"], namespace=ask.params["namespace"])
                assert caught.value.reason == "ABORTED"
        _order(managed, resume)

    asks, answers = _while_running(managed, name, act)
    if mode == "abort":
        assert all(len(a.tokens) < ask.max_tokens for a, ask in zip(answers, asks, strict=True))
    else:
        _assert_whole(client, asks, answers)
    assert _hit_tokens(managed, client, f"{name}-after") == 0
    assert_idle(managed)


def _assert_rows_are_of_both(sample: Sample, old: int) -> None:
    """The first `old` rows are of the truth model's own weights, the others of `other_weights`."""
    tokens = sample.token_ids.clone()
    tokens[old:] = (tokens[old:] + 1) % truth_model.VOCAB
    truth = truth_model.expected(tokens, LAYER_IDS)
    wrong = (sample.hidden_states != truth).flatten(1).any(1).nonzero().flatten()
    assert not len(wrong), f"rows {wrong.tolist()} of {len(truth)}, of which {old} should be of the old weights"


def test_weights_replaced_while_captures_are_under_way(
    managed: Stack, client: Client, truth_models: dict[str, Path], other_weights: Path
) -> None:
    """Paused, reloaded, resumed: a sample with rows of both says from which row on they are the new weights'."""
    _hit_tokens(managed, client, "weights-before")

    def act(asks: list[Ask]) -> None:
        _order(managed, "/pause?mode=keep")  # Which drops the caches too.
        _order(managed, "/collective_rpc", method="reload_weights", kwargs={"weights_path": str(other_weights)})
        _order(managed, "/resume")

    try:
        asks, answers = _while_running(managed, "replaced", act)
        mixed = 0
        for ask, answer in zip(asks, answers, strict=True):
            assert answer.said is not None
            assert "error" not in answer.said, answer.said
            sample = client.get(ask.params["sample_id"], namespace="replaced")
            assert sample.token_ids.tolist() == ask.prompt + answer.tokens[:-1]
            old = int(sample.metadata.get("cache_resets", "0"))
            assert 0 <= old < len(sample.token_ids)
            _assert_rows_are_of_both(sample, old)
            mixed += old > 0
        assert mixed >= RUNNING // 2
        # A prompt seen before, of which nothing is left in vLLM's cache, and one never seen.
        for prompt in (text_tokens(random.Random(0), 500), text_tokens(random.Random(46), 200)):
            sample_id = f"weights-after{len(prompt)}"
            send(managed.vllm_port, [Ask(prompt, {"namespace": "same", "sample_id": sample_id})])
            sample = client.get(sample_id, namespace="same")
            assert sample.token_ids.tolist() == prompt
            assert (sample.metadata["prefix_hit_tokens"], sample.metadata.get("cache_resets")) == ("0", None)
            _assert_rows_are_of_both(sample, 0)
    finally:
        _order(managed, "/pause?mode=wait")
        _order(managed, "/collective_rpc", method="reload_weights", kwargs={"weights_path": str(truth_models["dense"])})
        _order(managed, "/resume")
    assert _hit_tokens(managed, client, "weights-restored") == 0
    assert_idle(managed)
