"""Whether a request is captured while the server is away: as long as there is room, and not for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.worker_rig import config

from slotstream.connector.counters import REASONS, SCHEDULER_REASONS, SENDER_REASONS, WORKER_REASONS, capture_off, merge
from slotstream.connector.faults import SampleFault
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


def test_the_gauge_names_one_reason_and_clears_the_others() -> None:
    told = capture_off(SCHEDULER_REASONS, "SERVER_UNAVAILABLE")
    assert told.keys() == {f"capture_off:{reason}" for reason in SCHEDULER_REASONS}
    assert {key for key, value in told.items() if value} == {"capture_off:SERVER_UNAVAILABLE"}
    merged = merge(merge({}, told), capture_off(SCHEDULER_REASONS, None))
    assert not any(merged.values())  # A gauge takes its newest value.
    assert set(SCHEDULER_REASONS) | set(WORKER_REASONS) | set(SENDER_REASONS) == set(REASONS)
