"""Where rows are, as the engine core's half sees it: one protocol, and the two sources of rows behind it.

`extract_hidden_states` keeps rows in a cache layer of vLLM's: they live as long as the request's blocks, prefix-cache hits
included. Row pages are ours: rows are written only where a page was given for them before the step that computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slotstream.connector.plan import BlockPlace, PagePlace, TableUpdate
from slotstream.connector.planning.captured_request import CapturedRequest, Due
from slotstream.connector.planning.page_allocator import PageAllocator
from slotstream.wire.errors import RowsNotComputed
from slotstream.wire.names import ROWS_MAX

NO_STEP = 1 << 62  # As `computed_from`: no position is computed in the step that is planned.
Table = Sequence[int]  # A request's blocks in the group whose slots name its rows, in the order of its positions.


class RowPlaces(Protocol):
    """One source of rows. Every request that is `cover`ed is `end`ed, however it ends."""

    @property
    def computes_all(self) -> bool:
        """Whether rows exist only of tokens that the request itself computes: a prefix-cache hit has none."""

    @property
    def holds_blocks(self) -> bool:
        """Whether a finished request's blocks must be held until its last rows are read."""

    @property
    def tables_grow(self) -> bool:
        """Whether nothing but a preemption changes what a request's block table holds: blocks are added at its end."""

    @property
    def reads_early(self) -> bool:
        """Whether confirmed rows should be read now instead of waiting for more of their kind: room is short."""

    @property
    def has_room(self) -> bool:
        """Whether rows can stay where they are at all, and leave room for the next step."""

    @property
    def has_much_room(self) -> bool:
        """Whether that will be so for long, and what waits will not fill staging."""

    def rows_can_wait(self, rows: int) -> bool:
        """Whether a later read of so many rows, beside that step's, will not fill staging at once."""

    def grow(self, due: list[Due]) -> list[Due]:
        """What `cover` and `covered_until` do, where that is simple: at once for many. Returns the others."""

    def cover(self, capture: CapturedRequest, start: int, stop: int, table: Table) -> None:
        """This step computes positions [start, stop). Raises SlotStreamError when there is no room for their rows."""

    def covered_until(self, capture: CapturedRequest) -> int:
        """Positions below this need no `cover` before they are computed, for as long as the request gets no other blocks."""

    def read(self, capture: CapturedRequest, start: int, stop: int, computed_from: int, table: Table) -> BlockPlace | PagePlace:
        """Where the rows of positions [start, stop) are, which this plan reads; nobody wants those below any more.

        `computed_from`: from which position on this step computes the request's tokens; NO_STEP where it does not.
        `table` is asked for only where `holds_blocks`. Raises RowsNotComputed where some rows have no place.
        """

    def take_out(self, capture: CapturedRequest, start: int, stop: int) -> PagePlace:
        """The same of the last rows of a request that ended, which a later plan reads, and then gives to `put_back`.

        Only where `computes_all`. Raises RowsNotComputed.
        """

    def put_back(self, place: BlockPlace | PagePlace) -> None:
        """This plan reads what was taken out."""

    def preempted(self, capture: CapturedRequest) -> None:
        """The request lost its blocks; what it computes next goes elsewhere."""

    def end(self, req_id: str) -> None:
        """No more rows are wanted than this plan reads."""

    def end_plan(self) -> TableUpdate | None:
        """A plan is made: what it changes in the page table."""

    def reset(self) -> None:
        """Nothing is known of the device's side any more: start over."""

    def gauges(self) -> Mapping[str, float]:
        """The gauges of `counters.METRICS` that this source has, now."""


class BlockPlaces:
    """Rows in the hidden states' own cache layer: their place is the request's block table."""

    computes_all = False
    holds_blocks = True
    tables_grow = False
    reads_early = False
    has_room = has_much_room = False  # Rows are read in the step whose slots prove them.

    def rows_can_wait(self, rows: int) -> bool:
        """Not asked: there is no room."""
        return False

    def grow(self, due: list[Due]) -> list[Due]:
        """See `RowPlaces`."""
        return due

    def cover(self, capture: CapturedRequest, start: int, stop: int, table: Table) -> None:
        """vLLM gave the blocks."""

    def covered_until(self, capture: CapturedRequest) -> int:
        """See `RowPlaces`."""
        return ROWS_MAX

    def read(self, capture: CapturedRequest, start: int, stop: int, computed_from: int, table: Table) -> BlockPlace:
        """See `RowPlaces`."""
        if not table:
            # Preempted: its blocks are gone, or hold again only a part of what they held.
            raise RowsNotComputed("the request's blocks were gone before its last rows could be read")
        return BlockPlace(tuple(table), computed_from)

    def take_out(self, capture: CapturedRequest, start: int, stop: int) -> PagePlace:
        """Blocks are held for one plan only."""
        raise NotImplementedError

    def put_back(self, place: BlockPlace | PagePlace) -> None:
        """Nothing was taken out."""

    def preempted(self, capture: CapturedRequest) -> None:
        """Nothing to do: rows that were not read are computed again."""

    def end(self, req_id: str) -> None:
        """Nothing to do."""

    def end_plan(self) -> None:
        """There is no page table."""

    def reset(self) -> None:
        """Nothing to do."""

    def gauges(self) -> Mapping[str, float]:
        """There is no row pool."""
        return {}


