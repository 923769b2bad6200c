"""Rows of a step's plans: where they lie in their source, cut into parts that fit staging slots.

All of it is done on the engine's thread, between steps, with caches full of other things: a call costs it several times what it
does in a loop, so there are few.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slotstream.connector.sending.row_check import Segment
from slotstream.wire.errors import SlotStreamError


class Part(NamedTuple):
    """Rows of one plan for one staging slot: they begin `offset` rows behind place `at` of the source's columns."""

    req_id: str
    first_row: int
    rows: int
    at: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Located:
    """The parts of plans, in order; `columns` are the source's own. `failed`: requests whose plans cannot be right, and why.

    `computed`: whether the device is known to have computed all of these rows (`RowPlan.computed`).
    """

    parts: Sequence[Part]
    columns: Sequence[Any] = ()
    failed: Sequence[tuple[str, SlotStreamError]] = ()
    computed: bool = False


def page_words(located: Located, parts: Sequence[Part], segments: Sequence[Segment], page_rows: int) -> array[int]:
    """What the device needs to read these parts of row pages, and the check after it: see `row_check.NotedRows`."""
    first, last = parts[0].at, parts[-1]
    stop = last.at + (last.offset + last.rows - 1) // page_rows + 1
    words = array("q")
    for part, segment in zip(parts, segments, strict=True):
        words.extend((segment.staging_slot, part.at - first, part.offset, part.rows))
    for column in located.columns:
        words += column[first:stop]
    return words
