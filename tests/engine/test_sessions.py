"""Streaming input sessions, whose prompt grows while they run, in vLLM's own scheduler: none is committed in part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.real_scheduler import Planned, RealScheduler, real_scheduler

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture
def vllm(truth_models: dict[str, Path]) -> Iterator[RealScheduler]:
    with real_scheduler(truth_models["dense"]) as made:
        yield made


def _tokens(count: int) -> list[int]:
    return [3 + i % 200 for i in range(count)]


def test_a_request_that_is_no_session_is_captured_whole(vllm: RealScheduler) -> None:
    vllm.add("a", _tokens(70), include_output_tokens=True)
    vllm.run()
    finish = vllm.samples["a"].finish
    assert finish is not None
    assert len(finish.token_ids) == 73
    assert vllm.said("a")["num_tokens"] == 73


def _chunks(vllm: RealScheduler, *asked: dict[str, Any], at_once: bool = False) -> None:
    """A session of 70, 50 and 90 tokens, each with text after it, whose chunks ask for so much."""
    for chunk, params in zip((70, 50, 90), asked, strict=True):
        vllm.add("a", _tokens(chunk), resumable=True, **params)
        if not at_once:
            vllm.run()


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_session_is_refused_and_no_row_of_it_is_planned(vllm: RealScheduler, outputs: bool, at_once: bool) -> None:
    asked: dict[str, Any] = {"sample_id": "mine", "include_output_tokens": outputs}
    _chunks(vllm, asked, asked, asked, at_once=at_once)
    vllm.add("a", [0], **asked)  # How vLLM's front end says that no more comes.
    vllm.run()
    sample = vllm.samples.get("a", Planned())
    assert (sample.rows, sample.finish) == ([], None)
    if at_once:  # Where nothing waits for input any more, vLLM ends the session as aborted and says nothing.
        assert vllm.said("a")["error"]["code"] == "UNSUPPORTED_REQUEST"


def test_a_session_that_asks_with_a_later_chunk_is_refused_too(vllm: RealScheduler) -> None:
    _chunks(vllm, {"capture": False}, {"capture": False}, {"capture": True}, at_once=True)
    vllm.add("a", [0])
    vllm.run()
    assert vllm.said("a")["error"]["code"] == "UNSUPPORTED_REQUEST"


def test_the_end_of_a_session_that_is_gone_is_no_sample(vllm: RealScheduler) -> None:
    vllm.add("a", _tokens(70), resumable=True, sample_id="mine")
    vllm.step()
    vllm.abort("a")
    vllm.run()
    vllm.add("a", [0], sample_id="mine")
    vllm.run()
    assert vllm.samples.get("a", Planned()).finish is None
    assert vllm.said("a")["error"]["code"] == "UNSUPPORTED_REQUEST"


def test_a_session_that_asks_for_nothing_is_left_alone(vllm: RealScheduler) -> None:
    nothing = {"capture": False}
    _chunks(vllm, nothing, nothing, nothing, at_once=True)
    vllm.add("a", [0], capture=False)
    vllm.run()
    assert vllm.answers["a"] is None


@pytest.mark.parametrize("outputs", [False, True])
def test_rows_of_a_request_that_grew_are_never_committed(
    vllm: RealScheduler, outputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later vLLM may grow requests that do not say so before."""
    monkeypatch.setattr("slotstream.connector.planning.sessions.Sessions.has", lambda self, request: False)
    vllm.add("a", _tokens(200), 2, include_output_tokens=outputs)
    vllm.step()
    request = vllm.scheduler.requests["a"]
    for tokens in (request.prompt_token_ids, request._all_token_ids):
        tokens.extend(_tokens(50))
    request.num_prompt_tokens += 50
    vllm.run()
    assert vllm.samples["a"].finish is None
    abort = vllm.samples["a"].abort
    assert abort is not None
    assert abort.code == "ROWS_NOT_COMPUTED"
    assert vllm.said("a")["error"]["code"] == "ROWS_NOT_COMPUTED"
