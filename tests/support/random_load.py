"""Random requests of every kind the connector must survive, from a seed; and what must be true of each afterwards."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from slotstream.client import Client, Sample, SampleFailed, SampleNotFound
from slotstream.truth.model import Kind
from support.workload import LAYER_IDS, MODEL_NAME, PROMPT_TOKENS_MAX, assert_rows_are_true, text_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """One completion. `abort_after_s`: the client hangs up then; None: it waits for the answer."""

    sample_id: str
    prompt: list[int]
    max_tokens: int
    params: dict[str, Any]
    n: int = 1
    abort_after_s: float | None = None

    @property
    def wants_output(self) -> bool:
        return bool(self.params.get("include_output_tokens"))


@dataclass(slots=True)
class Outcome:
    """What the client saw: the tokens of each sequence and what was said of the sample; nothing after a hang-up."""

    answered: bool
    tokens: list[list[int]] = field(default_factory=list)
    said: dict[str, Any] | None = None


def random_requests(seed: int, count: int, namespace: str) -> list[Request]:
    """`count` requests: any length, shared prefixes, outputs, windows, opt-outs, several sequences, hang-ups."""
    rng = random.Random(seed)
    shared = text_tokens(rng, 512)
    return [_request(rng, f"s{i}", shared, namespace) for i in range(count)]


def long_answers(seed: int, count: int, namespace: str) -> list[Request]:
    """`count` short prompts with texts of 400 tokens: 16 at a time need 224 blocks of 32 tokens; with fewer, vLLM preempts."""
    rng = random.Random(seed)
    return [
        Request(
            f"long{i}",
            text_tokens(rng, 40),
            400,
            {"sample_id": f"long{i}", "namespace": namespace, "include_output_tokens": i % 2 == 1},
        )
        for i in range(count)
    ]


def _request(rng: random.Random, sample_id: str, shared: list[int], namespace: str) -> Request:
    length = rng.choice([1, 2, 31, 32, 33, 64, 65, rng.randrange(1, 300), rng.randrange(1, PROMPT_TOKENS_MAX)])
    prompt = text_tokens(rng, length)
    if rng.random() < 0.4:
        prompt = (shared[: rng.randrange(32, 513)] + prompt)[:PROMPT_TOKENS_MAX]
    params: dict[str, Any] = {"sample_id": sample_id, "namespace": namespace}
    n = 1
    kind = rng.random()
    if kind < 0.35:
        params["include_output_tokens"] = True
    elif kind < 0.5:
        start = rng.randrange(len(prompt))
        params["tokens"] = [start, rng.choice([None, rng.randrange(start + 1, len(prompt) + 1)])]
    elif kind < 0.6:
        params["capture"] = False
    elif kind < 0.65:
        n = 2
    abort = rng.random() * rng.choice([0.05, 0.5, 3.0]) if rng.random() < 0.2 else None
    return Request(sample_id, prompt, rng.choice([1, 2, rng.randrange(1, 60)]), params, n, abort)


def run(port: int, requests: Sequence[Request], at_once: int) -> list[Outcome]:
    """Send them, `at_once` at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda request: _send(port, request), requests))


def _send(port: int, request: Request) -> Outcome:
    body = {
        "model": MODEL_NAME,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "n": request.n,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": {"slotstream": request.params},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=request.abort_after_s or 300.0)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        parsed = json.load(answer)
    except TimeoutError:
        return Outcome(answered=False)
    finally:
        connection.close()
    assert answer.status == 200, parsed
    said = (parsed.get("kv_transfer_params") or {}).get("slotstream")
    return Outcome(True, [choice["token_ids"] for choice in parsed["choices"]], said)


def check(client: Client, request: Request, outcome: Outcome, kind: Kind, layer_ids: Sequence[int] = LAYER_IDS) -> str:
    """Hold one request to its promise, once nothing runs any more; returns committed, failed, absent or not asked."""
    if not request.params.get("capture", True):
        assert outcome.said is None
        return "not asked"
    namespace = request.params["namespace"]
    try:
        sample = client.get(request.sample_id, namespace=namespace, wait_s=0)
    except (SampleFailed, SampleNotFound) as error:
        missing = error
    else:
        _check_sample(sample, request, outcome)
        assert_rows_are_true(sample, kind=kind, layer_ids=layer_ids)
        return "committed"
    assert not outcome.answered, f"{request.sample_id} was answered and is not there: {missing.code}: {missing}"
    if isinstance(missing, SampleFailed):
        assert missing.reason == "ABORTED", missing
        return "failed"
    return "absent"


def _check_sample(sample: Sample, request: Request, outcome: Outcome) -> None:
    start, stop = request.params.get("tokens") or (0, None)
    tokens = sample.token_ids.tolist()
    if request.wants_output:
        if outcome.answered:
            assert tokens in [request.prompt + t[:-1] for t in outcome.tokens]
        else:  # The text was whole when the client hung up: an aborted one leaves no rows.
            assert tokens[: len(request.prompt)] == request.prompt
            assert len(tokens) == len(request.prompt) + request.max_tokens - 1
    else:
        assert tokens == request.prompt[start:stop]
    if outcome.answered:
        assert outcome.said is not None
        assert "error" not in outcome.said
        assert outcome.said["num_tokens"] == len(tokens)
