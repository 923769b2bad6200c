"""Prompts for the truth models, sent to a running vLLM all at once, and samples checked against the truth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from slotstream.client import Client, Sample
from slotstream.demo.processes import complete
from slotstream.truth import model as truth_model

MODEL_NAME = "truth"
LAYER_IDS = [1, 3, truth_model.LAYERS]
FINAL_ID = truth_model.LAYERS + 1  # What "final" is in layer_ids.
PROMPT_TOKENS_MAX = 900


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion to send: a prompt and its `slotstream` params."""

    prompt: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the tokens generated, and what the connector said of the sample (None: nothing)."""

    tokens: list[int]
    said: dict[str, Any] | None


def text_tokens(rng: random.Random, count: int) -> list[int]:
    """`count` random byte tokens of the truth models."""
    first = truth_model.FIRST_TEXT_TOKEN
    return [rng.randrange(first, first + truth_model.TEXT_TOKENS) for _ in range(count)]


def random_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts of 1 to 900 tokens; a third begin with 32 to 512 tokens that all of those share."""
    shared = text_tokens(rng, 512)
    prompts = []
    for i in range(count):
        length = rng.choice([1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, PROMPT_TOKENS_MAX, rng.randrange(1, 900)])
        prompt = text_tokens(rng, length)
        if i % 3 == 0:
            prompt = (shared[: rng.randrange(32, 513)] + prompt)[:PROMPT_TOKENS_MAX]
        prompts.append(prompt)
    return prompts


def send(port: int, asks: Sequence[Ask], at_once: int = 40) -> list[Answer]:
    """Send completions, `at_once` of them at a time; greedy, so that texts can be compared."""

    def one(ask: Ask) -> Answer:
        body = {
            "model": MODEL_NAME,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,  # The tiny models' vocabulary is larger than their tokenizer's: text would say little.
            "kv_transfer_params": {"slotstream": ask.params},
        }
        answer = complete(port, body)
        return Answer(answer["choices"][0]["token_ids"], (answer.get("kv_transfer_params") or {}).get("slotstream"))

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, asks))


def assert_rows_are_true(sample: Sample, *, kind: truth_model.Kind = "dense", layer_ids: Sequence[int] = LAYER_IDS) -> None:
    """Every row of the sample equals the truth of its own token ids; says where the first wrong one is and what it holds."""
    assert sample.hidden_states.shape == (len(sample.token_ids), len(layer_ids), truth_model.HIDDEN)
    assert sample.hidden_states.dtype == torch.bfloat16
    wrong = truth_model.wrong_rows(sample.hidden_states, sample.token_ids, list(layer_ids), kind=kind)
    if len(wrong):
        row = int(wrong[0])
        tokens, layers = truth_model.decode(sample.hidden_states[row])
        raise AssertionError(
            f"{sample.sample_id}: {len(wrong)} of {len(sample.token_ids)} rows are wrong; row {row} should be token "
            f"{int(sample.token_ids[row])}, and spells tokens {tokens.tolist()} of layers {layers.tolist()}"
        )


def check_exact(client: Client, port: int, namespace: str, prompts: Sequence[list[int]]) -> list[Answer]:
    """Send all prompts at once into a fresh namespace; every sample is there, right, and no other is."""
    asks = [Ask(prompt, {"namespace": namespace, "sample_id": f"p{i}"}) for i, prompt in enumerate(prompts)]
    answers = send(port, asks)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.said is not None
        assert "error" not in answer.said, answer.said
        assert answer.said["shape"] == [len(prompt), len(LAYER_IDS), truth_model.HIDDEN]
        sample = client.get(f"p{i}", namespace=namespace)
        assert sample.token_ids.tolist() == prompt
        assert_rows_are_true(sample)
    stored = {info.sample_id: info.state for info in client.list(namespace=namespace)}
    assert stored == {f"p{i}": "COMMITTED" for i in range(len(prompts))}
    return answers
