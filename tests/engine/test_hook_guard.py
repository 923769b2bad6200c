"""Faults injected into every hook of the connector, inside real vLLM: the engine keeps serving, and no wrong row is stored."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.faulty_connector import HOOKS
from support.outage import metric, scrape
from support.stack import stack, support_importable
from support.workload import LAYER_IDS, Ask, assert_rows_are_true, random_prompts, send

from slotstream.client import SampleState, connect

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def _asks(seed: int, namespace: str) -> list[Ask]:
    return [
        Ask(prompt, {"namespace": namespace, "sample_id": f"s{i}", "include_output_tokens": i % 2 == 1}, max_tokens=12)
        for i, prompt in enumerate(random_prompts(random.Random(seed), 40))
    ]


@pytest.mark.parametrize(
    ("probability", "extract"),
    [
        pytest.param(1.0, False, id="every call of every hook-direct"),
        pytest.param(1.0, True, id="every call of every hook-extraction", marks=pytest.mark.extended),
        pytest.param(0.2, False, id="one call in five-direct", marks=pytest.mark.extended),
        pytest.param(0.2, True, id="one call in five-extraction", marks=pytest.mark.extended),
    ],
)
def test_the_engine_serves_on_whatever_the_hooks_do(
    probability: float, extract: bool, truth_models: dict[str, Path], tmp_path: Path
) -> None:
    faults = dict.fromkeys(HOOKS, probability)
    env = support_importable() | {"SLOTSTREAM_TEST_FAULTS": json.dumps(faults)}
    connector: dict[str, Any] = {"name": "FaultyConnector", "module": "support.faulty_connector"}
    with (
        stack(tmp_path, truth_models["dense"], LAYER_IDS, env=env, one_process=True, extract=extract, **connector) as running,
        connect(running.address) as client,
    ):
        asks = _asks(31, "faulty")
        answers = send(running.vllm_port, asks)
        assert [len(a.tokens) for a in answers] == [12] * len(asks)
        stored = [info for info in client.list(namespace="faulty") if info.state is SampleState.COMMITTED]
        for info in stored:
            i = int(info.sample_id[1:])
            sample = client.get(info.sample_id, namespace="faulty")
            whole = asks[i].prompt + answers[i].tokens[:-1]
            assert sample.token_ids.tolist() == (whole if i % 2 else asks[i].prompt)
            assert_rows_are_true(sample)
        if probability == 1.0:
            assert not stored
        # Nothing is held: the engine runs dry, and answers what comes next.
        for _ in range(50):
            (late,) = send(running.vllm_port, [Ask(asks[1].prompt, {"capture": False})])
            assert len(late.tokens) == 4
            page = scrape(running.vllm_port)
            busy = metric(page, "vllm:num_requests_running") + metric(page, "vllm:kv_cache_usage_perc")
            if busy == 0:
                break
        assert busy == 0
        counted = metric(page, "slotstream_connector_hook_faults_total")
        assert counted > 0 or probability == 1.0  # With every hook broken the count itself does not get out.
        assert running.engine is not None
        assert "failed (fault 1)" in running.engine.log.read_text()
