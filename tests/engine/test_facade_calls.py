"""What vLLM's own calls of the connector cost the engine's thread in a quiet step, in Python and C calls. Starts no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.calls import calls
from support.plan_rig import PlanRig
from support.worker_rig import config, make_rig

from slotstream.connector.faults import SampleFault
from slotstream.connector.hook_guard import HookGuard
from slotstream.connector.plan import EMPTY_PLAN
from slotstream.connector.planning.row_planner import REQUESTS, STEPS_MAX

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def _hooks_of_a_quiet_step(captures: int) -> tuple[int, int]:
    """Of `build_connector_meta` and of `get_kv_connector_stats`, in the engine core."""
    from slotstream.connector.facade import SlotStreamConnector, SlotStreamMetadata

    rig = PlanRig()
    for _ in range(captures):
        rig.add(17)
    for _ in range(2 + STEPS_MAX + 2 * -(-captures // REQUESTS)):  # Their prompts are read.
        rig.step()
    connector = object.__new__(SlotStreamConnector)
    connector._config, connector._scheduler = config(layers=[0]), rig.half
    connector._guard, connector._told_off = HookGuard(lambda: None), ""
    connector._quiet = SlotStreamMetadata(EMPTY_PLAN, "engine")
    connector.get_kv_connector_stats()
    output = rig.output()
    planned = calls(lambda: connector.build_connector_meta(output))
    return planned, calls(connector.get_kv_connector_stats)


def test_a_quiet_step_costs_the_same_for_8_and_for_64_captures() -> None:
    few, many = _hooks_of_a_quiet_step(8), _hooks_of_a_quiet_step(64)
    assert few == many
    assert few[0] <= 14
    assert few[1] <= 20


def test_a_quiet_step_of_a_worker_begins_and_ends_in_a_few_calls() -> None:
    """Of one that reads row pages, and has a process that sends."""
    from slotstream.connector.facade import SlotStreamConnector, SlotStreamMetadata
    from slotstream.connector.worker_side import WorkerSide

    half: Any = SimpleNamespace(begins_every_step=False)
    side = object.__new__(WorkerSide)
    side.half, side._guard, side._bound = half, HookGuard(lambda: None), EMPTY_PLAN
    side.wants_layers = False
    connector = object.__new__(SlotStreamConnector)
    connector._sides, connector._side = {"engine": side}, None
    metadata = SlotStreamMetadata(EMPTY_PLAN, "engine")
    assert calls(lambda: connector.bind_connector_metadata(metadata)) <= 6
    assert connector._side is side
    assert calls(connector.wait_for_save) <= 2


def test_a_worker_with_no_news_tells_so_in_a_few_calls() -> None:
    """Of `build_connector_worker_meta`: vLLM asks in every step."""
    from slotstream.connector.facade import SlotStreamConnector
    from slotstream.connector.worker_side import WorkerSide

    rig = make_rig()
    try:
        side = object.__new__(WorkerSide)
        side.half, side._guard = rig.worker, HookGuard(lambda: None)
        connector = object.__new__(SlotStreamConnector)
        connector._side = side
        connector.build_connector_worker_meta()  # The server that it came up to.
        assert calls(connector.build_connector_worker_meta) <= 6
        rig.worker._sender._faults.add("a", SampleFault("a", "STAGING_FULL", "of a test"))
        told = connector.build_connector_worker_meta()
        assert told is not None
        assert [(fault.req_id, fault.code) for fault in told.faults] == [("a", "STAGING_FULL")]
        assert connector.build_connector_worker_meta() is None
    finally:
        rig.worker.close()
