"""What is sent to the engine: prompts of all lengths, shared beginnings, and texts that outgrow the KV cache together."""

from __future__ import annotations

import http.client
import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from slotstream.certify.flags import MODEL_NAME
from slotstream.certify.sizes import Sizes
from slotstream.demo.processes import open_here
from slotstream.truth.model import FIRST_TEXT_TOKEN, TEXT_TOKENS

NAMESPACE = "certify"
AT_ONCE = 24
LONG_AT_ONCE_MAX = 64
ROUNDS = 3  # Of long texts, until something is preempted.
_OUTPUT_MAX = 48
_REQUEST_S_MAX = 1800.0


@dataclass(frozen=True, slots=True)
class Request:
    """One completion. `outputs`: the output's rows are captured, too. Without `capture` none is."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int = 1
    outputs: bool = False
    capture: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request: the text's tokens, and what the connector says. `failure`: why there is none, else ""."""

    request: Request
    tokens: tuple[int, ...] = ()
    said: dict[str, Any] | None = None
    failure: str = ""


class EngineLost(Exception):
    """The engine takes no connection any more."""


def text(rng: random.Random, count: int) -> tuple[int, ...]:
    """`count` random tokens that the tokenizer knows."""
    return tuple(rng.randrange(FIRST_TEXT_TOKEN, FIRST_TEXT_TOKEN + TEXT_TOKENS) for _ in range(count))


def mixed(rng: random.Random, count: int, sizes: Sizes) -> list[Request]:
    """Prompts of all lengths, many longer than a step; a third begin alike, and half have their output captured."""
    room = sizes.tokens_max - _OUTPUT_MAX
    shared = text(rng, room // 2)
    found = []
    for number in range(count):
        length = rng.choice([1, 2, 31, 32, 33, 64, 129, rng.randrange(1, room), rng.randrange(1, room)])
        if sizes.step_tokens is not None and number % 3 == 1:
            length = rng.randrange(min(sizes.step_tokens + 1, room), room + 1)
        prompt = text(rng, min(length, room))
        if number % 3 == 0:
            prompt = (shared[: rng.randrange(len(shared) // 4, len(shared)) + 1] + prompt)[:room]
        found.append(Request(f"mixed-{number}", prompt, rng.randrange(1, _OUTPUT_MAX + 1), number % 2 == 1))
    return found


def alike(rng: random.Random, sizes: Sizes) -> Iterator[list[Request]]:
    """In turns: a prompt, then such as begin like it, captured ones and others."""
    shared = text(rng, (sizes.tokens_max - _OUTPUT_MAX) * 2 // 3)
    rest = sizes.tokens_max - _OUTPUT_MAX - len(shared)
    yield [Request("alike-first", shared + text(rng, 1), 2)]
    for turn in range(2):
        yield [
            Request(f"alike-{turn}-{n}", shared + text(rng, rng.randrange(1, rest)), 8, n % 4 == 1, capture=n % 2 == 1)
            for n in range(8)
        ]


def long_texts(rng: random.Random, turn: int, cache_tokens: int, sizes: Sizes) -> list[Request]:
    """Short prompts with texts so long that together they do not fit a cache of so many tokens: more so in each turn."""
    count = max(2, min(LONG_AT_ONCE_MAX, sizes.sequences))
    prompt = min(40, sizes.tokens_max // 4)
    wanted = int(cache_tokens * 1.5 * 2**turn / count)
    output = max(64, min(wanted, sizes.tokens_max - prompt - 1))
    output = min(output, sizes.tokens_max - prompt - 1)
    return [Request(f"long-{turn}-{n}", text(rng, prompt), output, n % 2 == 0) for n in range(count)]


def send(port: int, requests: Sequence[Request], at_once: int, told: Callable[[], None]) -> list[Answer]:
    """Sends them, `at_once` at a time; the answers in the order of `requests`. Raises EngineLost."""
    pool = ThreadPoolExecutor(max(1, min(at_once, len(requests))))
    try:
        futures = [pool.submit(_send, port, request) for request in requests]
        for future in as_completed(futures):
            future.result()
            told()
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _send(port: int, request: Request) -> Answer:
    params = {"namespace": NAMESPACE, "sample_id": request.name, "include_output_tokens": request.outputs}
    body = {
        "model": MODEL_NAME,
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,  # The tokenizer knows few of the model's tokens: the text would say little.
        "kv_transfer_params": {"slotstream": {**params, "capture": True} if request.capture else {"capture": False}},
    }
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with open_here(asked, _REQUEST_S_MAX) as answer:
            parsed = json.load(answer)
    except urllib.error.HTTPError as error:
        return Answer(request, failure=f"HTTP {error.code}: {_short(error.read())}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EngineLost(f"the engine went away: {type(error).__name__}: {error}") from error
    said = (parsed.get("kv_transfer_params") or {}).get("slotstream")
    return Answer(request, tuple(parsed["choices"][0]["token_ids"]), said if isinstance(said, dict) else None)


def _short(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:300]


def metrics(port: int) -> str:
    """vLLM's own page of counts. Raises EngineLost."""
    try:
        with open_here(f"http://127.0.0.1:{port}/metrics", 30.0) as answer:
            return str(answer.read().decode())
    except (OSError, http.client.HTTPException) as error:
        raise EngineLost(f"the engine tells no counts: {type(error).__name__}: {error}") from error


def counted(page: str, name: str) -> float:
    """The sum over all engines of a count of that page; 0 without."""
    lines = (line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def label(page: str, name: str, key: str) -> str | None:
    """A label of a metric that tells facts."""
    for line in page.splitlines():
        if line.startswith(f"{name}{{"):
            found = line.partition(f'{key}="')
            return found[2].partition('"')[0] if found[1] else None
    return None
