"""docs/guarantees.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
GUARANTEES = (TESTS.parent / "docs" / "guarantees.md").read_text()


_NAMED = re.compile(r"`([a-z/]+/test_\w+\.py)(?:::(\w+))?`")


def _rows() -> list[list[str]]:
    lines = [line for line in GUARANTEES.splitlines() if line.startswith("| ") and not line.startswith(("| promise", "| ---"))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def _check_that_they_exist(named: list[tuple[str, str]]) -> None:
    for file, test in named:
        source = (TESTS / file).read_text()
        assert not test or f"def {test}(" in source, f"{file}::{test}"


def test_every_promise_names_tests_that_exist() -> None:
    promises = _rows()
    assert len(promises) > 30
    for promise, proved_by, *_ in promises:
        named = _NAMED.findall(proved_by)
        assert named, promise
        _check_that_they_exist(named)


def test_every_promise_about_samples_at_rest_says_what_holds_with_a_bucket() -> None:
    of_store = [(promise, cell) for promise, _, *rest in _rows() for cell in rest]
    assert len(of_store) > 60
    for promise, cell in of_store:
        named = _NAMED.findall(cell)
        assert named or cell == "the same" or cell.startswith("differs: "), promise
        _check_that_they_exist(named)
    assert sum(cell != "the same" for _, cell in of_store) > 40
