"""How `slotstream certify` compares what an engine stored: samples of a real server, right ones and such with one fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.workload import text_tokens

from slotstream.certify import answers
from slotstream.certify.findings import Findings
from slotstream.certify.load import Answer, Request
from slotstream.client import Client, connect
from slotstream.truth import model as truth_model
from slotstream.truth.compare import Truth

TRUTH = Truth("dense", 6)
LAYER_IDS = (1, 3, 6, TRUTH.final_id)
PROMPT, OUTPUT = text_tokens(random.Random(8), 40), text_tokens(random.Random(9), 9)
TOKENS = PROMPT + OUTPUT[:-1]

Change = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class TruthSample(SyntheticSample):
    """A sample of the truth model, with its rows changed."""

    held: tuple[int, ...] = tuple(TOKENS)
    change: Change = lambda rows: rows

    @property
    def token_ids(self) -> list[int]:
        return list(self.held)

    def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
        rows = truth_model.expected(torch.tensor(self.held), self.layer_ids)
        changed = self.change(rows)
        rows = (rows if changed is None else changed)[start:stop]
        return bytes(rows.contiguous().view(torch.uint8).flatten().tolist())


def stored(name: str, namespace: str, change: Change = lambda rows: rows, tokens: list[int] = TOKENS) -> TruthSample:
    return TruthSample(
        name, namespace, layer_ids=LAYER_IDS, hidden_size=256, num_tokens=len(tokens), held=tuple(tokens), change=change
    )


def answer(name: str, said: dict[str, Any] | None = {"sample_id": "x"}) -> Answer:  # noqa: B006
    return Answer(Request(name, tuple(PROMPT), len(OUTPUT), outputs=True), tuple(OUTPUT), said)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with connect(server.address) as connected:
        yield connected


def check(client: Client, namespace: str, *given: Answer) -> Findings:
    findings = Findings()
    answers.check(client, given, LAYER_IDS, TRUTH, findings, lambda: None, namespace=namespace, wait_s=0.0)
    return findings


def test_right_samples_are_counted(client: Client, ingest: IngestClient, namespace: str) -> None:
    ingest.store(stored("a", namespace), stored("b", namespace))
    uncaptured = Answer(Request("c", tuple(PROMPT), 1, capture=False), (5,))
    found = check(client, namespace, answer("a"), answer("b"), uncaptured)
    assert found.clean
    assert (found.samples, found.rows, found.output_rows, found.wrong, found.lost) == (2, 96, 16, 0, 0)


def _swap(rows: torch.Tensor) -> None:
    rows[29, [0, 1]] = rows[29, [1, 0]]


def _flip(rows: torch.Tensor) -> None:
    rows.view(torch.int16)[29, 1, 99] ^= 1


def _shift(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat((rows[:29], rows[29:].roll(1, 0)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_swap, "layer 1: this is layer 3 of"),
        (_flip, "layer 3: element 99 is "),
        (_shift, "layer 1: this is the row of token "),
    ],
    ids=["swapped", "flipped", "shifted"],
)
def test_a_wrong_row_is_named(change: Change, said: str, client: Client, ingest: IngestClient, namespace: str) -> None:
    ingest.store(stored("a", namespace), stored("b", namespace, change))
    found = check(client, namespace, answer("a"), answer("b"))
    first = found.problems[0]
    assert (first.code, first.sample, first.row) == ("WRONG_ROW", "b", 29)
    assert said in first.message
    assert found.counts["WRONG_ROW"] == found.wrong == (19 if change is _shift else 1)


def test_rows_of_another_token_are_named_though_they_are_right_for_it(
    client: Client, ingest: IngestClient, namespace: str
) -> None:
    """The whole sample is shifted by one: rows and token ids fit each other, and not the request."""
    ingest.store(stored("a", namespace, tokens=TOKENS[1:]))
    found = check(client, namespace, answer("a"))
    assert [(one.code, one.row) for one in found.problems] == [("WRONG_TOKENS", 0)]
    assert found.lost == 1


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"sample_id": "a"}, "NOT_FOUND: "),
        ({"error": {"code": "STAGING_FULL", "message": "no room"}}, "STAGING_FULL: no room"),
        (None, "the answer says nothing of a capture"),
    ],
)
def test_a_lost_sample_is_named(said: dict[str, Any] | None, why: str, client: Client, namespace: str) -> None:
    found = check(client, namespace, answer("a", said))
    (problem,) = found.problems
    assert (problem.code, problem.sample, problem.row) == ("LOST", "a", 0)
    assert problem.message.startswith(f"rows 0 to 47 are not there: {why}")
    assert found.lost == 48


def test_a_failed_sample_says_its_own_code(client: Client, ingest: IngestClient, namespace: str) -> None:
    ingest.fail(stored("a", namespace))
    (problem,) = check(client, namespace, answer("a")).problems
    assert "SLOT_MISMATCH" in problem.message


def test_other_layers_and_samples_that_nobody_asked_for(client: Client, ingest: IngestClient, namespace: str) -> None:
    ingest.store(SyntheticSample("a", namespace), stored("b", namespace))
    found = check(client, namespace, answer("a"), Answer(Request("c", (5,)), failure="HTTP 400: no"))
    assert [(one.code, one.sample) for one in found.problems] == [("WRONG_LAYERS", "a"), ("REFUSED", "c"), ("UNASKED", "b")]
    assert found.problems[0].message == "layers 1,2,4, and not 1,3,6,final"
