"""Streaming input sessions, whose prompt grows while they run, in vLLM's own scheduler: none is committed in part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.offline import capture
from support.real_scheduler import Planned, RealScheduler, real_scheduler
from support.waiting import wait_until
from support.workload import LAYER_IDS, assert_rows_are_true

from slotstream.client import SampleState, connect
from slotstream.demo.processes import SMALL_ENGINE_ENV, free_port, start_server

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


_SCRIPT = """
import asyncio, json, sys
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

def params(sample_id, outputs):
    asked = {"sample_id": sample_id, "include_output_tokens": outputs}
    extra = {"kv_transfer_params": {"slotstream": asked}}
    kind = RequestOutputKind.DELTA
    return SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=extra, output_kind=kind)

async def chunks(turns):
    for number, tokens in enumerate((70, 50, 90)):
        while len(turns) < 4 * number:  # Each waits for the text of the one before.
            await asyncio.sleep(0.01)
        yield StreamingInput({"prompt_token_ids": [3 + i % 200 for i in range(tokens)]})

async def session(engine, sample_id, outputs):
    turns = []
    async for output in engine.generate(chunks(turns), params(sample_id, outputs), sample_id):
        turns += output.outputs[0].token_ids
    return len(turns)

async def main(asked):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**asked))
    try:
        said = [await session(engine, "prompt", False), await session(engine, "outputs", True)]
        plain = {"prompt_token_ids": [3 + i % 200 for i in range(70)]}
        async for output in engine.generate(plain, params("plain", True), "plain"):
            pass
        return said
    finally:
        engine.shutdown()

if __name__ == "__main__":
    print("SAID " + json.dumps(asyncio.run(main(json.loads(sys.argv[1])))), flush=True)
"""


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_session_of_a_real_engine_goes_on_and_is_listed_as_failed(truth_models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "sessions.py").write_text(_SCRIPT)
    port = free_port()
    engine: dict[str, Any] = {"model": str(truth_models["dense"]), "enforce_eager": True, "block_size": 32}
    engine |= {"max_model_len": 1024, "max_num_seqs": 16, **capture(f"127.0.0.1:{port}", LAYER_IDS)}
    with start_server(tmp_path / "data", tmp_path / "server.log", port), connect(f"127.0.0.1:{port}") as client:
        command = [sys.executable, "sessions.py", json.dumps(engine)]
        env = {**os.environ, **SMALL_ENGINE_ENV}
        ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        said = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("SAID "))[5:])
        assert said == [12, 12]
        for sample_id in ("prompt", "outputs"):
            wait_until(lambda sample_id=sample_id: client.stat(sample_id).state is SampleState.FAILED)  # type: ignore[misc]
            assert client.stat(sample_id).error_code == "UNSUPPORTED_REQUEST"
        assert "failed: UNSUPPORTED_REQUEST: the prompt of a streaming input session grows" in ended.stdout + ended.stderr
        sample = client.get("plain")
        assert len(sample.token_ids) == 73
        assert_rows_are_true(sample)
