"""Whether rows can be trusted: what the device says of them against what the plan says, and rows no healthy model writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slotstream.connector.sending.copies import KvSlots, Ticket
from slotstream.wire.errors import BadRows, RowsNotComputed, SlotMismatch, SlotStreamError


class RowEvidence(Protocol):
    """What the device says of the rows of one batch. Plain data once it is loaded: it can go to another process."""

    def load(self) -> None:
        """Keep what the copies brought, which are over; the host memory that they went through is free afterwards."""

    def problem(self, start: int, stop: int) -> SlotStreamError | None:
        """Why the batch's rows [start, stop) cannot be trusted; None when they can."""


class StepMapping:
    """The slots that the device wrote in one step, int64 [tokens]: a copy under way, then memory of its own."""

    def __init__(self, written: KvSlots, copy: Ticket) -> None:
        self._written = written
        self._copy: Ticket | None = copy
        self._sorted: KvSlots | None = None

    def load(self) -> None:
        """Wait for the copy and keep what it says; its host memory is free afterwards."""
        if self._copy is not None:
            self._copy.wait()
            self._written, self._copy = self._written.copy(), None

    def each_once(self, expected: KvSlots) -> bool:
        """Whether every slot of `expected` was written exactly once."""
        self.load()
        if self._sorted is None:
            self._sorted = np.sort(self._written)
        wanted = np.sort(expected)  # In order they are found several times as fast.
        first = np.searchsorted(self._sorted, wanted, side="left")
        last = np.searchsorted(self._sorted, wanted, side="right")
        return bool(np.all(last - first == 1)) and bool(np.all(wanted[1:] != wanted[:-1]))


@dataclass(frozen=True, slots=True)
class MappingEvidence:
    """Of rows in the hidden states' own cache layer: `kv_slots` int64 [n], -1 for rows that an earlier step wrote.

    `mapping` is the step's; None where vLLM ran no extraction in this step.
    """

    kv_slots: KvSlots
    mapping: StepMapping | None

    def load(self) -> None:
        """See `RowEvidence`."""
        if self.mapping is not None:
            self.mapping.load()

    def problem(self, start: int, stop: int) -> SlotStreamError | None:
        """See `RowEvidence`."""
        computed = self.kv_slots[start:stop]
        computed = computed[computed >= 0]
        if computed.size == 0:
            return None
        if self.mapping is None:
            return RowsNotComputed("vLLM ran no extraction in a step that computed rows of this sample")
        if not self.mapping.each_once(computed):
            return SlotMismatch("the device wrote other slots than the block table names")
        return None


class StampEvidence:
    """Of rows in row pages: the slot that the plan meant each for, and the step from which on its page was meant for it.

    `kv_slots` and `steps` are int64 [n]; `stamps` int64 [n, 2] is what the device noted beside each row: slot and step.
    """

    def __init__(self, kv_slots: KvSlots, steps: KvSlots, stamps: KvSlots) -> None:
        self._kv_slots = kv_slots
        self._steps = steps
        self._stamps = stamps

    def load(self) -> None:
        """See `RowEvidence`."""
        self._stamps = self._stamps.copy()

    def problem(self, start: int, stop: int) -> SlotStreamError | None:
        """See `RowEvidence`."""
        stamps = self._stamps[start:stop]
        right = (stamps[:, 0] == self._kv_slots[start:stop]) & (stamps[:, 1] >= self._steps[start:stop])
        if right.all():
            return None
        return SlotMismatch("the device did not write the rows of this sample into the pages that were given for them")


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


def count_bad_rows(first_row: int, peaks: npt.NDArray[np.float32]) -> tuple[BadRowCount, BadRows] | None:
    """The bad ones among the rows from `first_row` on with these largest magnitudes [n], and what is wrong with the first."""
    zero, nonfinite = peaks == 0, ~np.isfinite(peaks)
    bad = np.flatnonzero(zero | nonfinite)
    if not bad.size:
        return None
    first = first_row + int(bad[0])
    what = "only zeros" if zero[bad[0]] else "a NaN or an infinity"
    return BadRowCount(int(zero.sum()), int(nonfinite.sum()), first), BadRows(f"row {first} holds {what}")
