"""Whether rows can be trusted: what the device says of them against what the plan says, and rows no healthy model writes.

The largest magnitude of a row, its *peak*, is told as the bits of that element without its sign. As whole numbers such bits
are in the order of what they stand for, with the infinity of the dtype above every number, and each NaN above that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from slotstream.connector.sending.staging_area import StagingArea, Words
from slotstream.wire.errors import BadRows, RowsNotComputed, SlotMismatch, SlotStreamError

INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000}
"""The bits of an infinite element, by dtype."""
PART_WORDS = 4
"""A part is rows in one staging slot: the slot, the first of the named pages, how far behind its begin, and how many rows."""
PAGE_WORDS = 3
"""A page is named by its number, its entry in the page table, and the step in which it was given for that."""
_STAMP_WORDS = 2


def note_words(layers: int) -> int:
    """What the device notes beside a row of so many layers, int64: the KV-cache slot, the step, and the peak of each layer."""
    return _STAMP_WORDS + layers


class Segment(NamedTuple):
    """Rows of one sample in one staging slot."""

    req_id: str
    first_row: int
    rows: int
    staging_slot: int


@dataclass(frozen=True, slots=True)
class InSlot:
    """Words that a read left in a staging slot of its own, from word `first` on."""

    staging_slot: int
    first: int
    count: int

    def of(self, area: StagingArea) -> Words:
        """The words themselves."""
        return area.words(self.staging_slot)[self.first : self.first + self.count]


class Checkable(Protocol):
    """What the device says of the rows of one batch, in the order of its segments: `peaks` [n], and what is wrong."""

    peaks: Words

    def problem(self, start: int, stop: int) -> SlotStreamError | None:
        """Why the batch's rows [start, stop) cannot be trusted; None when they can."""


class RowEvidence(Protocol):
    """Where that can be found once the read is over. Plain data: it can go to another process."""

    def find(self, area: StagingArea, segments: Sequence[Segment]) -> Checkable:
        """Look at what the read left. It may be written over as soon as this returns."""


@dataclass(frozen=True, slots=True)
class NotedRows:
    """Of rows in row pages. `words`: those of `parts` parts, in the order of the segments, then the numbers of all pages, then
    their entries, then their steps. What the device noted stands with the rows.
    """

    words: Words | InSlot
    parts: int
    page_rows: int

    def find(self, area: StagingArea, segments: Sequence[Segment]) -> StampEvidence:
        """See `RowEvidence`."""
        words = self.words if isinstance(self.words, np.ndarray) else self.words.of(area)
        _, kv_slots, steps = rows_in_pages(words, self.parts, self.page_rows)
        # Where the rows were to be, as the segments say: what went elsewhere was not noted here.
        rows = np.array([segment.rows for segment in segments])
        slots = np.repeat(np.array([segment.staging_slot for segment in segments]), rows)
        return StampEvidence(kv_slots, steps, area.notes[slots, numbers(rows)])


def rows_in_pages(words: Words, parts: int, page_rows: int) -> tuple[Words, Words, Words]:
    """Of each row of `NotedRows`, int64 [n]: its place in the pool, the KV-cache slot to be noted, and the least step."""
    _, first, offset, counts = words[: parts * PART_WORDS].reshape(parts, PART_WORDS).T
    pages, entries, steps = words[parts * PART_WORDS :].reshape(PAGE_WORDS, -1)
    behind = np.repeat(offset, counts) + numbers(counts)
    at, within = np.repeat(first, counts) + behind // page_rows, behind % page_rows
    return pages[at] * page_rows + within, entries[at] * page_rows + within, steps[at]


class StampEvidence:
    """The slot that the plan meant each row for, and the step from which on its page was meant for it.

    `kv_slots` and `steps` are int64 [n]; `notes` is what the device noted: see `note_words`.
    """

    def __init__(self, kv_slots: Words, steps: Words, notes: Words) -> None:
        self._right = (notes[:, 0] == kv_slots) & (notes[:, 1] >= steps)
        self.peaks = notes[:, _STAMP_WORDS:].max(1)

    def problem(self, start: int, stop: int) -> SlotStreamError | None:
        """See `Checkable`."""
        if self._right[start:stop].all():
            return None
        return SlotMismatch("the device did not write the rows of this sample into the pages that were given for them")


@dataclass(frozen=True, slots=True)
class MappedRows:
    """Of rows in the hidden states' own cache layer: `kv_slots` int64 [n], -1 for rows that an earlier step wrote.

    `peaks` [n]. `mapping` [tokens] are the slots that the device wrote in the step; None where vLLM ran no extraction in it.
    """

    kv_slots: Words
    peaks: Words | InSlot
    mapping: Words | InSlot | None

    def find(self, area: StagingArea, segments: Sequence[Segment]) -> MappingEvidence:
        """See `RowEvidence`."""
        peaks, mapping = (words.of(area) if isinstance(words, InSlot) else words for words in (self.peaks, self.mapping))
        assert peaks is not None, "every read finds them"
        return MappingEvidence(self.kv_slots, peaks.copy(), mapping)


class MappingEvidence:
    """See `MappedRows`."""

    def __init__(self, kv_slots: Words, peaks: Words, mapping: Words | None) -> None:
        self.peaks = peaks
        self._kv_slots = kv_slots
        self._sorted = None if mapping is None else np.sort(mapping)

    def problem(self, start: int, stop: int) -> SlotStreamError | None:
        """See `Checkable`."""
        computed = self._kv_slots[start:stop]
        computed = computed[computed >= 0]
        if computed.size == 0:
            return None
        if self._sorted is None:
            return RowsNotComputed("vLLM ran no extraction in a step that computed rows of this sample")
        wanted = np.sort(computed)  # In order they are found several times as fast.
        first = np.searchsorted(self._sorted, wanted, side="left")
        last = np.searchsorted(self._sorted, wanted, side="right")
        if np.all(last - first == 1) and np.all(wanted[1:] != wanted[:-1]):
            return None
        return SlotMismatch("the device wrote other slots than the block table names")


def numbers(counts: Words) -> Words:
    """0, 1, ... up to each count, one after another: [sum of counts]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


@dataclass(frozen=True, slots=True)
class BadRowCount:
    """Rows of zeros and rows with a NaN or an infinity; `first` is the first of them."""

    zero: int
    nonfinite: int
    first: int

    @property
    def metadata(self) -> dict[str, str]:
        """What the sample's metadata says of them."""
        return {"zero_rows": str(self.zero), "nonfinite_rows": str(self.nonfinite), "first_bad_row": str(self.first)}

    def __add__(self, other: BadRowCount) -> BadRowCount:
        return BadRowCount(self.zero + other.zero, self.nonfinite + other.nonfinite, min(self.first, other.first))


def count_bad_rows(first_row: int, peaks: Words, infinity: int) -> tuple[BadRowCount, BadRows] | None:
    """The bad ones among the rows from `first_row` on with these peaks [n], and what is wrong with the first.

    `infinity`: the bits of an infinite element.
    """
    zero, nonfinite = peaks == 0, peaks >= infinity
    bad = np.flatnonzero(zero | nonfinite)
    if not bad.size:
        return None
    first = first_row + int(bad[0])
    what = "only zeros" if zero[bad[0]] else "a NaN or an infinity"
    return BadRowCount(int(zero.sum()), int(nonfinite.sum()), first), BadRows(f"row {first} holds {what}")
