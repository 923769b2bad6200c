"""Whether rows can be trusted: the slots that the device wrote against the block table, and rows no healthy model writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slotstream.connector.sending.copies import KvSlots, Ticket
from slotstream.wire.errors import BadRows, RowsNotComputed, SlotMismatch, SlotStreamError


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


def slot_problem(computed: KvSlots, mapping: StepMapping | None) -> SlotStreamError | None:
    """Why rows cannot be trusted; None when the device wrote every slot of `computed`, which the block table names."""
    if computed.size == 0:
        return None
    if mapping is None:
        return RowsNotComputed("vLLM ran no extraction in a step that computed rows of this sample")
    if not mapping.each_once(computed):
        return SlotMismatch("the device wrote other slots than the block table names")
    return None


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
