"""Connector option `sender: process` on real vLLM: the same rows, and a sender that dies harms neither text nor samples."""

from __future__ import annotations

import os
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
from support.random_load import Outcome, Request, check, random_requests, run
from support.stack import Stack, stack
from support.waiting import wait_until
from support.workload import LAYER_IDS, assert_rows_are_true

from slotstream.client import Client, SampleFailed, SampleState, connect

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def running(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    work = tmp_path_factory.mktemp("process")
    options: dict[str, Any] = {"sender": "process", "chunk_bytes": 16 << 10, "include_output_tokens": False}
    with stack(work, truth_models["dense"], LAYER_IDS, "--async-scheduling", **options) as started:
        yield started


@pytest.fixture
def client(running: Stack) -> Iterator[Client]:
    with connect(running.address) as connected:
        yield connected


def _senders(running: Stack) -> list[int]:
    assert running.engine is not None
    return descendants(running.engine.process.pid, "slotstream.connector.sending.process.main")


def _wait_for_restarts(running: Stack, count: int) -> None:
    log = running.work / "vllm.log"
    wait_until(lambda: log.read_text().count("another process sends rows now") == count, "another sender")


def test_every_row_is_right(running: Stack, client: Client) -> None:
    assert len(_senders(running)) == 1
    requests = random_requests(3, 60, "right")
    outcomes = run(running.vllm_port, requests, at_once=24)
    assert_idle(running)
    states = Counter(check(client, *pair, "dense") for pair in zip(requests, outcomes, strict=True))
    assert states["committed"] >= 30, states


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
    assert_rows_are_true(sample, kind="dense")
    return "committed"


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
    later = Counter(check(client, *pair, "dense") for pair in zip(after, outcomes_after, strict=True))
    assert later["committed"] >= 10, later


def test_the_engine_stops_its_sender(running: Stack) -> None:
    (sender,) = _senders(running)
    assert running.engine is not None
    running.engine.stop()
    wait_until(lambda: not Path(f"/proc/{sender}").exists(), "the sender's end")
