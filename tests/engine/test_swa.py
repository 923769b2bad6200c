"""The main job on a sliding-window hybrid: three KV-cache groups, the hidden states with a block size of their own."""

from __future__ import annotations

import random

import pytest
from support.outage import capture_is_refused, capture_works
from support.stack import Stack
from support.workload import Ask, assert_rows_are_true, check_exact, random_prompts, send, text_tokens

from slotstream.client import Client

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_an_engine_that_starts_without_a_server_serves_and_captures_once_it_is_there(swa: Stack) -> None:
    """First in the module: it starts the server."""
    assert swa.server is None
    capture_is_refused(swa, "start")
    swa.serve()
    capture_works(swa, "started")


def test_every_row_is_right_and_again_when_nearly_everything_is_a_prefix_hit(swa: Stack, client: Client) -> None:
    prompts = random_prompts(random.Random(11), 40)
    first = check_exact(client, swa.vllm_port, "first", prompts)
    second = check_exact(client, swa.vllm_port, "second", prompts)
    assert [a.tokens for a in first] == [a.tokens for a in second]
    assert sum(int(info.metadata["prefix_hit_tokens"]) for info in client.list(namespace="second")) > 0


def test_output_rows_are_those_of_the_confirmed_text(swa: Stack, client: Client) -> None:
    prompt = text_tokens(random.Random(12), 90)
    (answer,) = send(swa.vllm_port, [Ask(prompt, {"sample_id": "o", "include_output_tokens": True}, max_tokens=120)])
    assert answer.said is not None
    sample = client.get("o")
    assert len(answer.tokens) == 120
    assert sample.token_ids.tolist() == prompt + answer.tokens[:-1]
    assert_rows_are_true(sample)
