"""Requests that are not captured, in vLLM's own scheduler: the answers say why, and the plans tell the worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.real_scheduler import Planned, RealScheduler, real_scheduler
from support.waiting import wait_until

from slotstream.connector.faults import SampleFault

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture
def vllm(truth_models: dict[str, Path]) -> Iterator[RealScheduler]:
    with real_scheduler(truth_models["dense"]) as made:
        yield made


def _tokens(count: int, first: int = 3) -> list[int]:
    return [first + i % 200 for i in range(count)]


def _assert_refused(vllm: RealScheduler, req_id: str, names: tuple[str, str], code: str) -> None:
    assert vllm.said(req_id)["error"]["code"] == code
    sample = vllm.samples[req_id]
    assert sample.opened is not None
    assert (sample.opened.namespace, sample.opened.sample_id) == names
    assert (sample.rows, sample.finish) == ([], None)
    assert sample.abort is not None
    assert sample.abort.code == code
    assert sample.abort.message == vllm.said(req_id)["error"]["message"]


@pytest.mark.parametrize(
    ("params", "names", "code"),
    [
        pytest.param({"sample_id": "mine", "typo": 1}, ("default", "mine"), "BAD_PARAMS", id="a typo"),
        pytest.param(
            {"sample_id": "mine", "tokens": [0, 9999], "tags": {"k": "v"}},
            ("default", "mine"),
            "BAD_TOKEN_RANGE",
            id="a window",
        ),
        pytest.param({"sample_id": "../x", "namespace": "n"}, ("n", "r"), "BAD_SAMPLE_ID", id="an id that cannot be"),
        pytest.param({"sample_id": "mine", "namespace": "../x"}, ("default", "mine"), "BAD_NAMESPACE", id="a namespace"),
        pytest.param({"sample_id": "mine", "tags": 5}, ("default", "mine"), "BAD_TAGS", id="tags"),
        pytest.param({"sample_id": 7, "namespace": 7}, ("default", "r"), "BAD_SAMPLE_ID", id="numbers"),
    ],
)
def test_a_refused_request_is_told_under_the_names_that_it_asked_for(
    vllm: RealScheduler, params: dict[str, Any], names: tuple[str, str], code: str
) -> None:
    vllm.add("r", _tokens(70), **params)
    vllm.run()
    _assert_refused(vllm, "r", names, code)
    opened = vllm.samples["r"].opened
    assert opened is not None
    assert opened.tags == ({"k": "v"} if code == "BAD_TOKEN_RANGE" else {})


def test_parameters_that_are_no_object_are_told_under_the_default_names(vllm: RealScheduler) -> None:
    vllm.send(vllm.request("r", _tokens(70), 4, {"slotstream": 5}))
    vllm.run()
    _assert_refused(vllm, "r", ("default", "r"), "BAD_PARAMS")


def test_prompts_that_share_a_sample_id_are_told_apart(vllm: RealScheduler) -> None:
    """As `LLM.generate` has them, which takes one SamplingParams for a list of prompts."""
    for number in range(3):
        vllm.add(f"r{number}", _tokens(70 + number, 3 + number), sample_id="mine")
    vllm.run()
    assert vllm.samples["r0"].finish is not None
    assert "error" not in vllm.said("r0")
    for req_id in ("r1", "r2"):
        _assert_refused(vllm, req_id, ("default", "mine"), "ALREADY_EXISTS")


@pytest.mark.parametrize(
    ("first", "second", "conflict"),
    [
        pytest.param((_tokens(70), {}), (_tokens(70), {}), False, id="the same prompt"),
        pytest.param((_tokens(70), {}), (_tokens(71), {}), True, id="a longer one"),
        pytest.param((_tokens(70), {}), (_tokens(70), {"namespace": "n"}), False, id="another namespace"),
        pytest.param((_tokens(70), {}), (_tokens(71), {"tokens": [0, 70]}), False, id="the same window"),
        pytest.param((_tokens(70), {}), (_tokens(70), {"tokens": [1, 70]}), True, id="another window"),
        pytest.param(
            (_tokens(70), {"include_output_tokens": True}),
            (_tokens(70), {"include_output_tokens": True}),
            False,
            id="outputs that may be the same",
        ),
        pytest.param(
            (_tokens(70), {"include_output_tokens": True}),
            (_tokens(70, 4), {"include_output_tokens": True}),
            True,
            id="outputs of other prompts",
        ),
    ],
)
def test_only_what_cannot_be_the_same_sample_is_refused(
    vllm: RealScheduler, first: tuple[list[int], dict[str, Any]], second: tuple[list[int], dict[str, Any]], conflict: bool
) -> None:
    for req_id, (prompt, params) in (("a", first), ("b", second)):
        vllm.add(req_id, prompt, **{"sample_id": "mine", **params})
    vllm.run()
    assert "error" not in vllm.said("a")
    assert ("error" in vllm.said("b")) == conflict


def test_a_sample_that_failed_is_in_nobodys_way(vllm: RealScheduler) -> None:
    vllm.add("a", _tokens(300), sample_id="mine")
    vllm.tell.append(SampleFault("a", "BAD_ROWS", "zeros"))
    vllm.step()
    vllm.add("b", _tokens(70), sample_id="mine")
    vllm.run()
    assert vllm.said("a")["error"]["code"] == "BAD_ROWS"
    assert vllm.samples["b"].finish is not None


def test_a_request_that_asked_for_nothing_is_told_to_nobody(vllm: RealScheduler) -> None:
    vllm.add("r", _tokens(70), capture=False)
    vllm.run()
    assert vllm.answers["r"] is None
    assert vllm.samples == {}


def test_a_server_that_is_away_is_not_told_of_what_it_missed(
    truth_models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The answer and the log say it. A great many of these would crowd out failures of samples that were promised."""
    with real_scheduler(truth_models["dense"], spool_dir=None) as vllm:
        scheduler = vllm.scheduler.connector._scheduler
        wait_until(lambda: scheduler.why_off() is not None)
        vllm.add("r", _tokens(70), sample_id="mine")
        vllm.run()
        assert vllm.said("r")["error"]["code"] == "SERVER_UNAVAILABLE"
        assert vllm.samples.get("r", Planned()).opened is None
        assert "request r is not captured: SERVER_UNAVAILABLE" in caplog.text


