"""What the hooks do on the engine's thread, in calls: every Python and C call counts, wherever it runs. No times."""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.calls import calls
from support.plan_rig import PlanRig

from slotstream.connector.plan import StepPlan, TableUpdate
from slotstream.connector.planning.row_planner import REQUESTS, STEPS_MAX
from slotstream.connector.reading.forward_capture import ForwardCapture
from slotstream.connector.reading.page_table import TableWriter


def _plan(rig: PlanRig) -> tuple[int, StepPlan]:
    """Of what the engine core's half does in a step, and the step's plan."""
    output, plans = rig.output(), []

    def hooks() -> None:
        plans.append(rig.half.plan(output))
        rig.half.delivered()
        rig.half.take_stats()

    count = calls(hooks)
    rig.computed()
    return count - 1, plans[0]  # Without the append.


def _decoding(captures: int, prompt: int = 17) -> PlanRig:
    """So many captures that decode, whose prompts are read."""
    rig = PlanRig()
    for _ in range(captures):
        rig.add(prompt)
    for _ in range(2 + STEPS_MAX + 2 * -(-captures // REQUESTS)):
        rig.step()
    return rig


def test_a_quiet_decode_step_costs_the_same_for_8_and_for_64_captures() -> None:
    few, many = _plan(_decoding(8)), _plan(_decoding(64))
    assert not few[1]
    assert not many[1]
    assert few[0] == many[0] <= 21


def test_a_quiet_decode_step_looks_at_no_capture() -> None:
    def lines(rig: PlanRig) -> int:
        output, seen = rig.output(), 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal seen
            seen += event == "line"
            return trace

        sys.settrace(trace)
        try:
            plan = rig.half.plan(output)
        finally:
            sys.settrace(None)
        assert not plan
        return seen

    assert lines(_decoding(8)) == lines(_decoding(64))


def test_a_step_of_an_engine_that_captures_nothing_does_not_look_at_the_gauges() -> None:
    rig = PlanRig()
    rig.half.take_stats()  # The first one does.
    assert calls(rig.half.take_stats) <= 4


def test_the_next_page_for_64_captures_costs_a_few_calls_each() -> None:
    rig = _decoding(64)
    found = [_plan(rig) for _ in range(16)]
    pages = [count for count, plan in found if plan.table is not None and not plan.rows]
    assert len(pages) == 1
    assert pages[0] <= 25 + 64 * 8


def test_a_prompt_costs_the_same_whatever_its_length() -> None:
    def first_and_read(prompt: int) -> tuple[int, int]:
        rig = _decoding(8)
        rig.add(prompt)
        first, _ = _plan(rig)
        for _ in range(STEPS_MAX - 1):
            rig.step()
        read, plan = _plan(rig)
        assert [rows.stop - rows.start for rows in plan.rows] == [prompt + STEPS_MAX - 1]
        return first, read

    short, long = first_and_read(64), first_and_read(1024)
    assert short == long
    assert long[0] <= 95
    assert long[1] <= 95


def test_64_captures_whose_rows_are_worth_reading_at_once_cost_no_step_more_than_a_read_of_8() -> None:
    rig = _decoding(64)
    found = [_plan(rig) for _ in range(480)]
    reads = [(count, len(plan.rows)) for count, plan in found if plan.rows]
    assert sum(rows for _, rows in reads) >= 2 * 64
    assert max(rows for _, rows in reads) == REQUESTS
    assert max(count for count, _ in reads) <= 281


@pytest.mark.parametrize("steps", [20, 180])
def test_the_end_of_a_request_costs_the_same_at_any_length(steps: int) -> None:
    rig = _decoding(8)
    for _ in range(steps):
        rig.step()
    ended = list(rig.running.values())[:3]
    found = []
    for request in ended:
        del rig.running[request.request_id]
        request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        found.append(calls(partial(rig.half.on_finished, request, request.table)))
    assert max(found[1:]) <= 41  # The first answer works out what all answers say of the rows.
    plans = [rig.step() for _ in range(STEPS_MAX + 1)]
    assert sorted(finish.req_id for plan in plans for finish in plan.finishes) == [request.request_id for request in ended]


class _Launch:
    launches = 0

    def knows(self, key: object) -> bool:
        return True

    def __call__(self, *arguments: object) -> None:
        self.launches += 1


def test_the_table_update_is_one_launch_and_costs_the_same_whatever_changes() -> None:
    table, step = torch.full((4096,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    writer = TableWriter(table, step)
    writer._on_cpu = False
    launch = _Launch()
    writer._launch = launch  # type: ignore[assignment]

    def write(number: int, entries: int) -> int:
        update = TableUpdate(number, {at: at for at in range(entries)}, clear=False, live=entries)
        return calls(lambda: writer.write(update))

    writer._read_words[:] = 0
    counts = {write(number, entries) for number, entries in enumerate((1, 8, 64, 512), 1)}
    assert len(counts) == 1
    assert counts.pop() <= 12
    assert launch.launches == 4


@pytest.mark.parametrize("live", [0, 1])
def test_the_forward_pass_costs_one_write_of_all_layers_and_none_while_nobody_has_a_page(
    live: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slotstream.connector.reading import forward_capture

    writes: list[int] = []
    monkeypatch.setattr(forward_capture, "write_rows", lambda pages, rows, slots: writes.append(len(rows)))
    context = SimpleNamespace(slot_mapping={"attn": torch.arange(5)})
    module: Any = SimpleNamespace(get_forward_context=lambda: context)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    capture = ForwardCapture("Tiny", (1, 3, 5), (1, 3, 5), None, final=True, hidden=8, dtype=torch.float32, pages=None)
    capture.pages = SimpleNamespace(live=live, device=torch.device("cpu"))  # type: ignore[assignment]
    capture.layer, capture.serving = "attn", True
    hidden = torch.zeros(5, 8)
    answer = (hidden, [hidden] * 3)
    capture.take(answer)
    count = calls(lambda: capture.take(answer))
    assert writes == [4, 4] * live
    assert count <= (30 if live else 8)
