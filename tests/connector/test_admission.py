"""Whether a request is captured while the server is away: as long as there is room, and no longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.plan_rig import PlannedRequest, PlanRig
from support.worker_rig import config

from slotstream.connector.counters import REASONS, SCHEDULER_REASONS, SENDER_REASONS, WORKER_REASONS, capture_off, merge
from slotstream.connector.faults import SampleFault
from slotstream.connector.planning import scheduler
from slotstream.connector.planning.captured_request import CapturedRequest
from slotstream.connector.planning.request_params import parse_params
from slotstream.connector.planning.scheduler import SchedulerHalf
from slotstream.wire.errors import ServerUnavailable, SlotStreamError


class _Server:
    """Away for so many seconds; None: there."""

    def __init__(self) -> None:
        self.away_s: float | None = None

    def problem(self, longer_than_s: float) -> SlotStreamError | None:
        return ServerUnavailable("nobody there") if self.away_s is not None and self.away_s >= longer_than_s else None


@pytest.fixture
def server() -> _Server:
    return _Server()


@pytest.fixture
def half(server: _Server) -> SchedulerHalf:
    return SchedulerHalf(config(outage_s_max=100.0), 0, 4, 1000, server.problem)


def _refusal(half: SchedulerHalf, req_id: str) -> str | None:
    """The code with which the request's capture is refused; None when it is captured."""
    request: Any = SimpleNamespace(
        request_id=req_id, kv_transfer_params=None, prompt_token_ids=[1, 2, 3], num_prompt_tokens=3, max_tokens=5
    )
    blocks: Any = SimpleNamespace(blocks=([SimpleNamespace(block_id=1)],))
    half.on_alloc(request, blocks)
    if req_id in half._live:
        return None
    _, answer = half.on_finished(request, [1])
    assert answer is not None
    return str(answer["slotstream"]["error"]["code"])


def test_an_outage_refuses_nothing_until_it_is_too_long(half: SchedulerHalf, server: _Server) -> None:
    server.away_s = 99.0
    assert _refusal(half, "a") is None
    server.away_s = 100.0
    assert _refusal(half, "b") == "SERVER_UNAVAILABLE"
    server.away_s = None
    assert _refusal(half, "c") is None


def test_once_there_is_no_room_requests_are_refused_until_the_server_is_back(half: SchedulerHalf, server: _Server) -> None:
    server.away_s = 1.0
    half.on_faults([SampleFault("x", "STAGING_FULL", "too slow")])
    assert _refusal(half, "a") is None
    half.on_faults([SampleFault("x", "SERVER_UNAVAILABLE", "no room")])
    assert _refusal(half, "b") == "SERVER_UNAVAILABLE"
    server.away_s = None
    assert _refusal(half, "c") is None
    server.away_s = 1.0
    assert _refusal(half, "d") is None


def test_why_capture_is_off_is_why_the_next_request_would_be_refused(half: SchedulerHalf, server: _Server) -> None:
    def said() -> str | None:
        problem = half.why_off()
        return None if problem is None else problem.code

    assert said() is None
    server.away_s = 99.0
    assert said() is None  # Captures wait for the server.
    server.away_s = 100.0
    assert said() == "SERVER_UNAVAILABLE"
    server.away_s = 1.0
    assert said() is None
    half.on_faults([SampleFault("x", "SERVER_UNAVAILABLE", "no room")])
    assert said() == "SERVER_UNAVAILABLE"
    server.away_s = None
    assert said() is None


