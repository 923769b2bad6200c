"""Layers captured directly, on real vLLM: dense, sliding windows, latent attention; prompts in steps of 64 tokens.

The dense engine sends from a process (`sender: process`): a sender that dies harms neither text nor samples. Its KV cache is
too small for a random load.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.descendants import descendants
from support.idle import assert_idle
from support.outage import metric, scrape
from support.random_load import Outcome, Request, check, long_answers, random_requests, run
from support.stack import Stack, stack
from support.waiting import wait_until
from support.workload import FINAL_ID, Ask, assert_rows_are_true, random_prompts, send, text_tokens

from slotstream.client import Client, SampleFailed, SampleState, connect, rows
from slotstream.truth.model import LAYERS, NORM_EPSILON, Kind

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CHOSEN: list[int | str] = [1, 3, LAYERS, "final"]
IDS = [1, 3, LAYERS, FINAL_ID]


@pytest.fixture(scope="module", params=["dense", "swa", "mla"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def running(kind: Kind, truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The layers in no order: rows come ascending, final last."""
    work, layers, options, how = tmp_path_factory.mktemp(kind), list(reversed(CHOSEN)), list[str](), dict[str, Any]()
    if kind == "dense":  # Room for three of the longest requests, and several chunks for most samples.
        options, how = ["--num-gpu-blocks-override=100"], {"sender": "process", "chunk_bytes": 16 << 10}
    if kind == "swa":  # Answers are read several times, and elsewhere at their end.
        how = {"output_rows_per_chunk": 12}
    with stack(work, truth_models[kind], layers, *options, one_process=kind != "dense", **how) as started:
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
        assert json.loads(sample.metadata["final_norm"]) == {"class": "RMSNorm", "epsilon": NORM_EPSILON}
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


def test_a_loss_mask_is_stored_beside_the_rows_it_is_of(running: Stack, client: Client, kind: Kind) -> None:
    prompt = text_tokens(random.Random(46), 300)  # Of several steps.
    masks: dict[str, object] = {"spans": [[0, 2], [10, 12], [298, 310], [330, 340]], "output": "output", "past": [[330, 341]]}
    params = {"namespace": "m", "include_output_tokens": True, "tokens": [1, None]}
    asks = [Ask(prompt, {**params, "sample_id": name, "loss_mask": mask}, 40) for name, mask in masks.items()]
    *answers, refused = send(running.vllm_port, asks)
    assert refused.said is not None
    assert refused.said["error"]["code"] == "BAD_TOKEN_RANGE"
    counted = {"spans": {1, 10, 11, *range(298, 310), *range(330, 339)}, "output": set(range(300, 339))}
    for (name, positions), answer in zip(counted.items(), answers, strict=True):
        sample = client.get(name, namespace="m")
        assert sample.token_ids.tolist() == (prompt + answer.tokens[:-1])[1:]
        assert sample.loss_mask is not None
        assert sample.loss_mask.tolist() == [position in positions for position in range(1, 339)]
        assert_rows_are_true(sample, kind=kind, layer_ids=IDS)
    (batch,) = rows("final", 1000, client=client, namespace="m", columns=["loss_mask", "positions", "sample_ids"])
    for name, row, counts in zip(batch["sample_ids"], batch["positions"].tolist(), batch["loss_mask"].tolist(), strict=True):
        assert counts == (row + 1 in counted[name.removeprefix("m/")])


def test_layers_are_chosen_by_number_and_by_name(running: Stack, client: Client, kind: Kind) -> None:
    prompt = text_tokens(random.Random(45), 40)
    send(running.vllm_port, [Ask(prompt, {"namespace": "l", "sample_id": "s"})])
    sample = client.get("s", namespace="l", layers=["final", 3], start=5, stop=20)
    assert sample.layer_ids == (FINAL_ID, 3)
    assert_rows_are_true(sample, kind=kind, layer_ids=[FINAL_ID, 3])


# A load on the dense engine, and its sender process.

dense_only = pytest.mark.parametrize("kind", ["dense"], indirect=True)  # The first of the kinds, so that it is the same engine.


def _senders(running: Stack) -> list[int]:
    assert running.engine is not None
    return descendants(running.engine.process.pid, "slotstream.connector.sending.process.main")


def _wait_for_restarts(running: Stack, count: int) -> None:
    log = running.work / "vllm.log"
    wait_until(lambda: log.read_text().count("another process sends rows now") == count, "another sender")


@dense_only
def test_a_random_load_is_stored_right_though_the_cache_is_too_small_for_it(running: Stack, client: Client) -> None:
    assert len(_senders(running)) == 1
    requests = [*long_answers(3, 16, "load"), *random_requests(3, 84, "load")]
    outcomes = run(running.vllm_port, requests, at_once=24)
    assert_idle(running)
    states = Counter(check(client, *pair, "dense", IDS) for pair in zip(requests, outcomes, strict=True))
    assert states["committed"] >= 50, states
    assert metric(scrape(running.vllm_port), "vllm:num_preemptions_total") > 0


def _is_one_durable(client: Client, namespace: str) -> bool:
    return any(info.state is SampleState.COMMITTED for info in client.list(namespace=namespace))


def _run_with_a_kill(running: Stack, client: Client, requests: list[Request], kills: int) -> list[Outcome]:
    """The outcomes of `requests`. Their sender is killed, as the `kills`th one, once a sample of theirs is durable."""
    namespace = requests[0].params["namespace"]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(run, running.vllm_port, requests, 16)
        wait_until(lambda: _is_one_durable(client, namespace), "the first sample")
        (sender,) = _senders(running)
        os.kill(sender, signal.SIGKILL)
        outcomes = answers.result()  # Every request was answered, with status 200.
    _wait_for_restarts(running, kills)
    return outcomes


def _state(client: Client, request: Request) -> str:
    """What became of a sample whose sender may have been killed: "committed", and right, or why it failed."""
    try:
        sample = client.get(request.sample_id, namespace=request.params["namespace"], wait_s=0)
    except SampleFailed as error:
        return error.reason
    assert_rows_are_true(sample, layer_ids=IDS)
    return "committed"


@dense_only
def test_a_sender_that_is_killed_harms_no_text_and_every_sample_is_accounted_for(running: Stack, client: Client) -> None:
    rounds = [[r for r in random_requests(40 + i, 60, f"killed{i}") if r.abort_after_s is None] for i in range(3)]
    for kills, requests in enumerate(rounds, 1):
        outcomes = _run_with_a_kill(running, client, requests, kills)
        assert all(outcome.answered for outcome in outcomes)
    after = random_requests(5, 20, "after")
    outcomes_after = run(running.vllm_port, after, at_once=8)
    assert_idle(running)
    assert metric(scrape(running.vllm_port), "slotstream_connector_sender_restarts_total") == len(rounds)
    for requests in rounds:
        states = Counter(_state(client, request) for request in requests if request.params.get("capture", True))
        assert states["committed"], states
        assert states.keys() <= {"committed", "INTERNAL", "INTERRUPTED"}
    later = Counter(check(client, *pair, "dense", IDS) for pair in zip(after, outcomes_after, strict=True))
    assert later["committed"] >= 10, later


@dense_only
def test_the_engine_stops_its_sender(running: Stack) -> None:
    """Last of the dense engine: it stops it."""
    (sender,) = _senders(running)
    assert running.engine is not None
    running.engine.stop()
    wait_until(lambda: not Path(f"/proc/{sender}").exists(), "the sender's end")
