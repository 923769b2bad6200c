"""docs/guarantees.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
GUARANTEES = (TESTS.parent / "docs" / "guarantees.md").read_text()


def test_every_promise_names_tests_that_exist() -> None:
    promises = [
        line for line in GUARANTEES.splitlines() if line.startswith("| ") and not line.startswith(("| promise", "| ---"))
    ]
    assert len(promises) > 30
    for promise in promises:
        named = re.findall(r"`([a-z/]+/test_\w+\.py)(?:::(\w+))?`", promise)
        assert named, promise
        for file, test in named:
            source = (TESTS / file).read_text()
            assert not test or f"def {test}(" in source, f"{file}::{test}"
