"""Reads of the device that are over when a test says so."""

from __future__ import annotations

import pytest

from slotstream.connector.reading.gather import RowGather


class Reads:
    """What a device that does one read after another has done. `hold`: reads, by number, that it does not end yet."""

    def __init__(self) -> None:
        self.hold: set[int] = set()
        self._started: list[tuple[RowGather, int]] = []

    def started(self, gather: RowGather, number: int) -> None:
        """A read is under way."""
        self._started.append((gather, number))
        self.go_on()

    def release(self, number: int) -> None:
        """That read is over, and those behind it."""
        self.hold.discard(number)
        self.go_on()

    def go_on(self) -> None:
        """End what may end."""
        while self._started and self._started[0][1] not in self.hold:
            gather, number = self._started.pop(0)
            is_over(gather, number)


is_over = RowGather._is_over


def put_off(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """A device whose reads can be held."""
    reads = Reads()
    monkeypatch.setattr(RowGather, "_is_over", lambda gather, number: reads.started(gather, number))
    return reads
