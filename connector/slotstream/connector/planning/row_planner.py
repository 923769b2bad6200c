"""Which rows of the live captures the next plan reads, and which captures a step has to look at, at all.

A step that only decodes is a CUDA graph: the engine's thread launches it and waits. A step with prompt tokens is bound by that
very thread. So rows that can wait stay where they are until a step without prompt tokens, and there a little longer: a read
of a few requests costs the thread hardly more than a read of one. Those of many are read a few in a step, so that none gets
long. The step behind one with prompt tokens is no better than that one: before its launch is over, nobody hears of the first
tokens. Rows are read at once where room is short (for rows in pages, or for so many of them in staging), after STEPS_MAX steps,
or BUSY_STEPS_MAX where each is of these two kinds, and when their request loses its blocks. A step that computes nothing reads
all there is. The last rows of a request that ended wait as others do, while other captures have steps to come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import TYPE_CHECKING

from slotstream.connector.plan import PagePlace, RowPlan, SampleFinish, TableUpdate
from slotstream.connector.planning.captured_request import CapturedRequest, Due, Pace
from slotstream.connector.planning.row_places import NO_STEP, RowPlaces
from slotstream.wire.names import ROWS_MAX

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.request import Request

    from slotstream.connector.planning.request_params import CaptureParams

STEPS_MAX = 8  # That rows wait for company.
BUSY_STEPS_MAX = 32  # That they wait for a step whose thread has time.
OUTPUT_ROWS = 48  # Of a request that are worth reading, where nobody says how many,
OUTPUT_ROWS_MAX = 192  # and where pages have room for more. Most answers are then read once, at their end.
REQUESTS = 8  # That a plan reads from, where nothing is urgent: the next plan reads from others, and no step gets long.
REQUESTS_MAX = 16  # The same where the thread's time is short: a read of few costs it nearly as much.
_CHANGES = 8  # Captures that get a page or end with a plan: more of them are enough for its step.

Live = Mapping[str, CapturedRequest]


@dataclass(slots=True)
class _Even:
    """The last step computed one token of each of these requests, every capture among them; before the next one they will have
    computed so many in all.
    """

    req_ids: list[str]
    count: int
    computed: int


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that ended in step `since`: its rows from the capture's next one to `stop` are still to be read, at `place`."""

    capture: CapturedRequest
    stop: int
    place: PagePlace
    since: int


