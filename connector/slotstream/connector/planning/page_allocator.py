"""Row pages as the engine core's half keeps them: which page belongs to which rows, and since when.

Two things end at different times. A *table entry* (KV-cache slots -> page) ends in the first plan in which its slots may belong
to another request, or its page. A *page* is free again once its rows are read. Rows are read at the end of a step, so the pages
that a plan frees are given again from the next plan on, and the entries of those whose request goes on end with that one. The
read itself may last longer than its step: before a page is written again, the worker has the model's stream wait for the read
(`page_reads.PageReads.wait_for`).

Pages are kept in arrays, and moved in slices: what a prompt costs hardly depends on its length. Rows in pages next to each
other are one copy where they are read. So free pages are sorted now and then. While there are many, a request that gets a page
for its output has the next ones kept for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from slotstream.connector.plan import PagePlace, TableUpdate
from slotstream.connector.planning.captured_request import Due
from slotstream.connector.row_pool import RowPoolShape
from slotstream.wire.errors import RowPoolFull, RowsNotComputed

NULL_BLOCK = 0  # vLLM's placeholder for blocks that a request needs no longer: nobody's slots.
_KEPT_PAGES = 3  # That are kept for a request behind one of its output: a read takes about so many.


def _ints(values: Sequence[int] = ()) -> array[int]:
    return array("q", values)


@dataclass(slots=True)
class _Held:
    """A request's pages, one after another from the one of position `first` * page rows on; -1 where there is none.

    `entries`: whose slots each was given for, in `steps`. `live`: the same while the table says so, then -1. `read_in`: the
    last step that computes tokens of it and whose plan reads from it. Free pages [kept, kept_end) are kept for it.
    """

    first: int
    pages: array[int] = field(default_factory=_ints)
    entries: array[int] = field(default_factory=_ints)
    steps: array[int] = field(default_factory=_ints)
    live: array[int] = field(default_factory=_ints)
    read_in: int = 0
    kept: int = 0
    kept_end: int = 0

    @property
    def end(self) -> int:
        """The page behind the last."""
        return self.first + len(self.pages)

    def pad(self, first: int, end: int) -> None:
        """Have a place for each of the pages [first, end)."""
        before, behind = _ints([-1]) * max(self.first - first, 0), _ints([-1]) * max(end - self.end, 0)
        self.pages, self.entries = before + self.pages + behind, before + self.entries + behind
        self.steps, self.live = before + self.steps + behind, before + self.live + behind
        self.first -= len(before)


class PageAllocator:
    """Pages of one pool. A request's pages are named by position // page rows, which is where they begin.

    `step_pages`: the most that one step may want.
    """

    def __init__(self, shape: RowPoolShape, block_size: int, step_pages: int = 0) -> None:
        assert block_size % shape.page_rows == 0, "a page lies within a block"
        self._page_rows = shape.page_rows
        self._block_pages = block_size // shape.page_rows
        self._step_pages = step_pages
        self.shape = shape
        # Sorted now and then, else the longest free first: what was read last may still be on its way. The first `_given` are
        # given by now.
        self._free = _ints(range(shape.pages))
        self._given = 0
        self._kept = 0  # Free pages that are kept for requests, and no part of `_free`.
        self._let_go: list[int] = []  # Read in the plan that is being made, which may begin between two steps.
        self._held: dict[str, _Held] = {}
        self._taken_out: list[tuple[_Held, int, int]] = []  # Since the last plan, and which of the pages stay taken.
        self._table: dict[int, int] = {}  # As the device has it after this plan's update: entry -> page.
        self._changes: dict[int, int] = {}  # What that update says.
        # Entries of pages that this plan reads, and their pages. They end with the next one: this plan's step may still write
        # some of the rows, and its thread has enough to do.
        self._reading: list[tuple[array[int], array[int]]] = []
        self._ending: list[tuple[array[int], array[int]]] = []  # The same of the last plan.
        self._clear = True  # Whatever the device has there: it may be what an earlier engine left.
        self._step = 1  # Of the plan that is being made; the device's notes begin at 0.

    @property
    def free(self) -> int:
        """Pages that can be given now."""
        return len(self._free) - self._given + self._kept

    @property
    def in_use(self) -> int:
        """Pages that hold rows, or are about to."""
        return self.shape.pages - self.free - len(self._let_go)

    @property
    def is_short(self) -> bool:
        """Whether so few pages will be free that all rows should be read now."""
        return (len(self._free) - self._given + self._kept + len(self._let_go)) * 4 < self.shape.pages

    @property
    def has_much_room(self) -> bool:
        """Whether half the pages are free that the next step cannot want."""
        return self.in_use * 2 <= self.shape.pages - self._step_pages

    @property
    def has_room(self) -> bool:
        """Whether the next step finds its pages even if no more rows are read in this plan."""
        return self.free + len(self._let_go) >= self._step_pages

    def end_plan(self) -> TableUpdate | None:
        """The plan is made: what it has to change in the table, None for nothing. The next one may give the pages it freed."""
        step, self._step = self._step, self._step + 1
        for entries, pages in self._ending:
            self._drop(entries, pages, but=self._changes)  # Which may have given the same page to the same entry.
        if self._taken_out:
            self._end_taken_out()
        has_time = not (self._let_go or self._changes)
        if self._let_go:
            self._free.extend(self._let_go)
            self._let_go.clear()
        if self._given * 4 > self.shape.pages * (2 if has_time else 3):
            self._sort()
        self._ending, self._reading = self._reading, []
        if not self._changes and not self._clear:
            return None
        changes, clear = self._changes, self._clear
        self._changes, self._clear = {}, False
        return TableUpdate(step, changes, clear, len(self._table))

    def cover(self, req_id: str, start: int, stop: int, table: Sequence[int]) -> None:
        """See that the positions [start, stop) of a request, which this step computes, have pages. `table`: its block table.

        Entries of the request's pages whose slots are not its own any more end. Raises RowPoolFull when there are not enough
        pages; what the request holds then stays as it is.
        """
        first, end = start // self._page_rows, -(-stop // self._page_rows)
        held = self._held.get(req_id)
        if held is None or not held.pages:
            if start >= stop:
                return
            held = self._held.setdefault(req_id, _Held(first))  # One whose rows are all read may have pages kept for it.
            held.first = first
        has = len(held.pages)
        mine = self._entries(table, held.first, max(end, held.first + has))
        new = mine[has:]
        if held.first <= first <= held.first + has and -1 not in new and mine[:has] == held.live:
            if new:
                self._extend(held, new)
            return
        for at in range(has):
            if held.live[at] != mine[at]:  # Another's now: behind a sliding window, or since a preemption.
                self._end_entries(held, at, at + 1)
        if start < stop:
            self._cover_each(held, first, self._entries(table, first, end))

    def grow(self, due: list[Due]) -> list[Due]:
        """What `cover` does, for all who only need the next page for output; returns the others.

        Their block tables must have changed at the end only. Nothing raises: where no page is free, `cover` will say so.
        """
        others: list[Due] = []
        all_held, table, changes, free, given = self._held, self._table, self._changes, self._free, self._given
        there = len(free)
        keeps_until = there - self.shape.pages // 2
        rows, pages = self._page_rows, self._block_pages
        for one in due:
            req_id, capture, start, covered = one
            blocks = capture.table
            if blocks is None or req_id not in all_held or start < capture.request.num_prompt_tokens:
                others.append(one)
                continue
            held = all_held[req_id]
            at = held.first + len(held.pages)
            begin, end, block = at * rows, (at + 1) * rows, at // pages
            has_page = held.kept < held.kept_end or given < there
            is_next = capture.next <= start <= begin < covered <= end and covered <= capture.stop and block < len(blocks)
            if not (has_page and is_next):
                others.append(one)
                continue
            entry = blocks[block] * pages + at % pages
            if held.kept < held.kept_end:
                page = held.kept
                held.kept += 1
                self._kept -= 1
            else:
                page = free[given]
                given += 1
                held.kept = held.kept_end = page + 1
                while given < keeps_until and held.kept_end <= page + _KEPT_PAGES and free[given] == held.kept_end:
                    given += 1
                    held.kept_end += 1
                self._kept += held.kept_end - held.kept
            held.pages.append(page)
            held.entries.append(entry)
            held.live.append(entry)
            held.steps.append(self._step)
            table[entry] = changes[entry] = page
            capture.placed_until = end
        self._given = given
        return others

    def _extend(self, held: _Held, entries: array[int]) -> None:
        """Give a request the next pages. Raises RowPoolFull."""
        count = len(entries)
        pages = self._take(count)
        held.pages += pages
        held.entries += entries
        held.live += entries
        held.steps += _ints([self._step]) * count
        for entry, page in zip(entries, pages, strict=True):
            self._table[entry] = self._changes[entry] = page

    def _cover_each(self, held: _Held, first: int, wanted: array[int]) -> None:
        """The same where some have pages and some do not, or their blocks are others now. Raises RowPoolFull."""
        held.pad(first, first + len(wanted))
        places = [(at, entry) for at, entry in enumerate(wanted, first - held.first) if entry >= 0]
        pages = iter(self._take(sum(held.pages[at] < 0 for at, _ in places)))
        for at, entry in places:
            if held.live[at] == entry:
                continue
            self._end_entries(held, at, at + 1)
            if held.pages[at] < 0:
                held.pages[at] = next(pages)
            held.entries[at] = held.live[at] = entry
            held.steps[at] = self._step
            self._table[entry] = self._changes[entry] = held.pages[at]

    def _take(self, count: int) -> array[int]:
        """Raises RowPoolFull."""
        if count > len(self._free) - self._given and self._kept:
            for held in self._held.values():
                self._free += self._no_longer_kept(held)
        if count > self.free:
            raise RowPoolFull(f"{count} pages are wanted, and {self.free} of the row pool are free")
        self._given += count
        return self._free[self._given - count : self._given]

    def _no_longer_kept(self, held: _Held) -> array[int]:
        """The pages that were kept for a request."""
        pages = _ints(range(held.kept, held.kept_end))
        held.kept = held.kept_end
        self._kept -= len(pages)
        return pages

    def _sort(self) -> None:
        """Have free pages follow each other, but for the last quarter: those that were read last."""
        free = self._free[self._given :]
        until = len(free) * 3 // 4
        self._free, self._given = array("q", np.sort(free[:until]).tobytes()) + free[until:], 0

    def read(self, req_id: str, start: int, stop: int, *, runs: bool) -> PagePlace:
        """Where the rows of positions [start, stop) are, which this plan reads; pages without rows from `stop` on go back.

        `runs`: this plan's step computes tokens of the request. Else its slots may be another's in that very step.
        Raises RowsNotComputed when some rows never had a page.
        """
        held = self._held.get(req_id)
        if held is None:
            raise _not_computed()
        place = self._find(held, start, stop)
        if runs:
            held.read_in = self._step
        read = stop // self._page_rows - held.first
        if read > 0:
            self._give_back(held, read)
        return place

    def take_out(self, req_id: str, start: int, stop: int) -> PagePlace:
        """Where the last rows of a request that ended are, for a later plan to read: these pages stay taken until `put_back`.

        All others go back with the next plan. Raises RowsNotComputed when some rows never had a page; then nothing changes.
        """
        held = self._held.get(req_id)
        if held is None:
            raise _not_computed()
        place = self._find(held, start, stop)
        del self._held[req_id]
        self._kept -= held.kept_end - held.kept
        first = start // self._page_rows - held.first
        self._taken_out.append((held, first, first + len(place.pages)))
        return place

    def _end_taken_out(self) -> None:
        """What is left to do of requests that were taken out: many may end in one step, whose thread has no time for it."""
        for held, first, end in self._taken_out:
            self._let_go += range(held.kept, held.kept_end)
            self._drop(held.live, held.pages)
            self._let_go += [page for page in held.pages[:first] + held.pages[end:] if page >= 0]
        self._taken_out.clear()

    def put_back(self, place: PagePlace) -> None:
        """This plan reads what was taken out."""
        self._let_go += place.pages

    def _find(self, held: _Held, start: int, stop: int) -> PagePlace:
        """Where rows of a request are. Raises RowsNotComputed."""
        first, end = start // self._page_rows - held.first, -(-stop // self._page_rows) - held.first
        pages = held.pages[first:end] if first >= 0 else _ints()
        if len(pages) != end - first or -1 in pages:
            raise _not_computed()
        return PagePlace(pages, held.entries[first:end], held.steps[first:end])

    def end(self, req_id: str) -> None:
        """No row of the request is wanted but those that this plan reads."""
        held = self._held.pop(req_id, None)
        if held is not None:
            self._let_go += self._no_longer_kept(held)
            self._give_back(held, len(held.pages))

    def reset(self) -> None:
        """Every page is free and the table empty: after a fault, when nothing is known of a plan that may be lost."""
        self._held.clear()
        self._taken_out.clear()
        self._table.clear()
        self._changes.clear()
        self._reading.clear()
        self._ending.clear()
        self._let_go.clear()
        self._free = _ints(range(self.shape.pages))
        self._given = self._kept = 0
        self._clear = True

    def _give_back(self, held: _Held, count: int) -> None:
        """The first `count` pages of a request hold no row that a later plan wants."""
        entries, pages = held.live[:count], held.pages[:count]
        self._let_go += pages if -1 not in pages else [page for page in pages if page >= 0]
        if held.read_in == self._step:
            self._reading.append((entries, pages))
        else:
            self._drop(entries, pages)
        del held.pages[:count], held.entries[:count], held.steps[:count], held.live[:count]
        held.first += count

    def _end_entries(self, held: _Held, start: int, stop: int) -> None:
        """End the entries of some pages of a request, which goes on."""
        self._drop(held.live[start:stop], held.pages[start:stop])
        held.live[start:stop] = _ints([-1]) * (stop - start)

    def _drop(self, entries: array[int], pages: array[int], but: Container[int] = ()) -> None:
        """The entries of these pages end with this plan: but for those that another page was given to since, and `but` some."""
        table, changes = self._table, self._changes
        for entry, page in zip(entries, pages, strict=True):
            if entry in table and table[entry] == page and entry not in but:
                del table[entry]
                changes[entry] = -1

    def _entries(self, table: Sequence[int], first: int, end: int) -> array[int]:
        """The table's index of each of a request's pages [first, end); -1 where its block is free."""
        size = self._block_pages
        if size == 1:
            found = _ints(table[first:end])
            if len(found) < end - first:
                found.extend([-1] * (end - first - len(found)))
            if NULL_BLOCK not in found:
                return found
            return _ints([-1 if block == NULL_BLOCK else block for block in found])
        blocks = [NULL_BLOCK if at >= len(table) * size else table[at // size] for at in range(first, end)]
        return _ints([-1 if block == NULL_BLOCK else block * size + at % size for at, block in enumerate(blocks, first)])


def _not_computed() -> RowsNotComputed:
    return RowsNotComputed("some rows were not computed here: they came out of a cache")
