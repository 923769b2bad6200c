"""Requests of every kind, through every front door of one engine: right rows, or an error that says why not."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from safetensors import safe_open
from support.adapters import TUNED, adapter, assert_rows_are_adapted
from support.idle import assert_idle
from support.outage import metric, scrape
from support.random_load import check, long_answers, random_requests, run
from support.stack import Stack, stack
from support.waiting import wait_until
from support.workload import LAYER_IDS, MODEL_NAME, Ask, assert_rows_are_true, send, text_tokens
from transformers import AutoTokenizer

from slotstream.client import Client, ConfigError, capture, connect
from slotstream.truth import model as truth_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
LONG_ANSWER = 2000
HANG_UPS = int(os.environ.get("SLOTSTREAM_HANG_UPS", "150"))  # `make extended` takes 1,000.


@pytest.fixture(scope="module")
def engine(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    work = tmp_path_factory.mktemp("requests")
    (work / "chat.jinja").write_text(CHAT_TEMPLATE)
    options = [
        "--max-model-len=2304",
        "--num-gpu-blocks-override=80",  # Room for less than three of the longest requests of a random load.
        f"--chat-template={work / 'chat.jinja'}",
        "--scheduling-policy=priority",
        "--enable-scale-out",
        "--enable-lora",
        f"--lora-modules=tuned={adapter(work / 'adapter', TUNED)}",
    ]
    with stack(work, truth_models["dense"], LAYER_IDS, *options, extract=True, one_process=True) as running:
        yield running


@pytest.fixture(scope="module")
def stored(engine: Stack) -> Iterator[Client]:
    with connect(engine.address) as client:
        yield client


def _post(engine: Stack, path: str, body: dict[str, Any]) -> Any:
    """The parsed answer; for a streamed one, its events. `path` is below /v1, unless it begins with a slash."""
    data = json.dumps({"model": MODEL_NAME, "temperature": 0, **body}).encode()
    path = path if path.startswith("/") else f"/v1/{path}"
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine.vllm_port}{path}", data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300.0) as answer:
        if body.get("stream"):
            lines = [line.decode().strip() for line in answer]
            return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return json.load(answer)


def _said(answer: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = answer["kv_transfer_params"]["slotstream"]
    return said


def test_a_long_answers_rows_arrive_while_it_is_being_written(engine: Stack, stored: Client) -> None:
    prompt = text_tokens(random.Random(1), 100)
    params = {"namespace": "long", "sample_id": "s", "include_output_tokens": True}
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.extend(send(engine.vllm_port, [Ask(prompt, params, max_tokens=LONG_ANSWER)]))
    )
    thread.start()
    received: list[float] = []
    while thread.is_alive():
        received.append(metric(scrape(engine.metrics_port), "slotstream_received_bytes_total"))
        time.sleep(0.05)
    thread.join()
    row_bytes = len(LAYER_IDS) * truth_model.HIDDEN * 2
    assert len(set(received)) > LONG_ANSWER // 200  # Again and again, not all at once.
    assert received[-1] - received[0] > LONG_ANSWER * row_bytes // 2
    sample = stored.get("s", namespace="long")
    assert sample.token_ids.tolist() == prompt + answers[0].tokens[:-1]
    assert int(sample.metadata["chunks"]) >= LONG_ANSWER // 64
    assert sample.metadata["finish_reason"] == "length"
    assert_rows_are_true(sample)


def test_decode_steps_of_a_prompt_only_capture_read_and_send_nothing(engine: Stack, stored: Client) -> None:
    names = ("gathers", "chunks", "rows", "samples_opened")

    def counts() -> dict[str, float]:
        page = scrape(engine.vllm_port)
        return {name: metric(page, f"slotstream_connector_{name}_total") for name in names}

    def settle() -> None:  # Counts travel with steps.
        send(engine.vllm_port, [Ask(text_tokens(random.Random(i), 3), {"capture": False}) for i in range(8)], at_once=1)

    settle()
    before = counts()
    prompt = text_tokens(random.Random(2), 150)
    (answer,) = send(engine.vllm_port, [Ask(prompt, {"namespace": "decode", "sample_id": "s"}, max_tokens=300)])
    settle()
    assert len(answer.tokens) == 300
    after = counts()
    # Three steps of at most 64 tokens hold the prompt; the 299 after them leave no trace.
    assert {name: after[name] - before[name] for name in names} == {
        "gathers": 3,
        "chunks": 3,
        "rows": 150,
        "samples_opened": 1,
    }


def test_chat(engine: Stack, stored: Client) -> None:
    messages = [{"role": "user", "content": "What does a row spell?"}]
    body = {"messages": messages, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    answer = _post(engine, "chat/completions", {**body, "kv_transfer_params": {"slotstream": {"namespace": "chat"}}})
    said = _said(answer)
    sample = stored.get(said["sample_id"], namespace="chat")
    assert sample.token_ids.tolist() == answer["prompt_token_ids"]
    assert_rows_are_true(sample)


def test_the_mask_of_a_chat_is_of_the_engines_own_tokens(engine: Stack, stored: Client, truth_models: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(truth_models["dense"])
    chat = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "Rows."},
        {"role": "user", "content": "And?"},
    ]
    request: dict[str, Any] = {"model": MODEL_NAME, "messages": chat, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    params = {"namespace": "chat", "include_output_tokens": True, "loss_mask": "assistant"}
    with OpenAI(base_url=f"http://127.0.0.1:{engine.vllm_port}/v1", api_key="none") as openai_client:

        def captured(template: str) -> Any:
            tokenizer.chat_template = template
            return capture(openai_client, client=stored, slotstream=params, tokenizer=tokenizer, **request)

        _, sample = captured(CHAT_TEMPLATE)
        texts = [tokenizer.decode([token]) for token in sample.token_ids.tolist()]
        prompt = "user: What?\nassistant: Rows.\nuser: And?\n"
        assert "".join(texts).startswith(prompt)
        counted = ["".join(texts[: i + 1]) for i, counts in enumerate(sample.loss_mask.tolist()) if counts]
        assert counted[0].endswith("What?\na")
        assert counted[len("assistant: Rows.\n") - 1] == "user: What?\nassistant: Rows.\n"
        assert len(counted) == len("assistant: Rows.\n") + 7  # The output's, but for the last token.
        with pytest.raises(ConfigError, match="the engine makes other tokens of this chat than the tokenizer, from token 0 on"):
            captured(CHAT_TEMPLATE.replace("message['role']", "message['role'] | upper"))


_TEXT = "Rows, one after the other."
_MESSAGES = [{"role": "user", "content": _TEXT}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": _TEXT, "max_tokens": 40, "ignore_eos": True}),
        ("chat/completions", {"messages": _MESSAGES, "max_tokens": 40, "ignore_eos": True}),
        ("responses", {"input": _TEXT, "max_output_tokens": 40, "ignore_eos": True}),
        ("messages", {"messages": _MESSAGES, "max_tokens": 40}),
        (
            "/inference/v1/generate",
            {"token_ids": list(range(100, 180)), "sampling_params": {"max_tokens": 40, "ignore_eos": True}},
        ),
    ],
    ids=["completions", "chat", "responses", "messages", "generate"],
)
def test_a_streamed_answer_leaves_its_sample_under_the_chosen_id(
    engine: Stack, stored: Client, path: str, body: dict[str, Any]
) -> None:
    params: dict[str, Any] = {"namespace": "sse", "sample_id": path.strip("/").replace("/", "."), "include_output_tokens": True}
    events = _post(engine, path, {**body, "stream": True, "kv_transfer_params": {"slotstream": params}})
    assert len(events) > 5
    said = [event["type"] for event in events if "slotstream" in json.dumps(event)]
    assert said == (["response.completed"] if path == "responses" else [])  # As docs/requests.md has it.
    sample = stored.get(params["sample_id"], namespace="sse")
    assert len(sample.token_ids) == int(sample.metadata["prompt_tokens"]) + 39
    assert_rows_are_true(sample)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("responses", {"input": "What does a row spell?", "max_output_tokens": 8}),
        ("messages", {"messages": [{"role": "user", "content": "What does a row spell?"}], "max_tokens": 8}),
        (
            "/inference/v1/generate",
            {"token_ids": list(range(100, 180)), "sampling_params": {"temperature": 0, "max_tokens": 8}},
        ),
    ],
    ids=["responses", "messages", "generate"],
)
def test_other_front_doors(engine: Stack, stored: Client, path: str, body: dict[str, Any]) -> None:
    params = {"namespace": "doors", "tags": {"door": path.rsplit("/")[-1]}}
    said = _said(_post(engine, path, {**body, "kv_transfer_params": {"slotstream": params}}))
    sample = stored.get(said["sample_id"], namespace="doors")
    assert len(sample.token_ids) == said["num_tokens"] > 20
    assert sample.tags == params["tags"]
    assert_rows_are_true(sample)


def test_each_step_of_a_beam_search_is_a_request_of_its_own(engine: Stack, stored: Client) -> None:
    """vLLM passes no parameters on to them: they are captured as requests that do not say."""
    prompt = text_tokens(random.Random(17), 70)
    before = {info.sample_id for info in stored.list(namespace="default")}
    body = {"prompt": prompt, "use_beam_search": True, "n": 2, "max_tokens": 3}
    params = {"namespace": "beams", "sample_id": "s"}
    _post(engine, "completions", {**body, "kv_transfer_params": {"slotstream": params}})
    assert not list(stored.list(namespace="beams"))

    def listed() -> list[str]:  # The answer may be here before the last one is.
        return [info.sample_id for info in stored.list(namespace="default") if info.sample_id not in before]

    wait_until(lambda: len(listed()) >= 1 + 2 + 2, "a sample for each step")
    steps = listed()
    assert len(steps) == 1 + 2 + 2
    for step in steps:
        sample = stored.get(step)
        assert sample.token_ids.tolist()[:70] == prompt
        assert_rows_are_true(sample)


def test_several_prompts_in_one_request_get_a_sample_each(engine: Stack, stored: Client) -> None:
    prompts = [text_tokens(random.Random(3 + i), 40 + i) for i in range(3)]
    params = {"namespace": "batch", "tags": {"batch": "1"}}
    _post(engine, "completions", {"prompt": prompts, "max_tokens": 2, "kv_transfer_params": {"slotstream": params}})

    def listed() -> list[str]:  # Their ids are vLLM's own; the answer may be here before the last one is.
        return [info.sample_id for info in stored.list(namespace="batch", tags={"batch": "1"})]

    wait_until(lambda: len(listed()) == len(prompts), "a sample for each prompt")
    samples = [stored.get(sample_id, namespace="batch") for sample_id in listed()]
    assert sorted(s.token_ids.tolist() for s in samples) == sorted(prompts)
    for sample in samples:
        assert_rows_are_true(sample)


def test_prompts_that_share_a_sample_id_are_not_lost_without_a_word(engine: Stack, stored: Client) -> None:
    prompts = [text_tokens(random.Random(30 + i), 40 + i) for i in range(3)]
    params = {"namespace": "shared", "sample_id": "s", "tags": {"batch": "1"}}
    _post(engine, "completions", {"prompt": prompts, "max_tokens": 2, "kv_transfer_params": {"slotstream": params}})
    assert stored.get("s", namespace="shared").token_ids.tolist() in prompts  # Waits until the server has heard of it.
    wait_until(lambda: stored.stat("s", namespace="shared").refused == {"ALREADY_EXISTS": 2}, "the two others to be counted")
    assert engine.engine is not None
    assert "sample s failed: ALREADY_EXISTS: " in (engine.work / "vllm.log").read_text()


def test_a_refused_request_is_listed_as_failed(engine: Stack, stored: Client) -> None:
    params = {"namespace": "refused", "sample_id": "s", "tokens": [0, 999], "tags": {"k": "v"}}
    answer = _post(engine, "completions", {"prompt": [5] * 40, "max_tokens": 2, "kv_transfer_params": {"slotstream": params}})
    assert answer["kv_transfer_params"]["slotstream"]["error"]["code"] == "BAD_TOKEN_RANGE"
    wait_until(lambda: bool(list(stored.list(namespace="refused", state="failed"))), "the refused one to be listed")
    (info,) = stored.list(namespace="refused", state="failed", tags={"k": "v"})
    assert (info.sample_id, info.error_code) == ("s", "BAD_TOKEN_RANGE")


def test_a_misspelt_key_is_said_in_the_answer(engine: Stack, stored: Client) -> None:
    body = {"prompt": [5] * 40, "max_tokens": 2, "kv_transfer_params": {"slotstrem": {"sample_id": "mine"}}}
    said = _said(_post(engine, "completions", body))
    assert "the key 'slotstrem', which nobody reads" in said["warning"]
    assert stored.get(said["sample_id"]).token_ids.tolist() == [5] * 40
    assert (engine.work / "vllm.log").read_text().count("the key 'slotstrem', which nobody reads") == 1


def test_n_sequences_get_a_sample_each_when_their_output_is_captured(engine: Stack, stored: Client) -> None:
    prompt = text_tokens(random.Random(7), 70)
    params = {"namespace": "n", "sample_id": "s", "include_output_tokens": True}
    body = {"prompt": prompt, "n": 3, "max_tokens": 20, "ignore_eos": True, "temperature": 1.0}
    answer = _post(engine, "completions", {**body, "return_token_ids": True, "kv_transfer_params": {"slotstream": params}})
    texts = [choice["token_ids"] for choice in answer["choices"]]
    for index, sample_id in enumerate(("s", "s.1", "s.2")):
        sample = stored.get(sample_id, namespace="n")
        assert sample.token_ids.tolist() == prompt + texts[index][:-1]
        assert sample.metadata.get("sequence_index", "0") == str(index)
        assert_rows_are_true(sample)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("logprobs", {"prompt_logprobs": 2, "logprobs": 3}),
        ("structured", {"structured_outputs": {"regex": "[ab]{20}"}}),
        ("min-tokens", {"min_tokens": 10, "max_tokens": 12}),
        ("priority", {"priority": -5}),
        ("one-token-prompt", {"prompt": [9]}),
        ("echo", {"echo": True}),
    ],
)
def test_a_request_of_this_kind_is_captured_like_any_other(
    engine: Stack, stored: Client, kind: str, more: dict[str, Any]
) -> None:
    prompt = text_tokens(random.Random(kind), 130)
    params = {"namespace": "kinds", "sample_id": kind, "include_output_tokens": True}
    body = {"prompt": prompt, "max_tokens": 20, "return_token_ids": True, **more}
    answer = _post(engine, "completions", {**body, "kv_transfer_params": {"slotstream": params}})
    said = _said(answer)
    assert "error" not in said
    sample = stored.get(kind, namespace="kinds")
    assert sample.token_ids.tolist() == body["prompt"] + answer["choices"][0]["token_ids"][:-1]
    assert len(sample.token_ids) == said["num_tokens"]
    assert_rows_are_true(sample)


def test_a_text_that_a_stop_token_ends_has_the_rows_before_it(engine: Stack, stored: Client) -> None:
    """As the end-of-text token would: the request ends while, under asynchronous scheduling, its next step is in flight."""
    prompt = text_tokens(random.Random(31), 60)
    (free,) = send(engine.vllm_port, [Ask(prompt, {"capture": False}, max_tokens=60)])
    for number, at in enumerate((1, 20, 45)):
        stop = free.tokens[at]
        params = {"namespace": "eos", "sample_id": f"s{number}", "include_output_tokens": True}
        body = {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True, "stop_token_ids": [stop]}
        answer = _post(engine, "completions", {**body, "kv_transfer_params": {"slotstream": params}})
        text = answer["choices"][0]["token_ids"]
        assert text == free.tokens[: free.tokens.index(stop) + 1]
        sample = stored.get(f"s{number}", namespace="eos")
        assert sample.token_ids.tolist() == prompt + text[:-1]
        assert sample.metadata["finish_reason"] == "stop"
        assert_rows_are_true(sample)


def test_a_lora_is_named_and_its_rows_are_the_adapted_models(engine: Stack, stored: Client) -> None:
    prompt = text_tokens(random.Random(11), 90)
    params = {"namespace": "lora", "sample_id": "s"}
    _post(
        engine,
        "completions",
        {"model": "tuned", "prompt": prompt, "max_tokens": 4, "kv_transfer_params": {"slotstream": params}},
    )
    sample = stored.get("s", namespace="lora")
    assert sample.metadata["lora_name"] == "tuned"
    assert_rows_are_adapted(sample, TUNED, LAYER_IDS)


def test_clients_hang_up_at_any_moment_and_nothing_leaks(engine: Stack, stored: Client) -> None:
    rng = random.Random(21)
    requests = [
        replace(
            request,
            max_tokens=rng.choice([1, 20, 400]),
            abort_after_s=rng.random() * rng.choice([0.02, 0.3, 1.5]),
            params={**request.params, "include_output_tokens": rng.random() < 0.5, "tokens": None},
        )
        for request in random_requests(21, HANG_UPS, "aborts")
    ]
    outcomes = run(engine.vllm_port, requests, at_once=40)
    assert sum(not outcome.answered for outcome in outcomes) > HANG_UPS // 2
    assert_idle(engine)
    states = {check(stored, request, outcome, "dense") for request, outcome in zip(requests, outcomes, strict=True)}
    assert {"failed", "absent"} & states


def test_a_random_load_is_stored_right_though_the_cache_is_too_small_for_it(engine: Stack, stored: Client) -> None:
    requests = [*long_answers(1, 16, "load"), *random_requests(1, 84, "load")]
    outcomes = run(engine.vllm_port, requests, at_once=24)
    assert_idle(engine)
    states = Counter(check(stored, *pair, "dense") for pair in zip(requests, outcomes, strict=True))
    assert states["committed"] >= 50, states
    assert metric(scrape(engine.vllm_port), "vllm:num_preemptions_total") > 0


def test_a_sample_says_what_it_is_in_its_file_alone(engine: Stack, stored: Client) -> None:
    prompt = text_tokens(random.Random(13), 200)
    for name in ("first", "again"):
        params = {"namespace": "self", "sample_id": name, "include_output_tokens": True, "tokens": [10, None]}
        body = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True, "seed": 77}
        _post(engine, "completions", {**body, "kv_transfer_params": {"slotstream": params}})
        stored.get(name, namespace="self")
    (path,) = (engine.work / "data" / "self").rglob("again.safetensors")
    with safe_open(path, "pt") as file:
        said = file.metadata()
    told = {
        "model": MODEL_NAME,
        "token_start": "10",
        "prompt_tokens": "200",
        "prefix_hit_tokens": "192",
        "sampling_seed": "77",
        "finish_reason": "length",
        "final_norm_applied": "false",
        "num_hidden_layers": str(truth_model.LAYERS),
        "layer_ids": json.dumps(LAYER_IDS, separators=(",", ":")),
    }
    assert {key: said[key] for key in told} == told
    assert said["engine_id"]
    assert said["vllm_version"]
    assert said["slotstream_version"]
    assert "model_revision" in said