class PagePlaces:
    """Rows in row pages. `keeps_blocks`: whether a request's blocks stay its own for as long as it runs.

    `step_tokens`: the most that a step computes, which is what staging is made for.
    """

    computes_all = True
    holds_blocks = False

    def __init__(self, pages: PageAllocator, *, row_bytes: int, keeps_blocks: bool, step_tokens: int) -> None:
        self._pages = pages
        self.end_plan = pages.end_plan  # Asked in every step: a call less.
        self._step_tokens = step_tokens
        self._row_bytes = row_bytes
        self._page_rows = pages.shape.page_rows
        self.tables_grow = keeps_blocks

    @property
    def reads_early(self) -> bool:
        """Whether pages are short."""
        return self._pages.is_short

    @property
    def has_room(self) -> bool:
        """Whether the next step finds its pages all the same."""
        return self._pages.has_room

    @property
    def has_much_room(self) -> bool:
        """See `RowPlaces`. Staging holds three steps' rows: those of a step may be on their way, and others come."""
        return self._pages.has_much_room and self._pages.in_use * self._pages.shape.page_rows * 2 <= self._step_tokens * 3

    def rows_can_wait(self, rows: int) -> bool:
        """See `RowPlaces`."""
        return rows * 2 <= self._step_tokens

    def grow(self, due: list[Due]) -> list[Due]:
        """See `RowPlaces`."""
        return self._pages.grow(due) if self.tables_grow else due

    def cover(self, capture: CapturedRequest, start: int, stop: int, table: Table) -> None:
        """Raises RowPoolFull."""
        self._pages.cover(capture.request.request_id, max(start, capture.next), min(stop, capture.stop), table)

    def covered_until(self, capture: CapturedRequest) -> int:
        """See `RowPlaces`. Behind a sliding window vLLM takes blocks away without a word: each step has to look."""
        if not self.tables_grow:
            return 0
        covered = capture.lead + capture.pace.steps  # As `covered`, with fewer calls.
        if covered >= capture.stop:
            return ROWS_MAX
        return capture.next if covered <= capture.next else -(-covered // self._page_rows) * self._page_rows

    def read(self, capture: CapturedRequest, start: int, stop: int, computed_from: int, table: Table) -> PagePlace:
        """See `RowPlaces`."""
        return self._pages.read(capture.request.request_id, start, stop, runs=computed_from != NO_STEP)

    def take_out(self, capture: CapturedRequest, start: int, stop: int) -> PagePlace:
        """See `RowPlaces`."""
        if stop > capture.covered:
            raise _not_computed()
        return self._pages.take_out(capture.request.request_id, start, stop)

    def put_back(self, place: BlockPlace | PagePlace) -> None:
        """See `RowPlaces`."""
        assert isinstance(place, PagePlace), "as taken out"
        self._pages.put_back(place)

    def preempted(self, capture: CapturedRequest) -> None:
        """Its pages go back; confirmed rows were read before, the others are computed again."""
        self._pages.end(capture.request.request_id)
        capture.covered = capture.next

    def end(self, req_id: str) -> None:
        """Its pages go back."""
        self._pages.end(req_id)

    def reset(self) -> None:
        """All pages are free."""
        self._pages.reset()

    def gauges(self) -> Mapping[str, float]:
        """Of the row pool."""
        pages, used = self._pages.shape.pages, self._pages.in_use
        nbytes = self._pages.shape.rows * self._row_bytes
        return {"row_pool_pages_in_use": used, "row_pool_pages_free": pages - used, "row_pool_bytes": nbytes}


def _not_computed() -> RowsNotComputed:
    return RowsNotComputed("the request ended before its last rows were computed")
