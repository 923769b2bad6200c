"""Which rows of the live captures the next plan reads, and which captures a step has to look at, at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from slotstream.connector.plan import RowPlan, TableUpdate
from slotstream.connector.planning.captured_request import CapturedRequest
from slotstream.connector.planning.row_places import RowPlaces

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class RowPlanner:
    """Prompt rows are read in the step that computes them; output rows wait for `output_rows` of their kind.

    `group` is the index, in a request's block tables, of the KV-cache group whose slots name its rows.
    """

    def __init__(self, places: RowPlaces, group: int, output_rows: int) -> None:
        self._places = places
        self._group = group
        self._output_rows = output_rows
        self._rows: list[RowPlan] = []
        self._reads_output = False  # In the plan that is being made.

    @property
    def computes_all(self) -> bool:
        """See `RowPlaces`."""
        return self._places.computes_all

    def end_plan(self) -> tuple[tuple[RowPlan, ...], TableUpdate | None]:
        """The plan is made: the rows that it reads, and what it changes in the page table."""
        rows, self._rows = tuple(self._rows), []
        return rows, self._places.end_plan()

    def drop(self, req_id: str) -> None:
        """A request's rows are not read in the next plan, whatever was planned."""
        self._rows = [row for row in self._rows if row.req_id != req_id]

    def reset(self) -> None:
        """Nothing is known of the device's side any more, and what the next plan would have read is lost."""
        self._places.reset()
        self._rows.clear()

    def end(self, req_id: str) -> None:
        """No more rows of a request are wanted than are planned."""
        self._places.end(req_id)

    def gauges(self) -> Mapping[str, float]:
        """See `RowPlaces`."""
        return self._places.gauges()

    # -- a step

    def due(
        self, live: Mapping[str, CapturedRequest], output: SchedulerOutput, computed: Mapping[str, int]
    ) -> list[tuple[CapturedRequest, int]]:
        """The captures for which this step needs more than a note of how far they are computed, with that.

        A decode step computes a row or two of each request. Nearly always these have a page, and too few rows wait to be
        read: with 64 requests, looking at each in every step cost a decode step some percent.
        """
        self._reads_output = False
        scheduled = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        moved = {req_id for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True) if blocks}
        early = self._places.reads_early
        due = []
        for req_id, capture in live.items():
            count = scheduled.get(req_id)
            if count is None:
                continue
            covered = computed[req_id] + count
            if covered > capture.quiet_until or early or req_id in moved:
                due.append((capture, covered))
            else:
                capture.covered = covered
        return due

    def company(
        self, live: Mapping[str, CapturedRequest], output: SchedulerOutput, computed: Mapping[str, int]
    ) -> list[tuple[CapturedRequest, int]]:
        """Like `due`, once those have advanced: the captures whose waiting output rows are worth reading along with others'.

        One read for many costs the engine what one for each would cost. Who reads together once does so again, for all of
        them then wait for the same number of rows.
        """
        if not self._reads_output:
            return []
        scheduled = output.num_scheduled_tokens
        return [
            (capture, capture.covered)
            for req_id, capture in live.items()
            if req_id in scheduled and capture.is_in_output and capture.readable - capture.next >= self._worth_reading
        ]

    def advance(self, capture: CapturedRequest, covered: int, output: SchedulerOutput, computed: Mapping[str, int]) -> int:
        """This step computes a request's positions up to `covered`: see that they have a place, and plan the rows to be read.

        Returns up to where rows are planned. Raises SlotStreamError when there is no room.
        """
        start, table = computed[capture.request.request_id], self._table(capture, output)
        capture.quiet_until = 0
        capture.covered = covered
        self._places.cover(capture, start, covered, table)
        stop = capture.readable
        if stop > capture.next and not (capture.is_in_output and stop - capture.next < self._worth_reading):
            self._reads_output |= capture.is_in_output
            self._plan_rows(capture, stop, start, table)
        if capture.is_in_output:
            capture.quiet_until = min(self._places.covered_until(capture), capture.next + self._output_rows - 1)
        return capture.next

    @property
    def _worth_reading(self) -> int:
        """Output rows come one a step: they stay where they are until so many of a request's wait."""
        if self._places.reads_early:
            return 1
        return -(-self._output_rows // 2) if self._reads_output else self._output_rows

    def _table(self, capture: CapturedRequest, output: SchedulerOutput) -> Sequence[int]:
        """The block table of a request that this step runs."""
        assert output.kv_connector_block_state is not None, "vLLM offers block tables to its connector"
        tables = output.kv_connector_block_state.get_block_ids(capture.request.request_id)
        assert tables is not None, "a scheduled request has a block table"
        table: Sequence[int] = tables[self._group]
        return table

    def _plan_rows(self, capture: CapturedRequest, stop: int, computed: int, table: Sequence[int]) -> None:
        """Have the rows up to `stop` read in the next plan. Raises RowsNotComputed."""
        place = self._places.place(capture, capture.next, stop, computed, table)
        first_row = capture.next - capture.start
        self._rows.append(RowPlan(capture.request.request_id, capture.next, stop, first_row, place))
        capture.next = stop
        self._places.has_read(capture)

    # -- between steps

    def preempted(self, capture: CapturedRequest) -> None:
        """A request lost its blocks, and will compute all its tokens again: confirmed rows that wait are read before that."""
        capture.quiet_until = 0
        if not self._places.computes_all:
            return
        capture.request.skip_reading_prefix_cache = True
        stop = capture.readable
        if stop > capture.next:
            self._plan_rows(capture, stop, stop, ())
        self._places.preempted(capture)

    def finish(self, capture: CapturedRequest, stop: int, block_ids: Sequence[int]) -> bool:
        """Plan the last rows of a request that ended; whether its blocks must be held until they are read.

        Raises RowsNotComputed.
        """
        if stop <= capture.next:
            return False
        self._plan_rows(capture, stop, stop, block_ids if stop <= capture.request.num_computed_tokens else ())
        return self._places.holds_blocks
