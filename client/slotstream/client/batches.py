"""What a stream of rows was asked for, and the batches that it makes of rows in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slotstream.client.arrays import Arrays
from slotstream.client.members import Filters
from slotstream.client.stretches import COLUMNS, Held
from slotstream.wire.errors import ConfigError
from slotstream.wire.hashing import to_hex, xxh3


@dataclass(frozen=True, slots=True)
class Options:
    """What `rows` was asked for."""

    layers: tuple[int | str, ...]
    is_one: bool
    batch: int
    filters: Filters
    seed: int
    buffer_rows: int
    drop_last: bool
    as_of: int | None
    follow: bool
    columns: tuple[str, ...]
    wait_s: float
    retry_s: float

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ConfigError(f"layers {list(self.layers)} are not one layer or more, each named once")
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise ConfigError(f"batch {self.batch!r} is not a number of rows, 1 or more")
        if self.buffer_rows < 1:
            raise ConfigError(f"buffer_rows {self.buffer_rows} is not 1 or more")
        if unknown := sorted(set(self.columns) - set(COLUMNS)):
            raise ConfigError(f"unknown columns {unknown}; known: {list(COLUMNS)}")
        if self.wait_s < 0 or self.retry_s < 0:
            raise ConfigError("wait_s and retry_s are 0 seconds or more")

    def fingerprint(self) -> str:
        """Of what decides which rows come, and when: 16 hexadecimal characters."""
        kept = self.filters, self.layers, self.batch, self.seed, self.buffer_rows, self.drop_last, self.follow
        return to_hex(xxh3(repr(kept).encode()))


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one stretch, by their numbers there, and the place of each in a batch."""

    held: Held
    rows: list[int]
    places: list[int]


def batch_of(parts: Sequence[Part], options: Options, arrays: Arrays) -> Any:
    """These rows as the trainer gets them. The parts have every place once."""
    laid = arrays.gather([(part.held.rows, part.rows, part.places) for part in parts])
    if options.is_one and not options.columns:
        return arrays.layer(laid, 0)
    made: dict[int | str, Any] = {layer: arrays.layer(laid, number) for number, layer in enumerate(options.layers)}
    for name in options.columns:
        found = {
            place: COLUMNS[name](part.held, row) for part in parts for place, row in zip(part.places, part.rows, strict=True)
        }
        values = [found[place] for place in range(len(found))]
        made[name] = values if name == "sample_ids" else arrays.numbers(values)
    return made
