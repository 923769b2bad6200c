"""The size and form of what is moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """What is moved: `samples` of `rows`, in frames of `frame_rows`; a row is `layers` x `hidden` bf16 elements."""

    layers: int
    hidden: int
    rows: int
    frame_rows: int

    @property
    def row_bytes(self) -> int:
        return self.layers * self.hidden * 2

    @property
    def sample_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def frame_bytes(self) -> int:
        return self.frame_rows * self.row_bytes

    def frames(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of each frame of a sample; the last may be shorter."""
        for start in range(0, self.rows, self.frame_rows):
            yield start, min(self.frame_rows, self.rows - start)
