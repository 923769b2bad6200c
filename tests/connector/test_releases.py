"""Releases: each request is handed out once, and not before the step after its rows were read."""

from __future__ import annotations

from slotstream.connector.plan import EMPTY_PLAN, StepPlan
from slotstream.connector.reading.releases import Releases


def test_a_request_is_handed_out_once_in_the_step_after_its_plan() -> None:
    releases = Releases()
    releases.bind(StepPlan(releases=("a", "b")))
    assert releases.take() == set()
    releases.bind(StepPlan(releases=("c",)))
    assert releases.take() == {"a", "b"}
    releases.bind(EMPTY_PLAN)
    releases.bind(EMPTY_PLAN)
    assert releases.take() == {"c"}
    assert releases.take() == set()


def test_a_plan_that_is_given_up_is_handed_out_once_whether_bound_or_not() -> None:
    unbound, bound = StepPlan(releases=("a",)), StepPlan(releases=("b",))
    releases = Releases()
    releases.give_up(unbound)
    assert releases.take() == {"a"}
    releases.bind(bound)
    releases.give_up(bound)
    assert releases.take() == set()
    releases.bind(EMPTY_PLAN)
    assert releases.take() == {"b"}
