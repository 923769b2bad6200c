"""A set of integers kept as merged ranges: which rows arrived, which sample numbers were used."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class RangeSet:
    """Half-open ranges, disjoint, sorted, never touching. Not thread safe."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __len__(self) -> int:
        """How many separate ranges there are."""
        return len(self._starts)

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self._starts, value) - 1
        return at >= 0 and value < self._stops[at]

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are not in the set, in order."""
        missing: list[tuple[int, int]] = []
        at = bisect_right(self._stops, start)
        while start < stop:
            if at == len(self._starts) or self._starts[at] >= stop:
                missing.append((start, stop))
                break
            if start < self._starts[at]:
                missing.append((start, self._starts[at]))
            start = self._stops[at]
            at += 1
        return missing

    def add(self, start: int, stop: int) -> None:
        """Put [start, stop) in, merging it with what it overlaps or touches."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def forget_lowest(self) -> None:
        """Drop the lowest range, if there is one."""
        del self._starts[:1], self._stops[:1]
