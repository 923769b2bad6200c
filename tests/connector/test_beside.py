"""Work that a step leaves to the thread beside the engine's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.plan_rig import PlanRig
from support.worker_rig import config

from slotstream.connector.hook_guard import HookGuard
from slotstream.connector.plan import EMPTY_PLAN, PagePlace, RowPlan, StepPlan
from slotstream.connector.planning.row_planner import STEPS_MAX
from slotstream.connector.reading.beside import Beside
from slotstream.connector.worker_side import WorkerSide

CPU = torch.device("cpu")


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside(CPU)
    yield made
    made.close(30)


def _hold(beside: Beside) -> threading.Event:
    """Keep its thread from beginning until the event is set."""
    may_begin = threading.Event()
    do = beside._do

    def late() -> None:
        if threading.current_thread() is not threading.main_thread():
            may_begin.wait(30)
        do()

    beside._do = late  # type: ignore[method-assign]
    return may_begin


def test_work_is_done_once_on_another_thread_though_nobody_asks_for_it(beside: Beside) -> None:
    done, names = threading.Event(), []

    def work() -> None:
        names.append(threading.current_thread().name)
        done.set()

    beside.hand_over(work)
    assert done.wait(30)
    beside.finish()
    assert names == ["slotstream-reader"]


def test_who_finishes_work_that_was_not_begun_does_it(beside: Beside) -> None:
    may_begin, names = _hold(beside), []
    for _ in range(3):
        beside.hand_over(lambda: names.append(threading.current_thread().name))
        beside.finish()
    may_begin.set()
    beside.close(30)
    assert names == [threading.main_thread().name] * 3


def test_who_finishes_work_that_was_begun_waits_for_it(beside: Beside) -> None:
    begun, may_end, order = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        may_end.wait(30)
        order.append("done")

    beside.hand_over(work)
    assert begun.wait(30)
    threading.Timer(0.05, may_end.set).start()
    beside.finish()
    order.append("finished")
    assert order == ["done", "finished"]


def test_many_pieces_are_each_done_once_and_in_order(beside: Beside) -> None:
    done: list[int] = []
    for number in range(300):
        beside.hand_over(lambda number=number: done.append(number))  # type: ignore[misc]
        if number % 3:
            beside.finish()
        else:
            while beside._work is not None:
                pass
    assert done == list(range(300))


def test_what_work_raises_is_told_to_who_finishes_it_once(beside: Beside) -> None:
    def work() -> None:
        raise RuntimeError("of a test")

    beside.hand_over(work)
    with pytest.raises(RuntimeError, match="of a test"):
        beside.finish()
    beside.finish()
    done = []
    beside.hand_over(lambda: done.append(1))
    beside.finish()
    assert done == [1]


def test_closing_finishes_what_there_is_and_ends_the_thread(beside: Beside) -> None:
    _hold(beside).set()
    done = []
    beside.hand_over(lambda: done.append(1))
    thread = beside._thread
    beside.close(30)
    assert done == [1]
    assert thread is not None
    assert not thread.is_alive()
    beside.close(30)


def test_vllms_tensors_are_written_in_the_mode_that_vllm_runs_in(beside: Beside) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(4)
    done = threading.Event()

    def work() -> None:
        tensor.copy_(torch.ones(4))
        done.set()

    beside.hand_over(work)
    assert done.wait(30)
    assert tensor.tolist() == [1.0] * 4


def test_work_that_hangs_does_not_hold_up_who_closes(beside: Beside) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(30)

    beside.hand_over(work)
    assert begun.wait(30)
    beside.close(0.01)
    assert beside._work is not None
    may_end.set()


class _Half:
    """A worker half that says what it was asked for, and by whom."""

    begins_every_step = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.executed = threading.Event()
        self.fails = False

    def _note(self, what: str) -> None:
        self.asked.append((what, threading.current_thread().name))

    def bind(self, plan: StepPlan) -> None:
        self._note("bind")

    def remember_stream(self) -> None:
        self._note("remember_stream")

    def execute(self) -> None:
        self._note("execute")
        self.executed.set()
        if self.fails:
            raise RuntimeError("of a test")

    def fail_plan(self, plan: StepPlan) -> None:
        assert plan.rows
        self._note("fail_plan")

    def wake(self) -> None:
        self._note("wake")

    def close(self) -> None:
        self._note("close")

    def count_fault(self) -> None:
        self._note("count_fault")


@pytest.fixture
def side(beside: Beside) -> Any:
    made = object.__new__(WorkerSide)
    made.half, made.config = _Half(), config()  # type: ignore[assignment]
    made._guard, made._beside, made._bound = HookGuard(made._count_fault), beside, EMPTY_PLAN
    return made


ROWS = (RowPlan("a", 0, 4, 0, PagePlace([0], [0], [1])),)
READER, ENGINE = "slotstream-reader", threading.main_thread().name


def test_rows_are_read_beside_and_the_next_step_begins_behind_that(side: Any) -> None:
    may_begin = _hold(side._beside)
    for _ in range(2):
        side.bind(StepPlan(rows=ROWS, beside=True))
        side.save()
    side.bind(EMPTY_PLAN)
    side.save()
    may_begin.set()
    steps = [what for what, _ in side.half.asked]
    assert steps == ["bind", "remember_stream", "execute"] * 2 + ["bind"]
    assert {who for _, who in side.half.asked} == {ENGINE}
    side.bind(StepPlan(rows=ROWS, beside=True))
    side.half.executed.clear()
    side.save()
    assert side.half.executed.wait(30)
    assert side.half.asked[-2:] == [("remember_stream", ENGINE), ("execute", READER)]


def test_a_step_without_a_plan_asks_nothing_of_a_worker_that_has_nothing_to_do_in_each(side: Any) -> None:
    side.half.begins_every_step = False
    for plan in (EMPTY_PLAN, StepPlan(), StepPlan(rows=ROWS), EMPTY_PLAN):
        side.bind(plan)
        side.save()
    assert [what for what, _ in side.half.asked] == ["bind", "remember_stream", "execute"]


@pytest.mark.parametrize("end", ["wake", "close"])
def test_nothing_of_a_worker_ends_before_its_rows_are_read(side: Any, end: str) -> None:
    _hold(side._beside).set()
    side.bind(StepPlan(rows=ROWS, beside=True))
    side.save()
    getattr(side, end)()
    assert [what for what, _ in side.half.asked] == ["bind", "remember_stream", "execute", end]


def test_a_fault_beside_is_answered_where_the_model_runs_and_fails_the_samples_of_its_step(side: Any) -> None:
    side.half.fails = True
    side.bind(StepPlan(rows=ROWS, beside=True))
    side.save()
    assert side.half.executed.wait(30)
    side.half.fails = False
    side.bind(EMPTY_PLAN)
    side.save()
    side.bind(StepPlan(rows=ROWS))
    side.save()
    expected = [("execute", READER), ("count_fault", ENGINE), ("fail_plan", ENGINE), ("bind", ENGINE)]
    assert side.half.asked[2:6] == expected
    assert [what for what, _ in side.half.asked[6:]] == ["bind", "remember_stream", "execute"]


def test_where_no_thread_can_be_had_rows_are_read_all_the_same(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    side.bind(StepPlan(rows=ROWS, beside=True))
    side.save()
    assert side.half.asked == [
        ("bind", ENGINE),
        ("remember_stream", ENGINE),
        ("count_fault", ENGINE),
        ("execute", ENGINE),
    ]


def test_rows_are_read_beside_where_a_step_follows() -> None:
    rig = PlanRig()
    first, second = rig.add(40), rig.add(40)
    plans = [rig.step() for _ in range(STEPS_MAX + 1)]
    assert [plan.beside for plan in plans if plan.rows] == [True]
    assert {plan.beside for plan in plans if not plan.rows} == {False}
    rig.finish(first)
    rig.finish(second)
    plan = rig.step()
    assert plan.rows
    assert not plan.beside, "nobody else is captured: no step may follow"
    rig.add(40)
    rig.step()
    empty = SimpleNamespace(**{**vars(rig.output()), "num_scheduled_tokens": {}, "total_num_scheduled_tokens": 0})
    cached = empty.scheduled_cached_reqs
    cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, cached.num_output_tokens = [], [], [], []
    plan = rig.half.plan(empty)
    assert plan.rows
    assert not plan.beside, "vLLM may give the device's memory away behind it"
