"""Where rows are to be found, as the engine core's half sees it: one protocol, and the two sources of rows behind it.

`extract_hidden_states` keeps rows in a cache layer of vLLM's: they live as long as the request's blocks, prefix-cache hits
included. Row pages are ours: rows are written only where a page was given for them before the step that computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slotstream.connector.plan import BlockPlace, PagePlace, TableUpdate
from slotstream.connector.planning.captured_request import CapturedRequest
from slotstream.connector.planning.page_allocator import PageAllocator
from slotstream.wire.errors import RowsNotComputed
from slotstream.wire.names import ROWS_MAX

Table = Sequence[int]  # A request's blocks in the group whose slots name its rows, in the order of its positions.


class RowPlaces(Protocol):
    """One source of rows. Every request that is `cover`ed is `end`ed, in whatever way it ends."""

    @property
    def computes_all(self) -> bool:
        """Whether rows exist only of tokens that the request itself computes: a prefix-cache hit has none."""

    @property
    def holds_blocks(self) -> bool:
        """Whether a finished request's blocks must be held until its last rows are read."""

    @property
    def reads_early(self) -> bool:
        """Whether confirmed rows should be read now instead of waiting for more of their kind: room is short."""

    def cover(self, capture: CapturedRequest, start: int, stop: int, table: Table) -> None:
        """This step computes positions [start, stop). Raises SlotStreamError when there is no room for their rows."""

    def covered_until(self, capture: CapturedRequest) -> int:
        """Positions below this need no `cover` before they are computed, for as long as the request gets no other blocks."""

    def place(
        self, capture: CapturedRequest, start: int, stop: int, computed_from: int, table: Table
    ) -> BlockPlace | PagePlace:
        """Where the rows of positions [start, stop) are; those from `computed_from` on are computed in this step.

        Raises RowsNotComputed where some have none.
        """

    def has_read(self, capture: CapturedRequest) -> None:
        """Every row below `capture.next` is read in this plan."""

    def preempted(self, capture: CapturedRequest) -> None:
        """The request lost its blocks; what it computes next goes elsewhere."""

    def end(self, req_id: str) -> None:
        """No more rows are wanted than this plan reads."""

    def end_plan(self) -> TableUpdate | None:
        """A plan is made: what it changes in the page table."""

    def reset(self) -> None:
        """Nothing is known of the device's side any more: begin anew."""

    def gauges(self) -> Mapping[str, float]:
        """The gauges of `counters.METRICS` that this source has, now."""


class BlockPlaces:
    """Rows in the hidden states' own cache layer: their place is the request's block table."""

    computes_all = False
    holds_blocks = True
    reads_early = False

    def cover(self, capture: CapturedRequest, start: int, stop: int, table: Table) -> None:
        """vLLM gave the blocks."""

    def covered_until(self, capture: CapturedRequest) -> int:
        """See `RowPlaces`."""
        return ROWS_MAX

    def place(self, capture: CapturedRequest, start: int, stop: int, computed_from: int, table: Table) -> BlockPlace:
        """See `RowPlaces`."""
        if not table:
            # Preempted: its blocks are gone, or hold again only a part of what they held.
            raise RowsNotComputed("the request's blocks were gone before its last rows could be read")
        return BlockPlace(tuple(table), computed_from)

    def has_read(self, capture: CapturedRequest) -> None:
        """Nothing to do: the blocks are vLLM's."""

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
    """Rows in row pages. `keeps_blocks`: whether a request's blocks stay its own for as long as it runs."""

    computes_all = True
    holds_blocks = False

    def __init__(self, pages: PageAllocator, *, row_bytes: int, keeps_blocks: bool) -> None:
        self._pages = pages
        self._row_bytes = row_bytes
        self._keeps_blocks = keeps_blocks

    @property
    def reads_early(self) -> bool:
        """Whether pages are short."""
        return self._pages.is_short

    def cover(self, capture: CapturedRequest, start: int, stop: int, table: Table) -> None:
        """Raises RowPoolFull."""
        req_id = capture.request.request_id
        self._pages.check_entries(req_id, table)
        start, stop = max(start, capture.next), min(stop, capture.stop)
        if start < stop:
            self._pages.cover(req_id, start, stop, table)

    def covered_until(self, capture: CapturedRequest) -> int:
        """See `RowPlaces`. Behind a sliding window vLLM takes blocks away without a word: each step has to look."""
        if not self._keeps_blocks:
            return 0
        return capture.next if capture.covered <= capture.next else self._pages.page_end(capture.covered)

    def place(self, capture: CapturedRequest, start: int, stop: int, computed_from: int, table: Table) -> PagePlace:
        """See `RowPlaces`."""
        if stop > capture.covered:
            raise RowsNotComputed("the request ended before its last rows were computed")
        return self._pages.place(capture.request.request_id, start, stop)

    def has_read(self, capture: CapturedRequest) -> None:
        """Pages without unread rows go back."""
        self._pages.has_read(capture.request.request_id, capture.next)

    def preempted(self, capture: CapturedRequest) -> None:
        """Its pages go back; confirmed rows were read before, the others are computed again."""
        self._pages.end(capture.request.request_id)

    def end(self, req_id: str) -> None:
        """Its pages go back."""
        self._pages.end(req_id)

    def end_plan(self) -> TableUpdate | None:
        """See `RowPlaces`."""
        return self._pages.end_plan()

    def reset(self) -> None:
        """All pages are free."""
        self._pages.reset()

    def gauges(self) -> Mapping[str, float]:
        """Of the row pool."""
        pages, used = self._pages.shape.pages, self._pages.in_use
        nbytes = self._pages.shape.rows * self._row_bytes
        return {"row_pool_pages_in_use": used, "row_pool_pages_free": pages - used, "row_pool_bytes": nbytes}
