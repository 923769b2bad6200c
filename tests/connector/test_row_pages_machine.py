"""Pages for any requests in any steps: every row that is read is its own token's, and in the end every page is free.

A small engine plays vLLM's scheduler (chunks, preemptions, drafts that are rejected, answers that come a step late, aborts,
faults) around the real scheduler half, and the real page table and write on the CPU. A row holds (request, position, token), so
one that is read from the wrong place, too early, or after somebody else wrote there, is seen.

SLOTSTREAM_MACHINE_EXAMPLES=2000 gives it a long run.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.worker_rig import config, row_kind

from slotstream.connector.faults import SampleFault
from slotstream.connector.plan import RowPlan, StepPlan
from slotstream.connector.planning.page_allocator import NULL_BLOCK, PageAllocator
from slotstream.connector.planning.row_places import PagePlaces
from slotstream.connector.planning.row_planner import BUSY_STEPS_MAX, REQUESTS, STEPS_MAX
from slotstream.connector.planning.scheduler import SchedulerHalf
from slotstream.connector.reading.located import page_words
from slotstream.connector.reading.row_pages import RowPages
from slotstream.connector.reading.row_write import write_rows
from slotstream.connector.row_pool import RowPoolShape, page_rows_of
from slotstream.connector.sending.row_check import Segment, StampEvidence, rows_in_pages

EXAMPLES = int(os.environ.get("SLOTSTREAM_MACHINE_EXAMPLES", "150"))
_MODEL_LEN = 400


@dataclass
class _Request:
    """As much of vLLM's Request as the scheduler half looks at."""

    request_id: str
    number: int
    prompt: list[int]
    max_tokens: int
    kv_transfer_params: dict[str, Any]
    all_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    status: Any = None
    table: list[int] = field(default_factory=list)
    late: list[list[int]] = field(default_factory=list)  # Tokens that are sampled, and that the scheduler has not heard of.
    mm_features: tuple[()] = ()
    sampling_params: Any = None
    prompt_embeds: Any = None

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt)
        self.say("WAITING")

    def say(self, status: str) -> None:
        self.status = SimpleNamespace(name=status)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.prompt

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - len(self.prompt)

    def is_finished(self) -> bool:
        return bool(self.status.name.startswith("FINISHED"))

    def get_finished_reason(self) -> str:
        return "length"


class _WatchedPlaces(PagePlaces):
    """`were_short`: whether the plan that is being made was told that pages are."""

    were_short = False

    @property
    def reads_early(self) -> bool:
        available = self._pages.free + len(self._pages._let_go)
        self.were_short |= available < max(self._pages.shape.pages / 4, self._pages._step_pages)
        return super().reads_early

    def rows_can_wait(self, rows: int) -> bool:
        self.were_short |= rows > self._step_tokens / 2
        return super().rows_can_wait(rows)


