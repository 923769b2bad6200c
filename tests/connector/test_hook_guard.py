"""The fence itself: what it catches, what it counts, and when it turns capture off."""

from __future__ import annotations

import logging

import pytest

from slotstream.connector.hook_guard import DISABLE_AFTER_S, HookGuard


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _broken() -> None:
    raise ZeroDivisionError


def test_a_hook_that_raises_is_counted_and_answered_with_the_default() -> None:
    counted: list[int] = []
    fence = HookGuard(lambda: counted.append(1))
    assert fence.run(int, 7, "x") == 7
    assert fence.run(int, 7, "3") == 3
    assert not fence.holds(_broken)
    assert fence.holds(lambda: None)
    assert len(counted) == 2


def test_a_fault_in_every_step_for_a_minute_turns_capture_off_and_one_good_step_prevents_it() -> None:
    clock = _Clock()
    fence = HookGuard(lambda: None, clock)

    def steps(count: int, bad: bool) -> None:
        for _ in range(count):
            if bad:
                fence.holds(_broken)
            fence.end_step()
            clock.now += DISABLE_AFTER_S / 10

    steps(10, bad=True)
    steps(1, bad=False)
    steps(11, bad=True)
    assert not fence.disabled
    steps(1, bad=True)
    assert fence.disabled
    steps(5, bad=False)
    assert fence.disabled


def test_the_log_names_each_hook_that_raises_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm.slotstream"), "propagate", True)
    fence = HookGuard(lambda: None)
    for _ in range(3):
        assert fence.run(int, 7, "x") == 7
        assert not fence.holds(_broken)
    said = [record.getMessage().partition(" failed ")[0] for record in caplog.records]
    assert said == ["slotstream: int", "slotstream: _broken"]
