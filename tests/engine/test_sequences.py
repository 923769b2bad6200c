"""Which of a request's `n` sequences is which, by ids that vLLM makes: each gets a sample with its own output rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from support.offline import capture
from support.real_scheduler import RealScheduler, real_scheduler
from support.stack import stack
from support.workload import LAYER_IDS, MODEL_NAME, assert_rows_are_true

from slotstream.client import Client, connect
from slotstream.connector.reading import caller_ids
from slotstream.demo.processes import SMALL_ENGINE_ENV, complete, free_port, start_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

RANDOM = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
ENDS = [pytest.param("0", id="random ends"), pytest.param("1", id="no random ends")]
PROMPT = [3 + i % 200 for i in range(70)]


@pytest.fixture
def vllm(truth_models: dict[str, Path]) -> Iterator[RealScheduler]:
    with real_scheduler(truth_models["dense"]) as made:
        yield made


def _send(vllm: RealScheduler, caller_id: str, n: int, **params: Any) -> list[str]:
    """What vLLM's front end makes of a request, sent to the scheduler; the ids of its sequences."""
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    request = vllm.request(caller_id, PROMPT, 4, {"slotstream": {"include_output_tokens": True, **params}}, n=n)
    InputProcessor.assign_request_id(request)
    children = [request]
    if n > 1:
        parent = ParentRequest(request)
        children = [copy(request) for _ in range(n)]
        for index, child in enumerate(children):
            child.request_id, child.sampling_params = parent.get_child_info(index)
    for child in children:
        vllm.send(child)
    vllm.run()
    return [child.request_id for child in children]


@pytest.mark.parametrize("off", ENDS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("caller_id", ["0", "cmpl-1-0", "12_7", "1_12_7", "x-0123abcd"])
def test_each_sequence_has_the_sample_that_was_asked_for(
    vllm: RealScheduler, caller_id: str, n: int, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RANDOM, off)
    samples = [vllm.samples[req_id].opened for req_id in _send(vllm, caller_id, n, sample_id="mine")]
    assert [opened and opened.sample_id for opened in samples] == ["mine", "mine.1", "mine.2"][:n]
    assert [opened and opened.metadata.get("sequence_index", "0") for opened in samples] == ["0", "1", "2"][:n]


@pytest.mark.parametrize("off", ENDS)
def test_where_the_callers_id_cannot_be_had_only_default_ids_go_on(
    truth_models: dict[str, Path], off: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.request import Request

    monkeypatch.setenv(RANDOM, off)
    with monkeypatch.context() as patched:  # A vLLM that calls it otherwise.
        patched.setattr(Request, "from_engine_core_request", classmethod(lambda cls, core_request, hasher: None))
        caller_ids.keep_caller_ids()
    assert "has no Request.from_engine_core_request(request, ...) as slotstream knows it" in caplog.text
    made = Request.from_engine_core_request
    monkeypatch.setattr(Request, "from_engine_core_request", getattr(made, "__wrapped__", made))
    monkeypatch.setattr(caller_ids, "find", lambda module, name, extraction: object)
    with real_scheduler(truth_models["dense"]) as vllm:
        for req_id in _send(vllm, "a", 3, sample_id="mine"):
            error = vllm.said(req_id)["error"]
            assert error["code"] == "UNSUPPORTED_REQUEST"
            assert "does not say whether the request is one of several sequences" in error["message"]
        for req_id in _send(vllm, "b", 3):
            opened = vllm.samples[req_id].opened
            assert opened is not None
            assert opened.sample_id == req_id
            assert "sequence_index" not in opened.metadata
        (req_id,) = _send(vllm, "c", 1, sample_id="mine")
        assert vllm.said(req_id)["sample_id"] == "mine"


def _check(client: Client, namespace: str, prompt: list[int], texts: list[list[int]]) -> None:
    for index, text in enumerate(texts):
        sample = client.get(f"mine.{index}" if index else "mine", namespace=namespace, wait_s=30)
        assert sample.token_ids.tolist() == prompt + text[:-1]
        assert sample.metadata.get("sequence_index", "0") == str(index)
        assert_rows_are_true(sample)


@pytest.mark.extended
@pytest.mark.parametrize("off", ENDS)
def test_each_sequence_of_a_completion_is_stored(off: str, truth_models: dict[str, Path], tmp_path: Path) -> None:
    with stack(tmp_path, truth_models["dense"], LAYER_IDS, env={RANDOM: off}) as running, connect(running.address) as client:
        for n in (1, 3):
            params = {"namespace": f"n{n}", "sample_id": "mine", "include_output_tokens": True}
            body: dict[str, Any] = {
                "model": MODEL_NAME,
                "prompt": PROMPT,
                "n": n,
                "max_tokens": 20,
                "ignore_eos": True,
                "temperature": 1.0,
            }
            body |= {"return_token_ids": True, "kv_transfer_params": {"slotstream": params}}
            _check(client, f"n{n}", PROMPT, [choice["token_ids"] for choice in complete(running.vllm_port, body)["choices"]])


_SCRIPT = """
import asyncio, json, sys
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

def params(how, n, **kind):
    asked = {"namespace": f"{how}{n}", "sample_id": "mine", "include_output_tokens": True}
    extra = {"kv_transfer_params": {"slotstream": asked}}
    return SamplingParams(n=n, temperature=1.0, max_tokens=20, ignore_eos=True, extra_args=extra, **kind)

async def generate(engine, prompt, n):
    asked = params("async", n, output_kind=RequestOutputKind.FINAL_ONLY)
    async for last in engine.generate({"prompt_token_ids": prompt}, asked, f"12_{n}"):
        pass
    return [list(o.token_ids) for o in last.outputs]

async def many(asked):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**asked["engine"]))
    try:
        return {n: await generate(engine, asked["prompt"], n) for n in (1, 3)}
    finally:
        engine.shutdown()

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    if asked["how"] == "async":
        said = asyncio.run(many(asked))
    else:
        llm = LLM(**asked["engine"])
        said = {}
        for n in (1, 3):
            (answer,) = llm.generate([{"prompt_token_ids": asked["prompt"]}], params("llm", n), use_tqdm=False)
            said[n] = [list(o.token_ids) for o in answer.outputs]
    print("SAID " + json.dumps(said), flush=True)
"""


@pytest.mark.extended
@pytest.mark.parametrize("off", ENDS)
@pytest.mark.parametrize("how", ["llm", "async"])
def test_each_sequence_of_offline_inference_is_stored(
    how: str, off: str, truth_models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "offline.py").write_text(_SCRIPT)
    port = free_port()
    engine: dict[str, Any] = {
        "model": str(truth_models["dense"]),
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 1024,
    }
    engine |= {"max_num_seqs": 16, "served_model_name": MODEL_NAME, **capture(f"127.0.0.1:{port}", LAYER_IDS)}
    asked = json.dumps({"how": how, "engine": engine, "prompt": PROMPT})
    with start_server(tmp_path / "data", tmp_path / "server.log", port), connect(f"127.0.0.1:{port}") as client:
        command = [sys.executable, "offline.py", asked]
        env = {**os.environ, **SMALL_ENGINE_ENV, RANDOM: off}
        ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        said = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("SAID "))[5:])
        for n, texts in said.items():
            assert len(texts) == int(n)
            _check(client, f"{how}{n}", PROMPT, texts)
