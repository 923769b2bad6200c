"""How many samples failed under an id that another one has: bounded, and only what will not come again."""

from __future__ import annotations

from slotstream.store import refusals
from slotstream.store.records import Failure, SampleKey
from slotstream.store.refusals import Refusals


def test_failures_for_good_are_counted_by_code() -> None:
    counted = Refusals()
    key, other = SampleKey("n", "s"), SampleKey("m", "s")
    for code, retryable in (("ALREADY_EXISTS", False), ("ALREADY_EXISTS", False), ("INTERRUPTED", True), ("ABORTED", False)):
        counted.note(key, Failure(code, "no", retryable))
    assert counted.of(key) == {"ALREADY_EXISTS": 2, "ABORTED": 1}
    assert counted.of(other) == {}


def test_neither_ids_nor_codes_grow_without_end() -> None:
    counted = Refusals()
    for number in range(refusals._IDS_MAX + 5):
        counted.note(SampleKey("n", f"s{number}"), Failure("ABORTED", "no", False))
    assert len(counted._counts) == refusals._IDS_MAX
    assert counted.of(SampleKey("n", "s4")) == {}
    assert counted.of(SampleKey("n", "s5")) == {"ABORTED": 1}
    key = SampleKey("n", "s5")
    for number in range(100):
        counted.note(key, Failure(f"CODE_{number}", "no", False))
    assert len(counted.of(key)) == refusals._CODES_MAX + 1
    assert sum(counted.of(key).values()) == 101
