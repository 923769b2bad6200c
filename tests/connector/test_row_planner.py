"""When a plan reads rows: with others, and not beside prompt tokens, but where pages are short or they have waited for long."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.plan_rig import PlannedRequest, PlanRig, rows_of

from slotstream.connector.plan import PagePlace, SampleAbort, SampleFinish, SampleOpen, StepPlan
from slotstream.connector.planning.captured_request import CapturedRequest
from slotstream.connector.planning.page_allocator import NULL_BLOCK, PageAllocator
from slotstream.connector.planning.row_planner import BUSY_STEPS_MAX, REQUESTS, REQUESTS_MAX, STEPS_MAX
from slotstream.connector.row_pool import RowPoolShape


def test_a_prompt_is_read_with_others_after_eight_steps_in_one_without_prompt_tokens() -> None:
    rig = PlanRig()
    rig.add(100)
    assert rows_of(rig.step()) == []
    rig.add(30)
    for _ in range(STEPS_MAX - 1):
        assert rows_of(rig.step()) == []
    assert rows_of(rig.step()) == [("r0", 0, 100 + STEPS_MAX - 1), ("r1", 0, 30 + STEPS_MAX - 2)]
    assert rows_of(rig.step()) == []


def test_as_many_as_a_plan_reads_from_wait_no_longer() -> None:
    rig = PlanRig()
    for _ in range(REQUESTS):
        rig.add(20)
    assert rows_of(rig.step()) == []
    assert rows_of(rig.step()) == []  # Behind a step with prompts.
    assert len(rows_of(rig.step())) == REQUESTS


@pytest.mark.parametrize("every", [1, 2])
def test_beside_prompt_tokens_and_behind_them_rows_wait_for_32_steps_and_all_that_wait_go_along(every: int) -> None:
    rig = PlanRig()
    rig.add(100)
    rig.add(30)
    rig.step()
    for number in range(1, BUSY_STEPS_MAX):
        if number % every == 0:
            rig.add(20, capture=False)
        assert rows_of(rig.step()) == []
    rig.add(20, capture=False)
    assert rows_of(rig.step()) == [("r0", 0, 100 + BUSY_STEPS_MAX - 1), ("r1", 0, 30 + BUSY_STEPS_MAX - 1)]
    rig.add(20)
    assert rows_of(rig.step()) == []


def test_rows_that_have_waited_are_read_in_the_first_step_that_is_not_behind_one_with_prompts() -> None:
    rig = PlanRig()
    rig.add(100)
    for number in range(STEPS_MAX + 2):
        rig.add(20, capture=False)
        assert rows_of(rig.step()) == [], number
    assert rows_of(rig.step()) == []
    assert rows_of(rig.step()) == [("r0", 0, 100 + STEPS_MAX + 2)]


def _opens(plan: StepPlan) -> list[str]:
    return [opened.req_id for opened in plan.opens]


def test_a_sample_is_opened_with_its_first_rows_and_a_step_with_a_prompt_has_nothing_to_send() -> None:
    rig = PlanRig()
    rig.add(100)
    for _ in range(STEPS_MAX):
        plan = rig.step()
        assert (plan.opens, plan.rows, plan.finishes, plan.aborts) == ((), (), (), ())
    plan = rig.step()
    assert _opens(plan) == [rows.req_id for rows in plan.rows] == ["r0"]
    rig.finish(rig.running["r0"])
    plan = rig.step()
    assert _opens(plan) == []
    assert [finish.req_id for finish in plan.finishes] == ["r0"]


def test_a_sample_that_fails_before_its_first_rows_is_opened_and_says_what_it_would_have_been() -> None:
    rig = PlanRig(pages=4, step_pages=0)
    rig.add(16 * 5, tokens=[2, None], tags={"of": "test"})
    plan = rig.step()
    (opened,) = plan.opens
    assert [(abort.req_id, abort.code) for abort in plan.aborts] == [("r0", "ROW_POOL_FULL")]
    assert (opened.rows_max, opened.tags) == (80 + 4000 - 1 - 2, {"of": "test"})
    assert opened.metadata["prompt_tokens"] == "80"


def test_samples_whose_beginning_cannot_be_told_fail_with_all_others_and_under_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(capture: CapturedRequest) -> SampleOpen:
        raise RuntimeError("cannot be described")

    rig = PlanRig()
    for _ in range(2):
        rig.add(30)
    for _ in range(STEPS_MAX):
        rig.step()
    with monkeypatch.context() as patched:
        patched.setattr(CapturedRequest, "sample_open", broken)
        with pytest.raises(RuntimeError, match="cannot be described"):
            rig.half.plan(rig.output())
        rig.half.fail_all()
    plan = rig.step()
    assert _opens(plan) == [abort.req_id for abort in plan.aborts] == ["r0", "r1"]
    assert [opened.sample_id for opened in plan.opens] == ["r0", "r1"]
    assert not plan.rows
    assert rig.pages.in_use == 0


def test_a_sample_that_ends_or_is_preempted_before_its_first_read_is_opened_once() -> None:
    rig = PlanRig()
    other, short, aborted, preempted = (rig.add(30) for _ in range(4))
    plans = [rig.step()]
    rig.finish(short)
    rig.finish(aborted, "FINISHED_ABORTED")
    rig.preempt(preempted)
    plans += [rig.step()]
    assert rows_of(plans[1])[0] == ("r3", 0, 30)
    assert _opens(plans[1]) == ["r1", "r2", "r3"]
    rig.running["r3"] = preempted
    plans += [rig.step() for _ in range(STEPS_MAX + 2)]
    rig.finish(other)
    rig.finish(preempted)
    plans += [rig.step() for _ in range(2)]
    assert sorted(req_id for plan in plans for req_id in _opens(plan)) == ["r0", "r1", "r2", "r3"]
    assert sorted(finish.req_id for plan in plans for finish in plan.finishes) == ["r0", "r1", "r3"]
    assert [abort.req_id for plan in plans for abort in plan.aborts] == ["r2"]


def test_a_request_that_is_forgotten_before_its_first_rows_is_opened_as_one_that_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = PlanRig()
    rig.add(30)
    rig.step()
    with monkeypatch.context() as patched:
        patched.setattr(rig.half._rows, "finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rig.finish(rig.running["r0"])
    rig.half.forget("r0")
    plan = rig.step()
    assert _opens(plan) == [abort.req_id for abort in plan.aborts] == ["r0"]
    assert plan.opens[0].sample_id == "r0"
    assert not rig.half._captures


def test_the_last_rows_of_a_request_wait_while_others_run_and_its_sample_ends_with_them() -> None:
    rig = PlanRig()
    whole, prompt, aborted = rig.add(40), rig.add(50, include_output_tokens=False), rig.add(60)
    rig.step()
    assert rig.finish(whole)["num_tokens"] == 40
    assert rig.finish(prompt, "FINISHED_ABORTED")["num_tokens"] == 50
    assert rig.finish(aborted, "FINISHED_ABORTED")["error"]["code"] == "ABORTED"
    rig.add(20)
    for waited in range(STEPS_MAX):
        plan = rig.step()
        assert rows_of(plan) == []
        assert not plan.finishes
        assert [abort.req_id for abort in plan.aborts] == ["r2"][waited:]
    assert rig.pages.in_use == 3 + 4 + 2
    assert rig.half.has_unread()
    plan = rig.step()
    assert rows_of(plan) == [("r3", 0, 20 + STEPS_MAX - 1), ("r0", 0, 40), ("r1", 0, 50)]
    assert {f.req_id: f.metadata["finish_reason"] for f in plan.finishes} == {"r0": "length", "r1": "prompt"}
    assert rig.pages.in_use == 1  # Of the one that runs.


@pytest.mark.parametrize("others", [0, 1])
def test_the_last_rows_of_a_request_are_read_at_once_where_no_other_is_captured(others: int) -> None:
    rig = PlanRig()
    last = rig.add(40)
    rig.step()
    rig.finish(last)
    for _ in range(others):
        rig.add(20, capture=False)
    plan = rig.step()
    assert rows_of(plan) == [("r0", 0, 40)]
    assert [finish.req_id for finish in plan.finishes] == ["r0"]
    assert not rig.half.has_unread()


def test_the_last_rows_of_requests_are_read_beside_prompts_after_32_steps_or_when_pages_are_short() -> None:
    rig = PlanRig()
    rig.add(30)
    for _ in range(STEPS_MAX + 2):
        rig.step()
    rig.finish(_stepped(rig, 40))
    for _ in range(BUSY_STEPS_MAX):
        rig.add(20, capture=False)
        assert not rig.step().finishes
    rig.add(20, capture=False)
    assert [finish.req_id for finish in rig.step().finishes] == ["r1"]
    short = PlanRig(pages=8, step_pages=0)
    short.finish(_stepped(short, 5 * 16))
    short.add(2 * 16)
    assert rows_of(short.step()) == [("r1", 0, 32), ("r0", 0, 80)]


def test_what_waits_of_a_request_that_ended_is_given_up_in_a_fault() -> None:
    rig = PlanRig()
    rig.finish(_stepped(rig, 40))
    rig.add(20)
    rig.step()
    rig.half.fail_all()
    plan = rig.step()
    assert {abort.req_id for abort in plan.aborts} == {"r0", "r1"}
    assert not plan.rows
    assert not plan.finishes
    assert rig.pages.in_use == 0


def test_a_request_that_is_forgotten_after_it_ended_gives_its_pages_back() -> None:
    rig = PlanRig()
    rig.finish(_stepped(rig, 40))
    rig.half.forget("r0")
    plan = rig.step()
    assert [abort.req_id for abort in plan.aborts] == ["r0"]
    assert not plan.rows
    assert rig.pages.in_use == 0


def test_an_id_that_is_used_again_while_its_last_rows_wait_is_refused_in_the_answer_alone() -> None:
    """What the plan says of it would be taken for the request that ended."""
    rig = PlanRig()
    rig.add(30)
    rig.finish(first := _stepped(rig, 40))
    again = PlannedRequest("r1", 20, 100, {"slotstream": {}}, list(range(20)))
    blocks: Any = SimpleNamespace(blocks=([],))
    rig.half.on_new(again)
    rig.half.on_alloc(again, blocks)
    rig.running["r1"] = again
    plans = [rig.step() for _ in range(STEPS_MAX + 2)]
    assert rig.finish(again)["error"]["code"] == "UNSUPPORTED_REQUEST"
    assert [(end.req_id, len(end.token_ids)) for plan in plans for end in plan.finishes] == [("r1", 40)]
    assert not any(plan.aborts for plan in plans)
    assert [opened.rows_max for plan in plans for opened in plan.opens if opened.req_id == "r1"] == [first.max_tokens + 39]
    assert sum(len(plan.rows) for plan in plans) == 2


def test_a_fault_in_a_step_leaves_no_sample_that_the_server_was_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = PlanRig()
    rig.add(30)
    rig.add(40)
    advance, seen = rig.half._rows.advance, []

    def breaks(*arguments: Any) -> None:
        seen.append(1)
        if len(seen) == 2:
            raise ValueError("broken")
        advance(*arguments)

    monkeypatch.setattr(rig.half._rows, "advance", breaks)
    with pytest.raises(ValueError, match="broken"):
        rig.half.plan(rig.output())
    rig.half.fail_all()
    monkeypatch.undo()
    rig.computed()
    plan = rig.step()
    assert {opened.req_id for opened in plan.opens} == {abort.req_id for abort in plan.aborts} == {"r0", "r1"}


def test_where_no_step_follows_the_last_request_rows_wait_for_nothing() -> None:
    rig = PlanRig()
    rig.half._rows._may_wait = False
    rig.add(100)
    rig.add(20)
    assert [req_id for req_id, _, _ in rows_of(rig.step())] == ["r0", "r1"]
    rig.add(30)
    assert [req_id for req_id, _, _ in rows_of(rig.step())] == ["r2"]
    rig.finish(rig.running["r0"])
    assert [finish.req_id for finish in rig.step().finishes] == ["r0"]


def _stepped(rig: PlanRig, prompt: int) -> PlannedRequest:
    request = rig.add(prompt)
    rig.step()
    return request


@pytest.mark.parametrize(
    ("pages", "step_pages"),
    [pytest.param(8, 0, id="less than a quarter is free"), pytest.param(40, 34, id="the next step might not find its pages")],
)
def test_rows_are_read_at_once_where_pages_are_short(pages: int, step_pages: int) -> None:
    rig = PlanRig(pages, step_pages)
    rig.add(7 * 16)
    assert rows_of(rig.step()) == [("r0", 0, 112)]


def test_rows_are_read_at_once_where_half_a_steps_rows_wait_and_what_was_read_or_is_nobodys_does_not_count() -> None:
    rig = PlanRig(step_tokens=400)
    rig.add(200)
    assert rows_of(rig.step()) == []
    rig.add(2)
    assert rows_of(rig.step()) == [("r0", 0, 200), ("r1", 0, 2)]
    rig.add(150)
    rig.add(400, capture=False)
    assert rows_of(rig.step()) == []
    rig.add(60)
    assert rows_of(rig.step()) == [("r2", 0, 150), ("r4", 0, 60)]
    rig.add(202)
    assert rows_of(rig.step()) == [("r5", 0, 202)]


def test_a_pool_that_holds_a_step_and_what_waits_never_fails_for_the_rows_that_wait() -> None:
    rig = PlanRig(pages=40, step_pages=20)
    for _ in range(30):
        request = rig.add(19 * 16)
        rig.step()
        rig.step()
        assert "error" not in rig.finish(request)
        late = rig.add(17 * 16)
        rig.step()
        assert "error" not in rig.finish(late)


def test_a_preempted_request_is_read_before_its_pages_are_anothers_and_a_token_that_comes_late_changes_nothing() -> None:
    rig = PlanRig(output_rows_per_chunk=32)
    output, prompt = rig.add(40), rig.add(50, include_output_tokens=False)
    rig.step()
    rig.preempt(output)
    rig.preempt(prompt)
    plan = rig.step()
    assert sorted(rows_of(plan)) == [("r0", 0, 40), ("r1", 0, 50)]
    assert [finish.req_id for finish in plan.finishes] == ["r1"]
    assert rig.pages.in_use == 0
    output.all_token_ids.append(7)
    assert not rig.half.has_unread()
    assert not rig.step()
    rig.running[output.request_id] = output
    rig.step()
    for _ in range(40):
        if read := rows_of(rig.step()):
            break
    assert read == [("r0", 40, 72 + STEPS_MAX)]


@pytest.mark.parametrize("block", [NULL_BLOCK, 9])
def test_an_entry_ends_in_the_plan_in_which_its_block_is_no_more_the_requests_and_its_rows_can_still_be_read(
    block: int,
) -> None:
    """Behind a sliding window a block goes to others while rows of it wait to be read."""
    pages = PageAllocator(RowPoolShape(8, 16), 16)
    pages.cover("a", 0, 40, [5, 6, 7])
    first = pages.end_plan()
    assert first is not None
    assert (dict(first.entries), first.live) == ({5: 0, 6: 1, 7: 2}, 3)
    pages.cover("a", 40, 41, [block, 6, 7])
    second = pages.end_plan()
    assert second is not None
    assert (dict(second.entries), second.live) == ({5: -1}, 2)
    place = pages.read("a", 0, 40, runs=False)
    assert [list(values) for values in (place.pages, place.entries, place.steps)] == [[0, 1, 2], [5, 6, 7], [1, 1, 1]]


def test_pages_that_a_plan_reads_are_given_by_the_next() -> None:
    """Also those that it reads before it gives pages: for a preempted request, which is told first."""
    rig = PlanRig(pages=4, step_pages=0)
    lost = rig.add(30)
    rig.step()
    rig.preempt(lost)
    rig.add(60)
    plan = rig.step()
    assert rows_of(plan) == [("r0", 0, 30)]
    assert [abort.code for abort in plan.aborts] == ["ROW_POOL_FULL"]
    rig.add(60)
    assert not rig.step().aborts


def _copies(pages: Sequence[int]) -> int:
    """How many copies take rows of these pages, of at most four pages each."""
    runs = [1]
    for before, page in itertools.pairwise(pages):
        if page == before + 1 and runs[-1] < 4:
            runs[-1] += 1
        else:
            runs.append(1)
    return len(runs)


def test_pages_that_are_read_together_lie_next_to_each_other_however_long_requests_come_and_go() -> None:
    """Each copy costs the engine's thread two microseconds or more, and a page by itself is two copies."""
    rng, rig = random.Random(3), PlanRig(pages=1280)
    until: dict[str, int] = {}
    prompts: list[Sequence[int]] = []
    outputs: list[Sequence[int]] = []
    for step in range(1500):
        if len(rig.running) < 40 and step % 3 == 0:
            until[rig.add(rng.randrange(256, 769)).request_id] = step + rng.randrange(64, 193)
        for rows in rig.step().rows:
            assert isinstance(rows.place, PagePlace)
            (prompts if len(rows.place.pages) > 8 else outputs).append(rows.place.pages)
        for request in [request for request in rig.running.values() if until[request.request_id] <= step]:
            rig.finish(request)
    for read, most in ((prompts, 0.4), (outputs, 0.7)):
        late = read[len(read) // 2 :]
        assert sum(map(_copies, late)) < most * sum(map(len, late))


def test_pages_that_are_kept_for_the_output_of_some_are_given_to_others_before_anybody_fails() -> None:
    rig = PlanRig(pages=24, step_pages=0, output_rows_per_chunk=512)
    first, second = rig.add(16), rig.add(16)
    rig.step()
    rig.step()
    kept = {page for held in rig.pages._held.values() for page in range(held.kept, held.kept_end)}
    assert (len(kept), rig.pages.free) == (rig.pages._kept, 24 - 4)
    assert kept
    late = rig.add(20 * 16)
    plan = rig.step()
    assert not plan.aborts
    assert plan.table is not None
    assert kept <= {*plan.table.entries.values()}
    assert rig.pages._kept == 0
    for request in (first, second, late):
        rig.finish(request)
    rig.step()
    rig.step()
    assert rig.pages.free == 24


def test_pages_that_are_kept_for_a_request_stay_its_own_when_all_its_rows_are_read_and_it_goes_on_with_several_tokens() -> None:
    """vLLM paused, and read all there was; a drafter's tokens then reach into the page after the next."""
    rig = PlanRig(pages=24, step_pages=0)
    request = rig.add(8)
    while len(request.all_token_ids) < 33:
        rig.step()
    running, rig.running = rig.running, {}
    assert rows_of(rig.step())[0][2] == 32
    held = rig.pages._held[request.request_id]
    assert (len(held.pages), held.kept_end - held.kept) == (0, rig.pages._kept)
    assert rig.pages._kept
    rig.running = running
    request.all_token_ids.extend([7] * 20)
    for _ in range(3):
        rig.step()
        kept = sum(held.kept_end - held.kept for held in rig.pages._held.values())
        assert kept == rig.pages._kept
    late = rig.add(20 * 16)  # Wants all that is free, and what is kept too.
    assert not rig.step().aborts
    for ended in (request, late):
        assert "error" not in rig.finish(ended)
    rig.step()
    rig.step()
    assert sorted(rig.pages._free[rig.pages._given :]) == list(range(24))


def test_a_plan_reads_from_few_requests_and_the_next_from_others() -> None:
    """What is worth reading in one step leaves in every second of 16: 64 prompts, and the rows that they have written since."""
    rig = PlanRig(output_rows_per_chunk=32)
    names = [rig.add(16).request_id for _ in range(64)]
    for _ in range(2):
        assert not rig.step().rows
    plans = [rows_of(rig.step()) for _ in range(17)]
    assert [len(plan) for plan in plans] == [REQUESTS, 0] * 8 + [0]
    assert [req_id for plan in plans for req_id, _, _ in plan] == names
    more = [rows_of(rig.step()) for _ in range(34 + STEPS_MAX)]
    assert {len(plan) for plan in more} == {0, REQUESTS}
    assert [req_id for plan in more for req_id, _, _ in plan] == names


def test_what_a_plan_reads_ends_in_the_page_table_with_the_next_one_which_reads_nothing() -> None:
    rig = PlanRig()
    for _ in range(24):
        rig.add(100)
    plans = [rig.step() for _ in range(9)]
    assert [len(plan.rows) for plan in plans] == [0, 0, 8, 0, 8, 0, 8, 0, 0]
    ended = [sum(page < 0 for page in plan.table.entries.values()) if plan.table else 0 for plan in plans]
    assert ended == [0, 0, 0, 8 * 6, 0, 8 * 6, 0, 8 * 6, 0]


def test_a_plan_that_gives_many_pages_leaves_reads_to_the_next_one_and_that_one_to_nobody() -> None:
    rig = PlanRig()
    for number in range(140):
        rig.add(16 + number % 2)
    plans = [rig.step() for _ in range(22)]
    given = [sum(page >= 0 for page in plan.table.entries.values()) if plan.table else 0 for plan in plans]
    assert [step for step, pages in enumerate(given) if pages >= 70] == [0, 1, 16, 17]
    assert [len(rows_of(plan)) for plan in plans[2:]] == [8, 0] * 7 + [0] + [8, 0] * 2 + [8]


def test_a_plan_behind_many_ends_leaves_reads_to_the_next_one() -> None:
    rig = PlanRig()
    requests = [rig.add(100) for _ in range(12)]
    for _ in range(2):
        assert not rig.step().rows
    for request in requests[:9]:
        assert rig.finish(request)["num_tokens"] == 101
    plans = [rig.step() for _ in range(STEPS_MAX + 1)]
    ended = [len(plan.finishes) for plan in plans]
    assert ended[:3] == [0, 8, 0]
    assert sum(ended) == 9  # The last one goes along with those that run.
    assert rig.pages.in_use == 3


def test_beside_prompts_requests_that_ended_go_along_with_others_and_are_all_read_after_32_steps() -> None:
    rig = PlanRig(step_tokens=1400)
    requests = [rig.add(20) for _ in range(30)]
    assert not rig.step().rows
    for request in requests[:29]:
        rig.finish(request)
    rig.add(20, capture=False)
    assert not rig.step().rows  # Those of 30 are less than half a step's.
    rig.add(100)  # With these there are more. Once they are read, the others can wait.
    plan = rig.step()
    assert {rows.req_id for rows in plan.rows} >= {"r29", "r31"}
    assert (len(plan.rows), len(plan.finishes)) == (REQUESTS_MAX, REQUESTS_MAX - 2)
    for _ in range(BUSY_STEPS_MAX - 2):
        rig.add(20, capture=False)
        assert not rig.step().finishes
    rig.add(20, capture=False)
    assert len(rig.step().finishes) == 29 - (REQUESTS_MAX - 2)


def test_more_requests_than_plans_read_from_leave_in_larger_parts() -> None:
    rig = PlanRig(pages=2000)
    for _ in range(200):
        rig.add(16)
    for _ in range(2):
        rig.step()
    plans = [len(rig.step().rows) for _ in range(48)]
    assert sum(plans) == 200
    assert plans[0] == 200 // 16


def test_output_rows_of_others_go_along_from_half_of_a_chunk_on() -> None:
    rig = PlanRig(output_rows_per_chunk=32)
    rig.add(16)
    for _ in range(STEPS_MAX + 8):
        rig.step()
    rig.add(16)
    for _ in range(STEPS_MAX + 1):
        rig.step()
    for _ in range(60):
        if read := rows_of(rig.step()):
            break
    assert [(req_id, stop - start) for req_id, start, stop in read] == [("r0", 32 + STEPS_MAX), ("r1", 24)]


@pytest.mark.parametrize(
    ("captures", "pages", "step_tokens", "rows"),
    [
        (4, 4096, 8192, 192),  # Room for everything.
        (4, 80, 8192, 144),  # Half of the 80 - 10 pages that no step can want are 35, of 560 rows: 4 times 140.
        (4, 48, 8192, 96),
        (4, 30, 8192, 48),
        (4, 4096, 400, 144),  # Staging has three steps' 1,200 rows, and half of them is 4 times 150.
        (4, 4096, 200, 96),
        (4, 4096, 128, 48),
    ],
)
def test_output_rows_wait_for_192_while_pages_and_staging_have_room_and_else_for_fewer(
    captures: int, pages: int, step_tokens: int, rows: int
) -> None:
    rig = PlanRig(pages=pages, step_pages=10, step_tokens=step_tokens)
    for _ in range(captures):
        rig.add(16)
    read: list[int] = []
    for step in range(420):
        read += [stop - start for _, start, stop in rows_of(rig.step()) if step > STEPS_MAX]
    assert len(read) >= captures
    assert {rows <= count <= rows + STEPS_MAX for count in read} == {True}, read


def test_rows_that_wait_because_there_was_room_are_read_soon_once_there_is_none() -> None:
    """Who waits is looked at again after 48 rows more: nobody fails meanwhile, and nobody waits for 192."""
    rig = PlanRig(pages=400, step_pages=100)
    first = [rig.add(16) for _ in range(8)]
    for _ in range(110):
        rig.step()
    held = max(capture.covered - capture.next for capture in rig.half._live.values())
    assert held > 96
    late = [rig.add(16) for _ in range(60)]
    plans = [rig.step() for _ in range(200)]
    assert not any(plan.aborts for plan in plans)
    soon = {req_id for plan in plans[: 48 + STEPS_MAX] for req_id, _, _ in rows_of(plan)}
    assert soon >= {request.request_id for request in first}
    for request in first + late:
        assert "error" not in rig.finish(request)


def test_many_rows_that_get_worth_reading_at_once_still_leave_by_a_few_requests_a_plan() -> None:
    """They are more than may wait for company, but a read of all would fill staging in one step."""
    rig = PlanRig(pages=8192, step_pages=600, step_tokens=8192)
    for _ in range(40):
        rig.add(16)
    found = [len(plan.rows) for plan in (rig.step() for _ in range(300)) if plan.rows]
    assert max(found) == REQUESTS
    assert sum(found) == 80


def test_a_step_that_computes_nothing_reads_all_there_is_and_is_asked_for_only_then() -> None:
    rig = PlanRig(output_rows_per_chunk=32)
    assert not rig.half.has_unread()
    rig.add(40)
    rig.add(50)
    assert not rig.half.has_unread()
    for _ in range(STEPS_MAX + 2):
        rig.step()
    assert rig.half.has_unread()
    running, rig.running = rig.running, {}
    plan = rig.step()
    assert rows_of(plan) == [("r0", 40 + STEPS_MAX - 1, 49), ("r1", 50 + STEPS_MAX - 1, 59)]
    assert not rig.half.has_unread()
    rig.running = running
    rig.step()
    assert rig.half.has_unread()


def test_the_gauges_are_told_once_a_second_and_at_once_when_no_capture_is_left() -> None:
    rig = PlanRig()
    request = rig.add(100)
    rig.step()
    assert rig.half.take_stats() == {"row_pool_pages_in_use": 7, "row_pool_pages_free": 4089, "row_pool_bytes": 4096 * 16 * 16}
    for _ in range(40):
        rig.step()
        assert rig.half.take_stats() == {}
    rig.seconds = 1.0
    assert rig.half.take_stats().keys() == {"row_pool_pages_in_use", "row_pool_pages_free", "row_pool_bytes"}
    rig.finish(request)
    rig.step()
    assert rig.half.take_stats()["row_pool_pages_in_use"] == 0


def test_a_capture_that_was_short_is_looked_at_when_it_ends() -> None:
    rig = PlanRig()
    rig.half.take_stats()
    request = rig.add(100)
    rig.step()
    rig.half.take_stats()
    assert not rig.half.tells_gauges  # The second is not over.
    rig.finish(request)
    rig.step()
    rig.half.take_stats()
    assert rig.half.tells_gauges
    rig.half.take_stats()
    assert not rig.half.tells_gauges


@pytest.mark.parametrize("output_rows", [None, 1, 5, 17])
@pytest.mark.parametrize("seed", range(25))
def test_steps_like_the_one_before_plan_what_they_would_plan_if_they_looked_at_everybody(
    seed: int, output_rows: int | None
) -> None:
    rigs = [PlanRig(pages=200, step_pages=60, output_rows_per_chunk=output_rows) for _ in range(2)]
    away: list[list[PlannedRequest]] = []  # Preempted, and not back yet: the same one of each rig.
    chance = random.Random(seed)
    quiet = 0
    for _ in range(300):
        what, name = chance.random(), chance.choice([*rigs[0].running, ""])
        if what < 0.06 and len(rigs[0].running) < 6:
            params = {"capture": chance.random() < 0.8, "include_output_tokens": chance.random() < 0.7}
            prompt = chance.randrange(1, 60)
            for rig in rigs:
                rig.add(prompt, **params)
        elif what < 0.09 and name in rigs[0].half._captures:
            for rig in rigs:
                rig.finish(rig.running[name])
        elif what < 0.11 and name:
            away.append([rig.running[name] for rig in rigs])
            for rig, request in zip(rigs, away[-1], strict=True):
                rig.preempt(request)
        elif what < 0.14 and away:
            for rig, request in zip(rigs, away.pop(), strict=True):
                rig.running[request.request_id] = request
        rigs[1].half._rows._even = None  # This one looks at everybody.
        plans = [rig.step() for rig in rigs]
        ours, theirs = plans
        quiet += not ours
        # Who is looked at in one step has no order.
        assert sorted(rows_of(ours)) == sorted(rows_of(theirs))
        assert _by_request(ours) == _by_request(theirs)
        assert set(ours.table.entries if ours.table else ()) == set(theirs.table.entries if theirs.table else ())
    assert quiet > 50 or output_rows == 1


def _by_request(plan: StepPlan) -> list[tuple[str, str]]:
    said: tuple[SampleOpen | SampleFinish | SampleAbort, ...] = (*plan.opens, *plan.finishes, *plan.aborts)
    return sorted((one.req_id, repr(one)) for one in said)


def _three() -> PlanRig:
    """Three captures, whose steps are alike by now."""
    rig = PlanRig()
    for _ in range(3):
        rig.add(20)
    for _ in range(4):
        rig.step()
    return rig


def _covered(rig: PlanRig) -> list[int]:
    return [capture.covered for capture in rig.half._live.values()]


def test_a_request_that_computes_tokens_again_is_where_the_step_says_and_not_where_the_step_before_would_have_it() -> None:
    rig = _three()
    output = rig.output()
    output.scheduled_cached_reqs.num_computed_tokens[1] -= 2
    rig.half.plan(output)
    first, second, third = _covered(rig)
    assert (second, third) == (first - 2, first)


def test_a_request_that_a_step_leaves_out_stays_where_it_is_also_when_one_like_it_runs_in_its_place() -> None:
    rig = _three()
    before = _covered(rig)
    output = rig.output()
    output.scheduled_cached_reqs.req_ids[1] = "of nobody"
    output.num_scheduled_tokens["of nobody"] = output.num_scheduled_tokens.pop("r1")
    rig.half.plan(output)
    assert _covered(rig) == [before[0] + 1, before[1], before[2] + 1]


def test_a_request_that_got_its_blocks_and_does_not_run_yet_has_computed_nothing() -> None:
    rig = _three()
    waiting = rig.add(20)
    del rig.running[waiting.request_id]
    for _ in range(5):
        rig.step()
    assert _covered(rig)[3] == 0
