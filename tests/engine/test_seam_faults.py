"""Faults behind the hooks, inside real vLLM with `layers`: the text stays, no wrong row is stored, the log says why."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.outage import metric, scrape
from support.stack import Stack, stack, support_importable
from support.workload import LAYER_IDS, Answer, Ask, assert_rows_are_true, random_prompts, send

from slotstream.client import Client, SampleFailed, connect

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(900)]

PROMPTS = random_prompts(random.Random(51), 12)
# What breaks, and what the log says of it.
IN_A_STEP = {
    "pages": "SchedulerHalf.plan failed (fault",
    "table update": "bind failed (fault",
    "gather": "execute failed (fault",
    "told nobody": "on_faults failed (fault",
}
OFF = "slotstream: rows could not be written, and capture is off until vLLM restarts"


class Breaking:
    """An engine, and the file that says which of its seams is broken."""

    def __init__(self, running: Stack, client: Client, seam: Path) -> None:
        self._running, self._client, self._seam = running, client, seam
        assert running.engine is not None
        self._log = running.engine.log

    def send(self, namespace: str, broken: str = "", until_logged: str = "") -> list[Answer]:
        """All prompts at once, every second one with output rows.

        With `until_logged` the seam stays broken until the log says that, for at most 50 requests more: what the worker found
        reaches the scheduler with a later step.
        """
        self._seam.write_text(broken)
        asks = [
            Ask(prompt, {"namespace": namespace, "sample_id": f"s{i}", "include_output_tokens": i % 2 == 1}, max_tokens=24)
            for i, prompt in enumerate(PROMPTS)
        ]
        answers = send(self._running.vllm_port, asks)
        for _ in range(50):
            if until_logged in self.log():
                break
            send(self._running.vllm_port, [Ask(PROMPTS[0], {"capture": False})])
        self._seam.write_text("")
        return answers

    def codes(self, namespace: str, answers: list[Answer]) -> set[str]:
        """Why samples failed, "" for a stored one, whose rows are right. A sample is told in its answer, or by the server."""
        codes = set()
        for i, answer in enumerate(answers):
            assert answer.said is not None
            if "error" in answer.said:
                codes.add(answer.said["error"]["code"])
                continue
            try:
                sample = self._client.get(f"s{i}", namespace=namespace)
            except SampleFailed:
                codes.add(self._client.stat(f"s{i}", namespace=namespace).error_code or "")
                continue
            codes.add("")
            assert sample.token_ids.tolist() == PROMPTS[i] + (answer.tokens[:-1] if i % 2 else [])
            assert_rows_are_true(sample)
        return codes

    def log(self) -> str:
        return self._log.read_text()

    def assert_idle(self) -> None:
        """No request and no block of vLLM's is held."""
        for _ in range(50):
            send(self._running.vllm_port, [Ask(PROMPTS[0], {"capture": False})])
            page = scrape(self._running.vllm_port)
            busy = metric(page, "vllm:num_requests_running") + metric(page, "vllm:kv_cache_usage_perc")
            if busy == 0:
                return
        raise AssertionError(f"{busy} held")


@pytest.fixture
def breaking(truth_models: dict[str, Path], tmp_path: Path) -> Iterator[Breaking]:
    seam = tmp_path / "seam"
    seam.write_text("")
    env = support_importable() | {"SLOTSTREAM_TEST_SEAM": str(seam)}
    with (
        stack(
            tmp_path, truth_models["dense"], LAYER_IDS, env=env, name="FaultySeams", module="support.faulty_seams"
        ) as running,
        connect(running.address) as client,
    ):
        yield Breaking(running, client, seam)


def test_a_fault_costs_its_samples_and_nothing_else(breaking: Breaking) -> None:
    whole = breaking.send("whole")
    assert breaking.codes("whole", whole) == {""}
    for seam, said in IN_A_STEP.items():
        namespace = seam.replace(" ", "-")
        broken = breaking.send(namespace, seam, until_logged=said)
        assert [a.tokens for a in broken] == [a.tokens for a in whole]
        assert "" not in breaking.codes(namespace, broken)
        assert breaking.log().count(said) == 1
        after = breaking.send(f"after-{namespace}")
        assert [a.tokens for a in after] == [a.tokens for a in whole]
        assert breaking.codes(f"after-{namespace}", after) == {""}
    breaking.assert_idle()
    # A fault in the forward pass itself switches capture off for good, and every later sample says so.
    for namespace, seam in (("broken", "the model's answer"), ("off", "")):
        answers = breaking.send(namespace, seam)
        assert [a.tokens for a in answers] == [a.tokens for a in whole]
        assert breaking.codes(namespace, answers) == {"INTERNAL"}
    assert breaking.log().count(OFF) == 1
    breaking.assert_idle()