class _Engine:
    """`asynchronous`: what is sampled in a step is known to the scheduler only after the next one was planned.

    `window`: how many positions attention looks back; blocks behind it go to others. 0: all of them.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        asynchronous: bool,
        drafts: int,
        blocks: int,
        block_size: int,
        pages: int,
        step_pages: int = 0,
        window: int = 0,
    ) -> None:
        self.rng = rng
        self.asynchronous = asynchronous
        self.drafts = 0 if asynchronous else drafts
        self.block_size = block_size
        self.free_blocks = list(range(1, blocks))
        shape = RowPoolShape(pages, page_rows_of(block_size))
        self.allocator = PageAllocator(shape, block_size, step_pages)
        self.output_rows = rng.choice([1, 3, 32])
        self.output_rows_max = self.output_rows * rng.choice([1, 4])  # While pages and staging have much room.
        options = config(layers=[0], output_rows_per_chunk=self.output_rows)
        self.window = window
        self.places = _WatchedPlaces(self.allocator, row_bytes=16, keeps_blocks=not window, step_tokens=rng.choice([60, 5000]))
        self.seconds = itertools.count()
        self.half = SchedulerHalf(
            options, 1, block_size, _MODEL_LEN, lambda _: None, self.places, lambda: float(next(self.seconds))
        )
        self.half._rows._output_rows_max = self.output_rows_max
        self.device = RowPages(shape.rows, row_kind(1), 4, torch.float32, torch.device("cpu"))
        self.device.cut(shape, blocks * block_size)
        self.waiting: list[_Request] = []
        self.running: list[_Request] = []
        self.preempted: set[str] = set()
        self.allocated: list[_Request] = []
        self.got: dict[str, list[int]] = {}  # Blocks that requests got for the next step.
        self.truth: dict[str, _Request] = {}
        self.stored: dict[str, dict[int, tuple[float, ...]]] = {}
        self.first_positions: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.failed: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}  # As the connector told them last.
        self.lost: set[str] = set()  # Who was preempted, and has not run since.
        self.steps = 0
        self.ripe: dict[str, int] = {}  # Whose rows are worth reading, since which step.
        self.worth: dict[str, int] = {}  # As far as the planner sees it.
        self.urgent: set[str] = set()  # Who ended or lost its blocks since the last step.
        self.over: dict[str, int] = {}  # Who ended, with rows still to be read, in which step.
        self.read_late = self.read_at_once = 0
        self.numbers = 0
        self.weights = 1
        self.was_prompt = False  # Whether the last step computed tokens of prompts,
        self.was_busy = False  # and whether its thread had no time.
        self.seen_late = 0  # Reads of rows that the scheduler knew to be computed.
        self.known: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The device's rows and stamps behind the last steps: of the first of these the scheduler has heard all results."""

    # What a user does.

    def add(self) -> None:
        self.numbers += 1
        prompt = [self.rng.randrange(1000) for _ in range(self.rng.choice([1, 2, 7, 8, 9, 31, 33, 100]))]
        params: dict[str, Any] = {"include_output_tokens": self.rng.random() < 0.6}
        if self.rng.random() < 0.3:
            start = self.rng.randrange(len(prompt))
            params["tokens"] = [start, None]
        if self.rng.random() < 0.2:
            params = {"capture": False}
        request = _Request(f"r{self.numbers}", self.numbers, prompt, self.rng.randint(1, 60), {"slotstream": params})
        self.waiting.append(request)
        self.half.on_new(request)

    def abort(self) -> None:
        if everybody := self.waiting + self.running:
            self._finish(self.rng.choice(everybody), "FINISHED_ABORTED")

    def fault(self) -> None:
        """The worker gives a sample up."""
        if self.half._live:
            self.half.on_faults([SampleFault(self.rng.choice(list(self.half._live)), "STAGING_FULL", "no room")])

    def reset(self) -> None:
        """The caches are dropped for new weights: every request starts over, and what it has sampled unheard is lost."""
        for request in reversed(self.running[:]):
            self._preempt(request)
            request.late.clear()
        self.weights += 1
        self.half.on_cache_reset()

    def sleep(self) -> None:
        """The engine pauses, gives its memory away, and starts over."""
        self.step(idle=True)
        while self.urgent or self.half.has_unread() or any(request.late for request in self.running):
            self.step(idle=True)  # vLLM also makes a step for the requests that ended.
        self.reset()
        self.device.forget()

    # One step of vLLM's.

    def step(self, *, broken: bool = False, idle: bool = False) -> None:
        self.drafted: dict[str, int] = {}
        scheduled = {} if idle else self._schedule()
        self.lost |= self.preempted
        resumed = self.lost & scheduled.keys()
        self.lost -= resumed
        output: Any = SimpleNamespace(
            num_scheduled_tokens=dict(scheduled),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(scheduled),
                resumed_req_ids=resumed,
                num_computed_tokens=[self._by_id(r).num_computed_tokens for r in scheduled],
                new_block_ids=[((), tuple(self.got[r])) if r in self.got else None for r in scheduled],
                num_output_tokens=[self._known(self._by_id(r)) - self._by_id(r).num_prompt_tokens for r in scheduled],
            ),
            scheduled_new_reqs=[],
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={r: [-1] * count for r, count in self.drafted.items() if r in scheduled},
            preempted_req_ids=set(self.preempted),
            has_sync_kv_loads=False,
            kv_cache_block_copies=None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda r: ((), tuple(self._by_id(r).table))),
        )
        self.urgent |= self.preempted
        self.preempted.clear()
        self.got.clear()
        self.steps += 1
        self.places.were_short = False
        if broken:  # The hook guard's way: nothing is known of a plan that was not made.
            self.half.fail_all()
            plan = StepPlan()
        else:
            plan = self.half.plan(output)
            self.half.delivered()
            self._check_reasons(plan, scheduled)
        self.urgent.clear()
        self._check_pages()
        self.gauges |= self.half.take_stats()
        used = len(self._held())
        pages = self.allocator.shape.pages
        assert (self.gauges["row_pool_pages_in_use"], self.gauges["row_pool_pages_free"]) == (used, pages - used)
        assert self.gauges["row_pool_bytes"] == self.device.pool.nbytes
        self.device.begin_step(plan)
        sampled = self._forward(scheduled)
        self._execute(plan)
        self.known = [*self.known, (self.device.pool.clone(), self.device.stamps.clone())][-2 if self.asynchronous else -1 :]
        for request, tokens in sampled:
            request.num_computed_tokens += scheduled[request.request_id]
            request.late.append(tokens)
        for request in self.running + self.waiting:
            while len(request.late) > (1 if self.asynchronous and request.request_id in scheduled else 0):
                self._answer(request, request.late.pop(0))

    def _by_id(self, req_id: str) -> _Request:
        return next(r for r in self.running if r.request_id == req_id)

    def _schedule(self) -> dict[str, int]:
        while self.waiting and len(self.running) < 5 and self.rng.random() < 0.7:
            request = self.waiting.pop(0)
            request.say("RUNNING")
            self.running.append(request)
            self.allocated.append(request)
            self._hit(request)
        scheduled: dict[str, int] = {}
        for request in list(self.running):
            if request not in self.running or (self.rng.random() < 0.1 and request.num_computed_tokens):
                continue  # Preempted for another, or left out this time.
            known = self._known(request)
            left = known - request.num_computed_tokens
            if left <= 0 or known >= len(request.prompt) + request.max_tokens + (1 if self.asynchronous else 0):
                continue
            count = min(left, self.rng.choice([1, 5, 8, 16, 64]))
            if count == left and not request.late and request.num_output_tokens:
                self.drafted[request.request_id] = self.rng.randint(0, self.drafts)
                count += self.drafted[request.request_id]
            if not self._blocks_for(request, request.num_computed_tokens + count, scheduled):
                continue
            scheduled[request.request_id] = count
        for request in self.allocated:
            if request in self.running:
                blocks: Any = SimpleNamespace(blocks=([], [SimpleNamespace(block_id=b) for b in request.table]))
                self.half.on_alloc(request, blocks)
        self.allocated.clear()
        return {r: n for r, n in scheduled.items() if any(r == one.request_id for one in self.running)}

    def _known(self, request: _Request) -> int:
        """Tokens that it has, those included that the scheduler has not heard of."""
        return len(request.all_token_ids) + sum(map(len, request.late))

    def _hit(self, request: _Request) -> None:
        """Some of its tokens are in the prefix cache: nobody computes their rows."""
        hit = self.rng.randrange(len(request.all_token_ids))
        if not request.skip_reading_prefix_cache and hit <= len(self.free_blocks) * self.block_size:
            self._blocks_for(request, hit, {})
            request.num_computed_tokens = hit

    def _blocks_for(self, request: _Request, tokens: int, scheduled: dict[str, int]) -> bool:
        if self.window:
            for at in range(max(request.num_computed_tokens - self.window + 1, 0) // self.block_size):
                if request.table[at] != NULL_BLOCK:
                    self.free_blocks.append(request.table[at])
                    request.table[at] = NULL_BLOCK
        while len(request.table) * self.block_size < tokens:
            if not self.free_blocks:
                victim = next((r for r in reversed(self.running) if r is not request and r.table), None)
                if victim is None:
                    return False
                scheduled.pop(victim.request_id, None)
                self._preempt(victim)
                continue
            request.table.append(self.free_blocks.pop(self.rng.randrange(len(self.free_blocks))))
            self.got.setdefault(request.request_id, []).append(request.table[-1])
        return True

    def _preempt(self, request: _Request) -> None:
        self.running.remove(request)
        self.waiting.insert(0, request)
        self._free(request)
        self.got.pop(request.request_id, None)
        request.table = []
        request.say("PREEMPTED")
        request.num_computed_tokens = 0
        self.preempted.add(request.request_id)  # What it has sampled is still delivered, as vLLM does.

    def _free(self, request: _Request) -> None:
        self.free_blocks += [block for block in request.table if block != NULL_BLOCK]

    def _forward(self, scheduled: dict[str, int]) -> list[tuple[_Request, list[int]]]:
        rows, slots, sampled = [], [], []
        for req_id, count in scheduled.items():
            request = self._by_id(req_id)
            first = request.num_computed_tokens
            known = request.all_token_ids + [token for tokens in request.late for token in tokens]
            drafts = [self.rng.randrange(1000) for _ in range(first + count - len(known))]
            for position, token in enumerate([*known, *drafts][first : first + count], first):
                rows.append([request.number, position, token, float(self.weights)])
                slots.append(request.table[position // self.block_size] * self.block_size + position % self.block_size)
            if first + count >= len(known):  # Each draft that holds is a token, and then one more is sampled.
                accepted = self.rng.randint(0, len(drafts)) if drafts else 0
                sampled.append((request, [*drafts[:accepted], self.rng.randrange(1000)]))
            else:
                sampled.append((request, []))
        padding = self.rng.randint(0, 3)
        order = list(range(len(rows)))
        self.rng.shuffle(order)
        if rows and self.device.live:  # As the forward pass asks.
            hidden = torch.tensor([rows[at] for at in order] + [[-7.0] * 4] * padding)
            write_rows(self.device, [hidden], torch.tensor([slots[at] for at in order] + [-1] * padding))
        return sampled

    def _answer(self, request: _Request, tokens: list[int]) -> None:
        room = len(request.prompt) + request.max_tokens - len(request.all_token_ids)
        request.all_token_ids += tokens[:room]
        if not self.asynchronous:
            # Rejected drafts are computed again.
            request.num_computed_tokens = min(request.num_computed_tokens, max(len(request.all_token_ids) - 1, 0))
        if len(request.all_token_ids) >= len(request.prompt) + request.max_tokens:
            self._finish(request, "FINISHED_LENGTH_CAPPED")

    def _finish(self, request: _Request, status: str) -> None:
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        request.say(status)
        self.urgent.add(request.request_id)
        hold, answer = self.half.on_finished(request, request.table)
        assert not hold, "row pages hold no blocks of vLLM's"
        self.over[request.request_id] = self.steps + 1
        self._free(request)
        self.truth[request.request_id] = request
        if answer is not None and "error" in answer["slotstream"]:
            code = answer["slotstream"]["error"]["code"]
            self.failed[code] += 1
            self.ended.setdefault(request.request_id, code)

    # What the worker does with a plan, and what must be true.

    def _execute(self, plan: StepPlan) -> None:
        for opened in plan.opens:
            self.first_positions[opened.req_id] = opened.first_position
            self.stored[opened.req_id] = {}
        for rows in plan.rows:
            self._read(rows)
        for finish in plan.finishes:
            self.ended.setdefault(finish.req_id, "COMMITTED")
            kept = self.stored[finish.req_id]
            assert sorted(kept) == list(range(len(finish.token_ids))), "a row is missing, or one too many"
            first = self.first_positions[finish.req_id]
            number = int(finish.req_id[1:])
            assert [kept[row][:3] for row in sorted(kept)] == [(number, first + r, t) for r, t in enumerate(finish.token_ids)]
            weights = [kept[row][3] for row in sorted(kept)]
            changes = [row for row in range(1, len(weights)) if weights[row] != weights[row - 1]]
            assert ",".join(map(str, changes)) == finish.metadata.get("cache_resets", "")
        for abort in plan.aborts:
            self.ended.setdefault(abort.req_id, abort.code)

    def _read(self, plan: RowPlan) -> None:
        located = self.device.locate([plan], 1 << 20)
        (part,) = located.parts
        words = page_words(located, [part], [Segment(plan.req_id, 0, part.rows, 0)], self.device.shape.page_rows)
        at, kv_slots, steps = rows_in_pages(np.array(words), 1, self.device.shape.page_rows)
        index = torch.from_numpy(at)
        pool, stamps = self.known[0] if plan.computed else (self.device.pool, self.device.stamps)
        self.seen_late += plan.computed
        notes = stamps[index].numpy()
        assert not located.failed
        assert StampEvidence(kv_slots, steps, notes).problem(0, len(index)) is None, plan
        for row, values in enumerate(pool[index].flatten(1).tolist(), plan.first_row):
            assert row not in self.stored[plan.req_id], "a row is read twice"
            self.stored[plan.req_id][row] = tuple(values)

    def _check_reasons(self, plan: StepPlan, scheduled: Mapping[str, int]) -> None:
        """A step with prompt tokens reads only for a reason; a step without leaves nothing that is worth reading."""
        ripe, worth = {}, {}  # What a step has sampled may be known sooner than it is looked at.
        for req_id in self.urgent:  # All of theirs is read, and what is computed again counts anew.
            self.ripe.pop(req_id, None)
            self.worth.pop(req_id, None)
        for req_id, capture in self.half._live.items():
            unread, in_output = capture.readable - capture.next, capture.next >= capture.request.num_prompt_tokens
            seen = req_id in scheduled or req_id in self.ripe  # Who waits for its turn is not looked at.
            # Who waited while there was room is looked at again after a chunk more.
            most = self.output_rows if self.output_rows_max == self.output_rows else self.output_rows_max + self.output_rows
            if seen and unread > 0 and (not in_output or unread > most + self.drafts):
                ripe[req_id] = self.ripe.get(req_id, self.steps)
            if unread > 0 and (not in_output or unread >= self.output_rows):
                worth[req_id] = self.worth.get(req_id, self.steps)
        prompt = any(count > 1 + self.drafted.get(r, 0) for r, count in scheduled.items())
        prompt |= any(self._known(self._by_id(r)) == self._by_id(r).num_prompt_tokens for r in scheduled)
        busy, self.was_prompt = prompt or self.was_prompt, prompt
        read = {rows.req_id for rows in plan.rows} - self.urgent - self.over.keys()
        if busy and scheduled and read and not self.places.were_short:
            waited = {req_id for req_id, since in self.worth.items() if self.steps - since >= BUSY_STEPS_MAX}
            assert read & waited, "rows are read where the thread has no time, without a reason"
        step = self.half._rows._step - 1  # For what is in the page table, and then for what comes into it.
        put_off = int(self.half._rows._read_in == step - 1) or 2 * (self.half._rows._put_off == step)
        if self.places.were_short or (len(ripe) > REQUESTS and not (busy or put_off)):
            assert not ripe, "rows wait though nothing speaks against reading them"
        # The first step that has time again, behind many that had none, may be behind one that read all the same.
        most = BUSY_STEPS_MAX + (0 if busy else put_off) if busy or (put_off and self.was_busy) else STEPS_MAX + put_off
        self.was_busy = busy
        assert all(self.steps - since < most + self.drafts for since in ripe.values()), "rows wait for too long"
        for rows in plan.rows:
            self.over.pop(rows.req_id, None)
        waiting = [self.steps - self.over[req_id] for req_id in self.half._rows._ended]
        # Behind many steps whose thread has no time, more may wait than one plan reads from.
        is_full = not busy and (len(plan.rows) >= REQUESTS or put_off > 0)
        assert is_full or all(waited < most for waited in waiting), "the last rows of a request wait for too long"
        assert all(waited < BUSY_STEPS_MAX + STEPS_MAX for waited in waiting), "the last rows of a request wait for too long"
        assert (scheduled and self.half._live) or not waiting, "they wait for steps that may never come"
        self.read_late += len(read & self.ripe.keys())
        self.read_at_once += len(read - self.ripe.keys())
        self.ripe, self.worth = ripe, worth

    def _held(self) -> list[int]:
        taken_out = [page for ended in self.half._rows._ended.values() for page in ended.place.pages]
        return taken_out + [page for held in self.allocator._held.values() for page in held.pages if page >= 0]

    def _check_pages(self) -> None:
        held = self._held()
        kept = [page for one in self.allocator._held.values() for page in range(one.kept, one.kept_end)]
        assert len(kept) == self.allocator._kept, "pages are kept that nobody counts"
        everywhere = [*held, *kept, *self.allocator._free[self.allocator._given :]]
        assert len(set(everywhere)) == len(everywhere) == self.allocator.shape.pages, "a page is lost, or somebody else's too"
        for request in self.running:
            capture = self.half._live.get(request.request_id)
            if capture is None:
                continue
            assert capture.table in (None, request.table), "a block table that is not vLLM's"
            pages = self.allocator._held.get(request.request_id)
            last = (pages.first + len(pages.pages) - 1) * self.allocator.shape.page_rows if pages and pages.pages else 0
            assert last < capture.stop, "a page for rows that nobody wants"

    def drain(self) -> None:
        """To the end of every request, and one step more: what the last ones gave back."""
        for _ in range(5000):
            if not self.waiting and not self.running:
                break
            self.step()
        else:
            pytest.fail("the engine makes no progress")
        self.step()
        assert self.allocator.free == self.allocator.shape.pages
        self.step()
        assert not (self.device.table >= 0).any()


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 1 << 32), asynchronous=st.booleans(), drafts=st.integers(0, 3))
@example(seed=77380, asynchronous=False, drafts=0)  # A step that has time, behind one that had none, and read.
@example(seed=152464, asynchronous=False, drafts=3)  # More wait behind such steps than one plan reads from.
def test_every_row_that_is_read_is_its_own_and_every_page_comes_back(seed: int, asynchronous: bool, drafts: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([4, 8, 33, 64])
    engine = _Engine(
        rng,
        asynchronous=asynchronous,
        drafts=drafts,
        blocks=rng.choice([200, 500]) // block_size + 10,
        block_size=block_size,
        pages=rng.choice([8, 16, 200]),
        step_pages=rng.choice([0, 5, 50]),
        window=rng.choice([0, 0, 1, 20, 90]),
    )
    for _ in range(rng.randint(5, 60)):
        move = rng.random()
        if move < 0.3:
            engine.add()
        elif move < 0.34:
            engine.abort()
        elif move < 0.36:
            engine.fault()
        elif move < 0.38:
            engine.reset()
        elif move < 0.4:
            engine.sleep()
        else:
            engine.step(broken=rng.random() < 0.01)
    engine.drain()
    assert set(engine.failed) <= {
        "ROW_POOL_FULL",
        "ABORTED",
        "STAGING_FULL",
        "INTERNAL",
        "BAD_TOKEN_RANGE",
        "ROWS_NOT_COMPUTED",
    }


def test_a_pool_with_room_fails_nobody() -> None:
    """Without aborts and faults every sample is whole, also after preemptions: no row is read out of a cache."""
    for seed in range(30):
        rng = random.Random(seed)
        engine = _Engine(rng, asynchronous=bool(seed % 2), drafts=3, blocks=40, block_size=8, pages=400, window=30 * (seed % 3))
        for _ in range(8):
            engine.add()
            engine.step()
        engine.reset()
        engine.step()
        engine.sleep()
        engine.drain()
        assert not engine.failed, engine.failed
        assert engine.seen_late
        captured = [r for r in engine.truth.values() if r.kv_transfer_params["slotstream"].get("capture", True)]
        assert all(engine.ended[r.request_id] == "COMMITTED" for r in captured)