@pytest.mark.parametrize("capture", [True, False])
def test_a_misspelt_key_is_in_the_answer_if_there_is_one_and_in_the_log(
    truth_models: dict[str, Path], capture: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with real_scheduler(truth_models["dense"], capture=capture) as vllm:
        for req_id in ("a", "b"):
            vllm.send(vllm.request(req_id, _tokens(70), 4, {"slotstrem": {"sample_id": "mine"}}))
            vllm.run()
            if capture:
                assert vllm.said(req_id)["sample_id"] == req_id
                assert "'slotstrem'" in vllm.said(req_id)["warning"]
            else:
                assert vllm.answers[req_id] is None
        vllm.send(vllm.request("c", _tokens(70), 4, {"slotstrem": {}, "slotstream": {"typo": 1, "capture": True}}))
        vllm.run()
        assert vllm.said("c")["error"]["code"] == "BAD_PARAMS"
        assert "'slotstrem'" in vllm.said("c")["warning"]
    assert len([record for record in caplog.records if "'slotstrem'" in record.getMessage()]) == 1


def test_keys_of_vllms_own_connectors_are_no_typos() -> None:
    """All that its connectors look for in a request's parameters, as far as a text search finds it."""
    import re

    import vllm.distributed.kv_transfer.kv_connector.v1 as connectors

    from slotstream.connector.planning.typos import misspelt

    found: set[str] = set()
    for path in Path(next(iter(connectors.__path__))).rglob("*.py"):
        found.update(re.findall(r"""["']([A-Za-z_][A-Za-z0-9_.-]{5,14})["']""", path.read_text()))
    assert {"do_remote_decode"[:14], "transfer_id", "remote_host"} & found
    assert misspelt(dict.fromkeys(found)) == []
