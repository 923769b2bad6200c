"""What the log says of samples that failed: the first of a code at once, all others within a minute."""

from __future__ import annotations

import pytest

from slotstream.connector.counters import Counters
from slotstream.connector.faults import Faults, SampleFault


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


def test_no_failure_goes_without_a_word(clock: _Clock, caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(Counters(), clock)
    for number in range(3):
        faults.add(f"s{number}", SampleFault(f"r{number}", "ALREADY_EXISTS", f"taken {number}"))
    faults.add("t", SampleFault("r9", "BAD_PARAMS", "a typo"))
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "slotstream: sample s0 failed: ALREADY_EXISTS: taken 0",
        "slotstream: sample t failed: BAD_PARAMS",  # Its message may quote what the request said.
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    clock.now += 59
    faults.tick()
    assert len(caplog.records) == 2
    clock.now += 1
    faults.tick()
    faults.tick()
    assert [record.getMessage() for record in caplog.records[2:]] == [
        "slotstream: sample s2 failed: ALREADY_EXISTS: taken 2 (1 more with this code since the last such line)"
    ]
    assert [fault.req_id for fault in faults.take()] == ["r0", "r1", "r2", "r9"]


def test_a_failure_after_a_quiet_minute_says_what_was_left_out(clock: _Clock, caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(Counters(), clock)
    for number in range(3):
        faults.add(f"s{number}", SampleFault("", "ABORTED", "it ended"))
    clock.now += 61
    faults.add("s3", SampleFault("", "ABORTED", "it ended"))
    assert (
        caplog.records[-1]
        .getMessage()
        .endswith("sample s3 failed: ABORTED: it ended (2 more with this code since the last such line)")
    )
    assert faults.take() == []