class RowPlanner:
    """Prompt rows are worth reading once they are computed; output rows when `output_rows` of a request wait.

    `output_rows` None: OUTPUT_ROWS_MAX while there is much room, else OUTPUT_ROWS. `group` is the index, in a request's block
    tables, of the KV-cache group whose slots name its rows.
    """

    def __init__(self, places: RowPlaces, group: int, output_rows: int | None, *, may_wait: bool = True) -> None:
        """`may_wait`: False where vLLM makes no step after the last request's."""
        self._places = places
        self._group = group
        self._output_rows, self._output_rows_max = output_rows or OUTPUT_ROWS, output_rows or OUTPUT_ROWS_MAX
        self._may_wait = may_wait
        self._rows: list[RowPlan] = []
        self._finishes: list[SampleFinish] = []
        self._ended: dict[str, _Ended] = {}  # Whose last rows are for a later plan, by request: the oldest first.
        self._waiting: dict[str, int] = {}  # Whose rows are worth reading, and since which step: the oldest first.
        # The step of the last plan, while something is captured. Whether it computed prompts is asked only where rows wait.
        self._last: SchedulerOutput | None = None
        self._step = 0  # Of the plan that is being made.
        self._changed = 0  # How many captures get a page with it, or ended since the last one,
        self._put_off = -1  # and the last step whose reads were left to the next one for that.
        self._read_in = -1  # The last step that read.
        self._was_short = False  # Whether `to_read` found pages short.
        self._pace = Pace()
        self._looks: dict[int, list[CapturedRequest]] = {}  # By step of the pace, who noted it as its `next_look`.
        self._even: _Even | None = None
        self._chunk_rows, self._chunk_of = 0, -1  # See `_chunk`, and in which step it was worked out.

    @property
    def computes_all(self) -> bool:
        """See `RowPlaces`."""
        return self._places.computes_all

    def end_plan(
        self, output: SchedulerOutput, live: Live
    ) -> tuple[tuple[RowPlan, ...], tuple[SampleFinish, ...], TableUpdate | None]:
        """The plan is made: the rows that it reads, the samples that end with it, and what it changes in the page table."""
        if self._ended and (count := self._ended_to_read(output, live)):
            for req_id in list(self._ended)[:count]:
                self._read_ended(self._ended.pop(req_id))
        if self._rows:
            self._read_in = self._step
        self._step += 1
        self._changed = 0
        self._last = output if live else None
        if not live:
            self._looks.clear()
        table = self._places.end_plan()
        if not (self._rows or self._finishes):
            return (), (), table
        planned, self._rows = tuple(self._rows), []
        finishes, self._finishes = tuple(self._finishes), []
        return planned, finishes, table

    def _ended_to_read(self, output: SchedulerOutput, live: Live) -> int:
        """Of how many requests that ended this plan reads the last rows, the oldest first."""
        count, places = len(self._ended), self._places
        # Where vLLM runs in its caller's process, no step may follow.
        if not (self._may_wait and live and output.num_scheduled_tokens) or places.reads_early or not places.has_room:
            return count
        waited = self._step - next(iter(self._ended.values())).since
        if self._is_busy(output):
            if waited >= BUSY_STEPS_MAX or not self._rows_can_wait(live):
                return count
            return max(0, REQUESTS_MAX - len(self._rows)) if self._rows else 0
        is_due = self._rows or waited >= STEPS_MAX or count >= REQUESTS or not self._rows_can_wait(live)
        if not is_due or self._puts_off(live):
            return 0
        return max(_few(count) - len(self._rows), REQUESTS if waited >= BUSY_STEPS_MAX else 0)

    def _read_ended(self, ended: _Ended) -> None:
        """Have this plan read the last rows of a request, and end its sample."""
        self._places.put_back(ended.place)
        self._rows.append(ended.capture.row_plan(ended.stop, ended.place))
        self._finishes.append(ended.capture.checked_finish(ended.stop))

    def _rows_can_wait(self, live: Live) -> bool:
        """Whether more rows may wait beside those that do."""
        step = self._pace.steps
        rows = sum([live[r].lead + step - live[r].next for r in self._waiting])
        if self._ended:
            rows += sum([ended.stop - ended.capture.next for ended in self._ended.values()])
        return self._places.rows_can_wait(rows)

    def _puts_off(self, live: Live) -> bool:
        """Whether this plan has so much to do that it leaves what it would read to the next one: it ends in the page table what
        the last plan read, or many captures get a page or ended. Of the latter never two do it in a row; none does it where no
        more rows can wait.
        """
        if self._read_in != self._step - 1:
            if self._changed <= _CHANGES or self._changed * _CHANGES <= len(live) or self._put_off == self._step - 1:
                return False
            self._put_off = self._step
        return self._rows_can_wait(live)

    def _is_busy(self, output: SchedulerOutput) -> bool:
        """Whether the thread has no time to spare in this step."""
        return _computes_prompts(output) or (self._last is not None and _computes_prompts(self._last))

    def is_on_its_way(self, req_id: str) -> bool:
        """Whether a request of this id ended, and a plan that is still to come reads its rows or ends its sample."""
        planned = any(rows.req_id == req_id for rows in self._rows) or any(end.req_id == req_id for end in self._finishes)
        return planned or req_id in self._ended

    def drop(self, req_id: str) -> None:
        """Takes what is planned for a request out of the next plan: its rows are not read, and its sample does not end."""
        self._rows = [row for row in self._rows if row.req_id != req_id]
        self._finishes = [finish for finish in self._finishes if finish.req_id != req_id]
        if (ended := self._ended.pop(req_id, None)) is not None:
            self._places.put_back(ended.place)

    def reset(self) -> list[str]:
        """Nothing is known of the device's side any more: what the next plan would have read is lost; the requests that
        ended with that.
        """
        self._places.reset()
        lost = [*(finish.req_id for finish in self._finishes), *self._ended]
        self._rows.clear()
        self._finishes.clear()
        self._ended.clear()
        self._waiting.clear()
        self._looks.clear()
        self._last = self._even = None
        return lost

    def end(self, req_id: str) -> None:
        """No more rows of a request are wanted than are planned."""
        self._places.end(req_id)
        self._waiting.pop(req_id, None)

    def gauges(self) -> Mapping[str, float]:
        """See `RowPlaces`."""
        return self._places.gauges()

    # -- a step

    def begin(self, request: Request, params: CaptureParams, start: int, stop: int) -> CapturedRequest:
        """Positions [start, stop) of a request are captured from now on."""
        self._even = None
        return CapturedRequest(request, params, start, stop, start, self._pace)

    def due(self, live: Live, output: SchedulerOutput) -> list[Due]:
        """The captures that `advance` has to look at in this step.

        A decode step computes a row or two of each request. Nearly always these have a page, and too few rows wait to be read:
        with 64 requests, looking at each in every step cost a decode step some percent. So a step like the one before looks at
        those alone that noted it, and the loop of other steps calls nothing.
        """
        cached = output.scheduled_cached_reqs
        self._pace.steps = step = self._pace.steps + 1
        noted: list[CapturedRequest] = []
        if step in self._looks:
            looks = self._looks[step]
            del self._looks[step]
            # Who noted another step in between is there twice.
            names = {c.request.request_id: c for c in looks if c.next_look == step}
            noted = [c for name, c in names.items() if name in live and live[name] is c]
        if cached.resumed_req_ids or output.kv_cache_block_copies:
            self._even = None
            for capture in live.values():
                capture.table = None
        even = self._even
        if (
            even is not None
            and output.total_num_scheduled_tokens == even.count
            and not output.scheduled_new_reqs
            and cached.req_ids == even.req_ids
            and sum(cached.num_computed_tokens) == even.computed
        ):
            even.computed += even.count
            due = self._noted(noted, live, cached)
        else:
            due = self._all_due(noted, live, output)
        if not due:
            return due
        self._changed += len(due)
        others = self._places.grow(due)
        if grown := [capture for _, capture, _, covered in due if covered <= capture.placed_until]:
            self._rest_where_ripe(grown)
        return others

    def _noted(self, noted: list[CapturedRequest], live: Live, cached: CachedRequestData) -> list[Due]:
        """Who is due of those that noted this step, where it is even."""
        if any(new := cached.new_block_ids):
            for req_id, blocks in compress(zip(cached.req_ids, new, strict=True), new):
                if blocks and req_id in live:
                    capture = live[req_id]
                    if capture.table is not None:
                        capture.table += blocks[self._group]
        if not noted:
            return []
        step = self._pace.steps
        due = [(c.request.request_id, c, c.lead + step - 1, c.lead + step) for c in noted if c.lead + step > c.placed_until]
        if len(due) < len(noted):  # Also those whose rows were read since they noted this step.
            self._rest_where_ripe([c for c in noted if c.lead + step <= c.placed_until])
        return due

    def _all_due(self, noted: list[CapturedRequest], live: Live, output: SchedulerOutput) -> list[Due]:
        """Who is due of all that a step computes; those that it leaves out stay where they are.

        Who `noted` this step notes another.
        """
        scheduled, cached, group = output.num_scheduled_tokens, output.scheduled_cached_reqs, self._group
        step, seen = self._pace.steps, 0
        due: list[Due] = []
        placed: list[CapturedRequest] = []
        for req_id, start, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            if req_id not in live:
                continue
            seen += 1
            capture, covered = live[req_id], start + scheduled[req_id]
            if blocks and capture.table is not None:
                capture.table += blocks[group]
            is_late, capture.lead = capture.lead != covered - step, covered - step
            if covered > capture.placed_until:
                due.append((req_id, capture, start, covered))
            elif is_late or covered > capture.quiet_until:
                placed.append(capture)
        for new in output.scheduled_new_reqs:
            if new.req_id in live:
                seen += 1
                capture, start = live[new.req_id], new.num_computed_tokens
                capture.table = None
                due.append((new.req_id, capture, start, start + scheduled[new.req_id]))
        if seen < len(live):
            for req_id, capture in live.items():
                if req_id not in scheduled:
                    capture.lead -= 1
        if placed:
            self._rest_where_ripe(placed)
        if noted:
            self._note_looks(noted)
        self._even, count = None, len(cached.req_ids)
        if output.total_num_scheduled_tokens == count and not output.scheduled_new_reqs and seen == len(live):
            self._even = _Even(cached.req_ids, count, sum(cached.num_computed_tokens) + count)
        return due

    def _rest_where_ripe(self, placed: list[CapturedRequest]) -> None:
        """Of captures that have a place: those may have rows worth reading, and all are looked at again."""
        step = self._pace.steps
        for capture in placed:
            if capture.lead + step > capture.quiet_until:
                self._rest(capture)
        self._note_looks(placed)

    def _note_looks(self, captures: Iterable[CapturedRequest]) -> None:
        """Note the step in which each of these is due, if it computes one token in each."""
        looks, now = self._looks, self._pace.steps
        for capture in captures:
            until, quiet = capture.placed_until, capture.quiet_until
            if quiet < until:
                until = quiet
            step = until - capture.lead + 1
            if step <= now:
                step = now + 1
            if until < ROWS_MAX and capture.next_look != step:
                capture.next_look = step
                if step in looks:
                    looks[step].append(capture)
                else:
                    looks[step] = [capture]

    def advance(self, capture: CapturedRequest, start: int, covered: int, output: SchedulerOutput) -> None:
        """This step computes a request's positions [start, covered): see that they have a place.

        Raises SlotStreamError when there is no room.
        """
        capture.placed_until = capture.quiet_until = 0
        capture.lead = covered - self._pace.steps
        table: Sequence[int] | None = capture.table
        if table is None:
            table = self._table(capture.request.request_id, output)
            if self._places.tables_grow:
                capture.table = list(table)
        self._places.cover(capture, start, covered, table)
        self._rest(capture)
        self._note_looks((capture,))

    def _rest(self, capture: CapturedRequest) -> None:
        """Note whether rows of a capture are worth reading, and until when it need not be looked at."""
        prompt = capture.request.num_prompt_tokens
        if capture.stop < prompt:
            prompt = capture.stop
        covered = capture.lead + self._pace.steps
        capture.placed_until = self._places.covered_until(capture) if covered >= prompt else 0
        unread, in_output = capture.readable - capture.next, capture.next >= prompt
        capture.quiet_until = ROWS_MAX
        least = self._output_rows if in_output else 1
        # Room is asked for only where it matters.
        if unread >= least and (not in_output or unread >= self._output_rows_max or unread >= self._chunk()):
            self._waiting.setdefault(capture.request.request_id, self._step)
        elif in_output and capture.next < capture.stop:  # Readable rows follow the computed ones, at some distance.
            capture.quiet_until = covered + self._output_rows - unread % self._output_rows - 1

    def _chunk(self) -> int:
        """Output rows of a request that are worth reading in this plan. Who has fewer is looked at again some rows later."""
        if self._chunk_of != self._step:  # Many may ask.
            self._chunk_of = self._step
            self._chunk_rows = self._output_rows_max if self._places.has_much_room else self._output_rows
        return self._chunk_rows

    # -- reading

    def to_read(self, live: Live, output: SchedulerOutput) -> Iterable[CapturedRequest]:
        """The captures that `read` is to read from in this plan: to be asked for once all have advanced.

        What is read from one decides whether another one is named.
        """
        if not (self._waiting or self._changed or self._was_short) and output.num_scheduled_tokens:
            return ()  # As it was: nothing is worth reading, and there is room.
        return self._to_read(live, output)

    def _to_read(self, live: Live, output: SchedulerOutput) -> Iterator[CapturedRequest]:
        if not output.num_scheduled_tokens and self._places.computes_all:
            yield from self.unread(live)
            return
        self._was_short = self._places.reads_early
        if self._was_short:
            yield from self._until_there_is_room(live)
            return
        if not self._waiting:
            return
        count = len(self._waiting)
        if not (self._may_wait and self._places.has_room):
            yield from self._with_company(self._longest_waiting(count, live), len(live), live, output)
            return
        waited = self._step - next(iter(self._waiting.values()))
        if self._is_busy(output):
            if waited >= BUSY_STEPS_MAX or not self._rows_can_wait(live):
                yield from self._longest_waiting(max(REQUESTS_MAX, count // 4), live)
            return
        is_due = count >= REQUESTS or waited >= STEPS_MAX or not self._rows_can_wait(live)
        if is_due and not self._puts_off(live):
            most = _few(count)
            yield from self._with_company(self._longest_waiting(most, live), most, live, output)

    def _longest_waiting(self, most: int, live: Live) -> list[CapturedRequest]:
        """Up to `most` of those whose rows are worth reading, who waited longest first."""
        return [live[req_id] for req_id in islice(self._waiting, most)]

    def has_unread(self, live: Live) -> bool:
        """Whether there are rows that a step can read which computes nothing."""
        return bool(self._ended or self.unread(live))

    def unread(self, live: Live) -> list[CapturedRequest]:
        """Captures with rows that could be read in a step that computes nothing: vLLM pauses, and may give memory away then."""
        return [c for c in live.values() if c.readable > c.next] if self._places.computes_all else []

    def _until_there_is_room(self, live: Live) -> Iterator[CapturedRequest]:
        """Those with the most rows first."""
        for number, capture in enumerate(sorted(live.values(), key=lambda capture: capture.next - capture.covered)):
            if number >= REQUESTS_MAX and not self._places.reads_early:
                return
            yield capture

    def _with_company(
        self, chosen: list[CapturedRequest], most: int, live: Live, output: SchedulerOutput
    ) -> list[CapturedRequest]:
        """Also captures half of whose output rows are there, where output rows are read at all, up to `most` captures.

        One read for many costs the engine what one for each would cost. Captures that are read together
        stay together: all of them then wait for the same number of rows.
        """
        if len(chosen) >= most or not any(capture.is_in_output for capture in chosen):
            return chosen
        scheduled, half = output.num_scheduled_tokens, -(-self._chunk() // 2)
        least = half - self._pace.steps
        names = {capture.request.request_id for capture in chosen}
        company = [
            capture
            for req_id, capture in live.items()
            if capture.lead - capture.next >= least and req_id in scheduled and req_id not in names
        ]
        company = [c for c in company if c.is_in_output and c.readable - c.next >= half]
        return chosen + company[: most - len(chosen)]

    def read(self, capture: CapturedRequest, output: SchedulerOutput) -> None:
        """Have the rows of a capture read that are there. Raises RowsNotComputed."""
        req_id, stop = capture.request.request_id, capture.readable
        self._waiting.pop(req_id, None)
        if stop > capture.next:
            table = self._table(req_id, output) if self._places.holds_blocks else ()
            scheduled = output.num_scheduled_tokens
            computed_from = capture.covered - scheduled[req_id] if req_id in scheduled else NO_STEP
            self._plan_rows(capture, stop, computed_from, table)
        is_quiet = stop < capture.request.num_prompt_tokens or stop >= capture.stop
        capture.quiet_until = ROWS_MAX if is_quiet else capture.lead + self._pace.steps + self._output_rows - 1
        if capture.quiet_until < capture.placed_until:
            self._note_looks((capture,))

    def _table(self, req_id: str, output: SchedulerOutput) -> Sequence[int]:
        """The block table of a request that this step runs."""
        assert output.kv_connector_block_state is not None, "vLLM offers block tables to its connector"
        tables = output.kv_connector_block_state.get_block_ids(req_id)
        assert tables is not None, "a scheduled request has a block table"
        table: Sequence[int] = tables[self._group]
        return table

    def _plan_rows(self, capture: CapturedRequest, stop: int, computed_from: int, table: Sequence[int]) -> None:
        """Have the rows up to `stop` read in the next plan. Raises RowsNotComputed."""
        place = self._places.read(capture, capture.next, stop, computed_from, table)
        self._rows.append(capture.row_plan(stop, place))
        capture.next = stop

    # -- between steps

    def first_row_after_reset(self, capture: CapturedRequest) -> int:
        """The first row of the sample that is computed after vLLM has dropped its caches, and every request its blocks."""
        return max(capture.next, capture.readable if self._places.computes_all else 0) - capture.start

    def preempted(self, capture: CapturedRequest) -> None:
        """A request lost its blocks, and will compute all its tokens again: confirmed rows that wait are read before that."""
        capture.placed_until = capture.quiet_until = 0
        capture.table = None
        self._waiting.pop(capture.request.request_id, None)
        if not self._places.computes_all:
            return
        capture.request.skip_reading_prefix_cache = True
        stop = capture.readable
        if stop > capture.next:
            self._plan_rows(capture, stop, NO_STEP, ())
        self._places.preempted(capture)
        capture.recomputed = True

    def complete(self, capture: CapturedRequest, stop: int) -> None:
        """All rows up to `stop` are planned: the sample ends with this plan."""
        self._finishes.append(capture.sample_finish(stop))

    def finish(self, capture: CapturedRequest, stop: int, block_ids: Sequence[int]) -> bool:
        """Plan the last rows of a request that ended, and the end of its sample; whether its blocks must be held until then.

        Nothing more is wanted of it. Raises RowsNotComputed.
        """
        req_id, start = capture.request.request_id, capture.next
        if start < stop and self._places.computes_all:
            capture.check_whole(stop)
            place = self._places.take_out(capture, start, stop)
            self._waiting.pop(req_id, None)
            self._ended[req_id] = _Ended(capture, stop, place, self._step)
            self._changed += 1
            return False
        finish = capture.sample_finish(stop)  # First: it asks whether the sample is whole.
        if stop <= start:
            self._finishes.append(finish)
            self.end(req_id)
            return False
        self._waiting.pop(req_id, None)
        self._plan_rows(capture, stop, NO_STEP, block_ids if stop <= capture.request.num_computed_tokens else ())
        self._finishes.append(finish)
        return self._places.holds_blocks


def _few(count: int) -> int:
    """From how many of `count` a plan reads where the thread has time: a few, and of hundreds a sixteenth."""
    return REQUESTS if count < REQUESTS * 16 else count // 16


def _computes_prompts(output: SchedulerOutput) -> bool:
    """Whether a step computes tokens of a prompt, or those of a preempted request again."""
    cached = output.scheduled_cached_reqs
    if output.scheduled_new_reqs or 0 in cached.num_output_tokens:
        return True
    drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
    return bool(output.total_num_scheduled_tokens > len(output.num_scheduled_tokens) + drafts)
