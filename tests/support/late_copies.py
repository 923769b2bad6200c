"""Copies from the device that end, or fail, when a test says so."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from slotstream.connector.reading.gather import Index, RowGather
from slotstream.connector.sending.copies import Gathered


@dataclass(frozen=True)
class LateRows:
    """Rows that are in staging once `copy` says so."""

    rows: Gathered
    copy: Copy

    @property
    def is_done(self) -> bool:
        return self.copy.is_done

    def wait(self) -> None:
        self.copy.wait()

    def peaks(self) -> npt.NDArray[np.float32]:
        return self.rows.peaks()


class Copy:
    """A copy that ends when it is told to, or fails: `error` is what the device says then."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.ended.is_set()

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        assert self.ended.is_set(), "the pump was to do something else meanwhile"


def put_off(monkeypatch: pytest.MonkeyPatch) -> dict[int, Copy]:
    """Copies of gathers that must be under way, by the number of the gather."""
    pending: dict[int, Copy] = {}
    gather, done = RowGather.gather, [0]

    def slow(self: RowGather, *args: Any) -> tuple[Gathered, Index]:
        gathered, notes = gather(self, *args)
        done[0] += 1
        copy = pending.get(done[0])
        return (gathered if copy is None else LateRows(gathered, copy)), notes

    monkeypatch.setattr(RowGather, "gather", slow)
    return pending
