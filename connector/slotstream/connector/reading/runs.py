"""Rows of a step's plans, where they lie in their source, and how they are cut into parts that fit staging slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slotstream.connector.plan import RowPlan
from slotstream.connector.sending.row_check import RUN_WORDS, numbers
from slotstream.connector.sending.staging_area import Words
from slotstream.wire.errors import SlotStreamError

SOURCE, ROWS, STAGING_SLOT, AT, KV_SLOT, STEP = range(RUN_WORDS)
"""The words of a run: see `row_check`."""


class Part(NamedTuple):
    """Rows of one plan that go into one staging slot: the runs [start, stop) of `Located.runs`."""

    req_id: str
    first_row: int
    rows: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Located:
    """Where the rows of plans are: int64 `runs` [k, RUN_WORDS], in order, whose staging slots are still to be said.

    `failed`: requests whose plans cannot be right, and why.
    """

    runs: Words
    parts: Sequence[Part]
    failed: Sequence[tuple[str, SlotStreamError]] = ()


def rows_of(runs: Words) -> Words:
    """Where each row lies in the source, int64 [n]."""
    return np.repeat(runs[:, SOURCE], runs[:, ROWS]) + numbers(runs[:, ROWS])


def unit_of(page_rows: int, rows_per_slot: int) -> int:
    """Rows that always stay together: a page's, or a part of them that divides it where a slot has no room for a page."""
    return max(rows for rows in range(1, min(page_rows, rows_per_slot) + 1) if page_rows % rows == 0)


def cut_pages(plans: Sequence[RowPlan], places: tuple[Words, Words, Words], page_rows: int, rows_per_slot: int) -> Located:
    """Runs of whole units, and parts of as many units as a slot has room for.

    `places`: of the pages of each plan, one plan's after another's, the page, its entry in the page table, and its step.
    """
    unit = unit_of(page_rows, rows_per_slot)
    starts = np.array([plan.start for plan in plans])
    stops = np.array([plan.stop for plan in plans])
    counts = (stops - 1) // unit - starts // unit + 1  # Units of each plan,
    pages = (stops - 1) // page_rows - starts // page_rows + 1  # and pages.
    number = numbers(counts)
    first = (np.repeat(starts // unit, counts) + number) * unit  # Position of a unit's first row.
    low = np.maximum(first, np.repeat(starts, counts))
    rows = np.minimum(first + unit, np.repeat(stops, counts)) - low
    at = np.repeat(np.cumsum(pages) - pages - starts // page_rows, counts) + first // page_rows
    offset = low % page_rows
    runs = np.empty((len(first), RUN_WORDS), np.int64)
    runs[:, SOURCE] = places[0][at] * page_rows + offset
    runs[:, ROWS] = rows
    runs[:, KV_SLOT] = places[1][at] * page_rows + offset
    runs[:, STEP] = places[2][at]
    begins = np.flatnonzero(number % (rows_per_slot // unit) == 0)
    ends = np.append(begins[1:], len(runs))
    before = np.cumsum(rows) - rows
    sizes = np.add.reduceat(rows, begins)
    runs[:, AT] = before - np.repeat(before[begins], ends - begins)
    owners = np.repeat(np.arange(len(plans)), counts)[begins].tolist()
    parts = [
        Part((plan := plans[owner]).req_id, plan.first_row + position - plan.start, size, begin, end)
        for owner, position, size, begin, end in zip(
            owners, low[begins].tolist(), sizes.tolist(), begins.tolist(), ends.tolist(), strict=True
        )
    ]
    return Located(runs, parts)
