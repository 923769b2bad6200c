"""Several engines in one Python process, and several slotstreams in one engine: every stored row is its own engine's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import offline, two_engines
from support.workload import assert_rows_are_true, text_tokens

from slotstream.client import Client, SampleState, connect
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
        tokens, ours = answered
        assert "error" not in ours, ours
        asked = turn["slotstream"]
        sample = client.get(asked["sample_id"], namespace=asked["namespace"], wait_s=10.0)
        assert list(sample.layer_ids) == ours["layer_ids"] == layer_ids[turn["engine"]]
        outputs = tokens[:-1] if asked["include_output_tokens"] else []
        assert sample.token_ids.tolist() == turn["prompt"] + outputs
        assert_rows_are_true(sample)


def test_two_engines_in_one_process_each_read_their_own_pages(
    truth_models: dict[str, Path], served: Client, tmp_path: Path
) -> None:
    engines = [offline.capture(served.address, [0, 3]), offline.capture(served.address, [6, "final"])]
    turns = _turns([0, 1, 0, 1, 1, 0])
    said, log = two_engines.run(tmp_path / "run", truth_models["dense"], engines, turns)
    assert said is not None, log[-4000:]
    _assert_stored(served, turns, said, {0: [0, 3], 1: [6, 7]})


@pytest.mark.extended
def test_an_engine_with_layers_and_one_that_extracts_share_a_process(
    truth_models: dict[str, Path], served: Client, tmp_path: Path
) -> None:
    extracting = offline.capture(served.address, [])
    del extracting["kv_transfer_config"]["kv_connector_extra_config"]["layers"]
    engines = [{**extracting, **_EXTRACT}, offline.capture(served.address, [0, 3]), {**extracting, **_EXTRACT}]
    turns = _turns([0, 1, 2, 1, 0, 2])
    said, log = two_engines.run(tmp_path / "run", truth_models["dense"], engines, turns)
    assert said is not None, log[-4000:]
    _assert_stored(served, turns, said, {0: [1, 4], 1: [0, 3], 2: [1, 4]})


@pytest.mark.extended
def test_one_engine_after_the_other_and_what_becomes_of_one_whose_connector_ended(
    truth_models: dict[str, Path], served: Client, tmp_path: Path
) -> None:
    """vLLM ends the connector of the process with the first engine that ends; a third engine gets a new one."""
    engines = [offline.capture(served.address, layers) for layers in _LAYERS]
    turns = _turns([0, 1, "end 0", 1, 2, 1, 2])
    said, log = two_engines.run(tmp_path / "run", truth_models["dense"], engines, turns)
    assert said is not None, log[-4000:]
    for number in (3, 5):  # Of the engine that lost its connector: the text goes on, and the answer says why nothing is stored.
        tokens, ours = said[number]
        assert len(tokens) == 8
        assert ours["error"]["code"] == "INTERNAL"
        assert "another engine of this process was shut down" in ours["error"]["message"]
        said[number] = None
    _assert_stored(served, turns, said, {0: [0, 3], 1: [6, 7], 2: [2]})


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
