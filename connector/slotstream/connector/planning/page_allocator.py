"""Row pages as the engine core's half keeps them: which page belongs to which rows, and since when.

Two things end at different times. A *table entry* (KV-cache slots -> page) ends in the first plan in which its slots may belong
to somebody else. A *page* is free again once its rows are read: rows are read at the end of a step, so what a plan lets go of
is given again from the next plan on. The device does plans in order, so nothing else has to be waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slotstream.connector.plan import PagePlace, TableUpdate
from slotstream.connector.row_pool import RowPoolShape
from slotstream.wire.errors import RowPoolFull, RowsNotComputed

NULL_BLOCK = 0  # vLLM's placeholder for blocks that a request needs no longer: nobody's slots.


@dataclass(slots=True)
class _Page:
    """`entry`: its index in the table, -1 where its slots may be another's. `step`: since when it belongs to those slots.

    `written`: the last step that is known to write into it. Later ones may, until `cover` is asked again: only steps that
    give the page back have to know, and those asked.
    """

    page: int
    entry: int = -1
    kv_slot: int = 0
    step: int = 0
    written: int = 0


class PageAllocator:
    """Pages of one pool. A request's pages are named by position // page rows, which is where they begin."""

    def __init__(self, shape: RowPoolShape, block_size: int) -> None:
        assert block_size % shape.page_rows == 0, "a page lies within a block"
        self._page_rows = shape.page_rows
        self._block_size = block_size
        self.shape = shape
        self._free = list(range(shape.pages - 1, -1, -1))
        self._let_go: list[int] = []  # Read in the plan that is being made, which may begin between two steps.
        self._held: dict[str, dict[int, _Page]] = {}
        self._entries: dict[int, int] = {}  # What the next table update says.
        self._ending: list[int] = []  # Entries that this plan's step still needs: the next plan drops them.
        self._clear = True  # Whatever the device has there: it may be what an earlier engine left.
        self._step = 1  # Of the plan that is being made; the device's notes begin at 0.

    @property
    def free(self) -> int:
        """Pages that can be given now."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Pages that hold rows, or are about to."""
        return self.shape.pages - len(self._free) - len(self._let_go)

    @property
    def is_short(self) -> bool:
        """Whether so few pages are free that rows which wait for company should be read now."""
        return len(self._free) * 4 < self.shape.pages

    def end_plan(self) -> TableUpdate | None:
        """The plan is made: what it has to change in the table, None for nothing. What it let go of, the next may give."""
        self._free.extend(self._let_go)
        self._let_go.clear()
        step, self._step = self._step, self._step + 1
        entries, self._entries = self._entries, dict.fromkeys(self._ending, -1)
        clear, self._clear = self._clear, False
        self._ending.clear()
        return TableUpdate(step, entries, clear) if entries or clear else None

    def cover(self, req_id: str, start: int, stop: int, table: Sequence[int]) -> None:
        """See that the positions [start, stop) of a request, which this step computes, have pages. `table`: its block table.

        Raises RowPoolFull when there are not so many; what the request holds then stays as it is.
        """
        held = self._held.setdefault(req_id, {})
        wanted = [at for at in range(start // self._page_rows, -(-stop // self._page_rows)) if self._entry(at, table) >= 0]
        missing = [at for at in wanted if at not in held]
        if len(missing) > len(self._free):
            raise RowPoolFull(f"{len(missing)} pages are wanted, and {len(self._free)} of the row pool are free")
        for at in wanted:
            entry = self._entry(at, table)
            page = held.get(at)
            if page is None:
                page = held[at] = _Page(self._free.pop())
            if page.entry != entry:  # New, or its request was preempted and computes these positions again, elsewhere.
                self._drop_entry(page)
                page.entry, page.kv_slot, page.step = entry, entry * self._page_rows, self._step
                self._entries[entry] = page.page
            page.written = self._step

    def page_end(self, stop: int) -> int:
        """Where the page ends that holds the position before `stop`."""
        return -(-stop // self._page_rows) * self._page_rows

    def check_entries(self, req_id: str, table: Sequence[int]) -> None:
        """Drop the entries of a request's pages whose slots are not its own any more, by its present block table."""
        for at, page in self._held.get(req_id, {}).items():
            if page.entry >= 0 and page.entry != self._entry(at, table):
                self._drop_entry(page)

    def place(self, req_id: str, start: int, stop: int) -> PagePlace:
        """Where the rows of positions [start, stop) are. Raises RowsNotComputed when they never had a page."""
        held = self._held.get(req_id, {})
        pages = [held.get(at) for at in range(start // self._page_rows, -(-stop // self._page_rows))]
        found = [page for page in pages if page is not None]
        if len(found) != len(pages):
            raise RowsNotComputed("some rows were not computed here: they came out of a cache")
        return PagePlace(tuple(p.page for p in found), tuple(p.kv_slot for p in found), tuple(p.step for p in found))

    def has_read(self, req_id: str, below: int) -> None:
        """All rows below position `below` are read in this plan, or wanted by nobody: pages with no others go back."""
        held = self._held.get(req_id, {})
        for at in [at for at in held if (at + 1) * self._page_rows <= below]:
            self._give_back(held.pop(at))

    def end(self, req_id: str) -> None:
        """No row of the request is wanted but those that this plan reads."""
        for page in self._held.pop(req_id, {}).values():
            self._give_back(page)

    def reset(self) -> None:
        """Every page is free and the table empty: after a fault, when nothing is known of a plan that may be lost."""
        self._held.clear()
        self._entries.clear()
        self._ending.clear()
        self._let_go.clear()
        self._free = list(range(self.shape.pages - 1, -1, -1))
        self._clear = True

    def _give_back(self, page: _Page) -> None:
        if page.written == self._step and page.entry >= 0:
            self._ending.append(page.entry)  # Its last rows are computed in the very step that reads them.
        else:
            self._drop_entry(page)
        self._let_go.append(page.page)

    def _drop_entry(self, page: _Page) -> None:
        """Unless the entry was given to another page in this very plan, which then is its last word."""
        if page.entry >= 0 and self._entries.get(page.entry, page.page) == page.page:
            self._entries[page.entry] = -1
        page.entry = -1

    def _entry(self, at: int, table: Sequence[int]) -> int:
        """The table's index of a request's page; -1 where its block is nobody's."""
        block, offset = divmod(at * self._page_rows, self._block_size)
        if block >= len(table) or table[block] == NULL_BLOCK:
            return -1
        return (table[block] * self._block_size + offset) // self._page_rows
