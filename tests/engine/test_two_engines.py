"""Several engines in one Python process, and several slotstreams in one engine: every stored row is its own engine's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from support import offline, two_engines
from support.worker_rig import opened
from support.workload import assert_rows_are_true, text_tokens
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from slotstream.client import Client, SampleState, connect
from slotstream.connector.plan import StepPlan
from slotstream.demo.processes import free_port, start_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

_LAYERS: list[list[int | str]] = [[0, 3], [6, "final"], [2]]
_EXTRACT = {
    "speculative_config": {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}},
    }
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Client]:
    port = free_port()
    with start_server(tmp_path / "data", tmp_path / "server.log", port), connect(f"127.0.0.1:{port}") as client:
        yield client


def _turns(order: list[int | str]) -> list[dict[str, Any]]:
    """A prompt for each number in `order`, by that engine; "end N" ends one."""
    rng = random.Random(38)
    turns: list[dict[str, Any]] = []
    for i, what in enumerate(order):
        if isinstance(what, str):
            turns.append({"end": int(what.removeprefix("end "))})
            continue
        asked = {"sample_id": f"s{i}", "namespace": f"engine{what}", "include_output_tokens": i % 2 == 0}
        turns.append({"engine": what, "prompt": text_tokens(rng, rng.choice([1, 40, 150])), "slotstream": asked})
    return turns


def _assert_stored(client: Client, turns: list[dict[str, Any]], said: list[Any], layer_ids: dict[int, list[int]]) -> None:
    for turn, answered in zip(turns, said, strict=True):
        if answered is None:
            continue
        tokens, ours = answered[:2]
        assert "error" not in ours, ours
        asked = turn["slotstream"]
        sample = client.get(asked["sample_id"], namespace=asked["namespace"], wait_s=10.0)
        assert list(sample.layer_ids) == ours["layer_ids"] == layer_ids[turn["engine"]]
        outputs = tokens[:-1] if asked["include_output_tokens"] else []
        assert sample.token_ids.tolist() == turn["prompt"] + outputs
        assert_rows_are_true(sample, layer_ids=layer_ids[turn["engine"]])


def test_a_step_of_an_engine_that_is_unknown_here_fails_its_samples_and_frees_its_blocks() -> None:
    from slotstream.connector.facade import SlotStreamConnector, SlotStreamMetadata, SlotStreamWorkerMetadata

    connector = object.__new__(SlotStreamConnector)
    connector._sides, connector._scheduler = {}, None
    connector.bind_connector_metadata(SlotStreamMetadata(StepPlan((opened("a", 3),), releases=("b",)), "unknown"))
    connector.save_kv_layer("layer", torch.zeros(1), None)
    connector.wait_for_save()
    assert connector.get_finished(set()) == ({"b"}, None)
    told = connector.build_connector_worker_meta()
    assert isinstance(told, SlotStreamWorkerMetadata)
    assert [(fault.req_id, fault.code) for fault in told.faults] == [("a", "INTERNAL")]
    assert connector.get_kv_connector_stats() is None
    connector.bind_connector_metadata(KVConnectorMetadata())  # An engine with another connector.
    assert connector.get_finished(set()) == (None, None)
    assert connector.build_connector_worker_meta() is None


def test_engines_of_one_process_count_together() -> None:
    """Prometheus takes a name once a process: the second engine did not start."""
    from slotstream.connector.metrics import SlotStreamPromMetrics

    kinds: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    transfer: Any = SimpleNamespace(kv_transfer_config=None)
    engines = [SlotStreamPromMetrics(transfer, kinds, ["model_name", "engine"], {0: ["m", name]}) for name in ("0", "1", "1")]
    for engine in engines:
        engine.observe({"rows": 5})
    found = [REGISTRY.get_sample_value("slotstream_connector_rows_total", {"model_name": "m", "engine": n}) for n in ("0", "1")]
    assert found == [5, 10]


def test_two_engines_in_one_process_each_read_their_own_pages(
    truth_models: dict[str, Path], served: Client, tmp_path: Path
) -> None:
    engines = [offline.capture(served.address, [0, 3]), offline.capture(served.address, [6, "final"])]
    turns = _turns([0, 1, 0, 1, 1, 0])
    said, log = two_engines.run(tmp_path / "run", truth_models["dense"], engines, turns, count_layers=True)
    assert said is not None, log[-4000:]
    _assert_stored(served, turns, said, {0: [0, 3], 1: [6, 7]})
    assert {called for *_, called in said} == {0}, "layers call a connector that wants nothing of them"


@pytest.mark.extended
def test_an_engine_with_layers_and_one_that_extracts_share_a_process(
    truth_models: dict[str, Path], served: Client, tmp_path: Path
) -> None:
    extracting = offline.capture(served.address, [])
    del extracting["kv_transfer_config"]["kv_connector_extra_config"]["layers"]
    engines = [{**extracting, **_EXTRACT}, offline.capture(served.address, [0, 3]), {**extracting, **_EXTRACT}]
    turns = _turns([0, 1, 2, 1, 0, 2])
    said, log = two_engines.run(tmp_path / "run", truth_models["dense"], engines, turns, count_layers=True)
    assert said is not None, log[-4000:]
    _assert_stored(served, turns, said, {0: [1, 4], 1: [0, 3], 2: [1, 4]})
    assert [called > 0 for *_, called in said] == [turn["engine"] != 1 for turn in turns]


@pytest.mark.extended
def test_one_engine_after_the_other(truth_models: dict[str, Path], served: Client, tmp_path: Path) -> None:
    engines = [offline.capture(served.address, layers) for layers in _LAYERS]
    for engine in engines:
        engine["kv_transfer_config"]["engine_id"] = "same"
    turns = _turns([0, 0, "end 0", 1, 1, "end 1", 2])
    said, log = two_engines.run(tmp_path / "run", truth_models["dense"], engines, turns)
    assert said is not None, log[-4000:]
    _assert_stored(served, turns, said, {0: [0, 3], 1: [6, 7], 2: [2]})


@pytest.mark.extended  # Of two slotstreams, a start is refused in test_refused_start.
def test_without_the_first_check_no_wrong_row_is_stored_of_two_slotstreams_in_one_engine(
    truth_models: dict[str, Path], served: Client, tmp_path: Path
) -> None:
    """As it was found: the second's samples were committed as layers 6 and final, and held layers 0 and 3."""
    options: list[dict[str, Any]] = [{"layers": [0, 3], "capture": False}, {"layers": [6, "final"]}]
    children = [{**offline.capture(served.address, **one)["kv_transfer_config"], "kv_role": "kv_both"} for one in options]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    turns = [{**turn, "slotstream": {}} for turn in _turns([0] * 4)]
    refused, log = two_engines.run(tmp_path / "refused", truth_models["dense"], [{"kv_transfer_config": multi}], turns)
    assert refused is None
    assert "2 slotstreams are configured, and an engine has one" in log
    assert "Loading weights took" not in log
    said, log = two_engines.run(
        tmp_path / "run", truth_models["dense"], [{"kv_transfer_config": multi}], turns, first_only=True
    )
    assert said is not None, log[-4000:]
    assert [len(tokens) for tokens, _ in said] == [8] * 4
    infos = served.list()
    assert {info.error_code for info in infos} == {"SLOT_MISMATCH"}
    assert all(info.state is SampleState.FAILED for info in infos)