def test_refusals_that_nobody_else_is_told_of_are_logged_within_a_minute(
    server: _Server, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    half = SchedulerHalf(config(outage_s_max=100.0), 0, 4, 1000, server.problem, clock=lambda: now[0])
    server.away_s = 100.0
    for req_id in "abc":
        assert _refusal(half, req_id) == "SERVER_UNAVAILABLE"
    half.take_stats()
    assert [record.getMessage() for record in caplog.records] == [
        "slotstream: request a is not captured: SERVER_UNAVAILABLE: nobody there"
    ]
    now[0] += 60.0
    half.take_stats()
    half.take_stats()
    assert [record.getMessage() for record in caplog.records[1:]] == [
        "slotstream: 2 more requests are not captured: SERVER_UNAVAILABLE"
    ]


def test_the_gauge_names_one_reason_and_clears_the_others() -> None:
    told = capture_off(SCHEDULER_REASONS, "SERVER_UNAVAILABLE")
    assert told.keys() == {f"capture_off:{reason}" for reason in SCHEDULER_REASONS}
    assert {key for key, value in told.items() if value} == {"capture_off:SERVER_UNAVAILABLE"}
    merged = merge(merge({}, told), capture_off(SCHEDULER_REASONS, None))
    assert not any(merged.values())  # A gauge takes its newest value.
    assert set(SCHEDULER_REASONS) | set(WORKER_REASONS) | set(SENDER_REASONS) == set(REASONS)


def _answer(req_id: str, **options: object) -> dict[str, Any]:
    half = SchedulerHalf(config(**options), 0, 4, 1000, lambda longer_than_s: None)
    request: Any = SimpleNamespace(request_id=req_id, kv_transfer_params={"slotstream": {}})
    params = parse_params({"slotstream": {}}, req_id=req_id, namespace="n", capture=True, include_output_tokens=False)
    return half._response(request, CapturedRequest(request, params, 0, 3, next=3, rows=3))


def test_an_answer_has_a_handle_where_that_is_asked_for() -> None:
    assert _answer("a").keys() == {"slotstream"}
    told = _answer("a", response_handle=True)
    assert told["handle"] == "n/a"
    assert told["slotstream"] == _answer("a")["slotstream"]
    assert told["slotstream"]["layer_names"] == ["1", "2", "5"]
    half = SchedulerHalf(config(response_handle=True), 0, 4, 1000, lambda longer_than_s: ServerUnavailable("nobody there"))
    request: Any = SimpleNamespace(
        request_id="b", kv_transfer_params=None, prompt_token_ids=[1], num_prompt_tokens=1, max_tokens=5
    )
    blocks: Any = SimpleNamespace(blocks=([SimpleNamespace(block_id=1)],))
    half.on_alloc(request, blocks)
    _, refused = half.on_finished(request, [1])
    assert refused is not None
    assert refused.keys() == {"slotstream"}  # There will be no sample.


def test_a_sample_is_opened_before_the_requests_that_are_refused_its_id() -> None:
    """Else a reader that waits for the sample could hear that it failed."""
    rig = PlanRig()
    first, second, third = (rig.add(17, sample_id="s", tokens=[start, None]) for start in range(3))
    plan = rig.step()
    assert [opened.req_id for opened in plan.opens] == [first.request_id, second.request_id, third.request_id]
    assert [(abort.req_id, abort.code) for abort in plan.aborts] == [
        (request.request_id, "ALREADY_EXISTS") for request in (second, third)
    ]


def test_a_sample_that_waits_for_its_first_rows_is_opened_before_a_request_that_is_refused_its_id() -> None:
    rig = PlanRig()
    first, other = rig.add(17, sample_id="s"), rig.add(17)
    assert not rig.step().opens
    second = rig.add(17, sample_id="s", tokens=[1, None])
    plan = rig.step()
    assert [opened.req_id for opened in plan.opens] == [first.request_id, other.request_id, second.request_id]
    assert [(abort.req_id, abort.code) for abort in plan.aborts] == [(second.request_id, "ALREADY_EXISTS")]


def test_what_a_request_asks_for_is_parsed_once_and_kept_no_longer_than_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(asked: Any, *, req_id: str, **defaults: Any) -> Any:
        parsed.append(req_id)
        return parse_params(asked, req_id=req_id, **defaults)

    monkeypatch.setattr(scheduler, "parse_params", parse)
    rig = PlanRig()
    rig.add(17)
    assert parsed == ["r0"]
    assert not rig.half._asked
    waits = PlannedRequest("w", 17, 10, {"slotstream": {}}, list(range(17)))
    rig.half.on_new(waits)
    assert waits.skip_reading_prefix_cache
    assert rig.half._asked.keys() == {"w"}
    rig.half.on_finished(waits, [])
    assert not rig.half._asked
