"""The throttle of log lines: the first at once, then one for each period, and no event that is never counted."""

from __future__ import annotations

from slotstream.common.throttle import Throttle


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_of_a_key_is_admitted_at_once_and_later_ones_are_counted() -> None:
    clock = _Clock()
    throttle = Throttle(60.0, clock)
    assert [throttle.admit("a") for _ in range(4)] == [0, None, None, None]
    assert throttle.admit("b") == 0
    clock.now += 60
    assert throttle.admit("a") == 3
    assert throttle.admit("a") is None


def test_what_was_refused_is_due_once_its_time_is_over() -> None:
    clock = _Clock()
    throttle = Throttle(60.0, clock)
    for _ in range(4):
        throttle.admit("a")
    throttle.admit("b")
    clock.now += 59
    assert throttle.overdue() == {}
    clock.now += 1
    assert throttle.overdue() == {"a": 3}
    assert throttle.overdue() == {}
    assert throttle.admit("a") is None  # What was said then counts like a line.
    clock.now += 60
    assert throttle.overdue() == {"a": 1}
