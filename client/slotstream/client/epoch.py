"""The plan of an epoch: which rows are whose, and in which order. Pure: seed, epoch and ids alone decide, and nothing is read.

A sample is cut into *stretches* of consecutive rows, each read at once. Which rank and worker a stretch belongs to depends on
its sample's id alone; when its turn comes, on seed, epoch and id. A row comes out some way after its stretch was read, a chance
part of the *window*, so that rows of the stretches in a window are mixed. A row's place is a number, its *mark*: the place of a
sample that is gone stays empty, and no other row moves. A reader that knows the mark of the last row it handed out can go on
from there without having kept a row.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slotstream.client.ranks import Place
from slotstream.wire.hashing import xxh3

SPACE = 1 << 64  # Of a stretch's place.
_WHOLE_EPOCH = SPACE << 16  # A window in which chance alone decides.
_ROW_BITS, _TAG_BITS = 32, 64
_LANES = 64  # What a rank's workers share: worker w of W has each lane l with l % W == w.
_ENOUGH = 8192  # So many stretches a rank, and chance alone shares rows out evenly, to a hundredth or so.
_STRETCHES = 32  # Of the largest kind, in a buffer.
_ROWS_MIN = 8  # A stretch of fewer rows is not worth a read of its own.


@dataclass(frozen=True, slots=True)
class Member:
    """A sample of an epoch."""

    namespace: str
    sample_id: str
    rows: int
    committed_unix_ns: int
    layers: tuple[int, ...]  # The ids to ask for: "final" is a number in each sample.

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.sample_id}"


@dataclass(frozen=True, slots=True)
class Cut:
    """How samples are cut. All ranks must cut alike; part of a state, so that what was deleted meanwhile changes nothing."""

    split: int  # A sample of enough rows is cut into at least so many stretches, for the ranks to share.
    stretch_rows: int  # The most rows of a stretch.

    @classmethod
    def of(cls, samples: int, buffer_rows: int, world_size: int) -> Cut:
        """For an epoch of so many samples, by readers that hold about so many rows each."""
        # Counted in powers of two: a few samples more or fewer do not cut all of them another way.
        about, split = 1 << max(0, samples.bit_length() - 1), 1
        while split < world_size and about * split < _ENOUGH * world_size:
            split *= 2
        return cls(min(split, world_size), max(1, buffer_rows // _STRETCHES))


def window(rows: int, buffer_rows: int, shards: int) -> int:
    """How far behind its stretch a row may come: so that a reader of one of `shards` holds about half of `buffer_rows`.

    rows: of the whole epoch. They too are rounded up to a power of two, for the reason that `Cut.of` gives.
    """
    rounded = 1 << max(0, rows - 1).bit_length()
    width = SPACE * buffer_rows * shards // (2 * rounded)
    return _WHOLE_EPOCH if width >= SPACE else max(1, width)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows [start, stop) of a sample."""

    member: Member
    number: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        return f"{self.member.name}/{self.number}"

    def rank(self, world_size: int) -> int:
        # Those of one sample take turns, so that it is shared out evenly.
        return (number_of("rank", self.member.name) + self.number) % world_size

    def lane(self) -> int:
        return number_of("lane", self.name) % _LANES

    def is_of(self, place: Place) -> bool:
        return self.rank(place.world_size) == place.rank and self.lane() % place.workers == place.worker


def stretches(members: Iterable[Member], cut: Cut) -> Iterable[Stretch]:
    """All of these samples, however they are shared."""
    for member in members:
        rows = member.rows
        count = max(-(-rows // cut.stretch_rows), min(cut.split, rows // _ROWS_MIN), 1)
        for number in range(count):
            yield Stretch(member, number, rows * number // count, rows * (number + 1) // count)


@dataclass(frozen=True, slots=True)
class Turn:
    """A stretch and when it comes, in one epoch."""

    key: int  # Its place; marks of its rows are at or after it, and less than a window later.
    tag: int  # Which stretch it is, in marks.
    stretch: Stretch

    def marks(self, seed: int, epoch: int, window: int) -> list[int]:
        """The mark of each row, in the order of the rows."""
        chance = array("I", random.Random(number_of("rows", seed, epoch, self.stretch.name)).randbytes(4 * self.stretch.rows))
        if sys.byteorder == "big":
            chance.byteswap()
        shift = _TAG_BITS + _ROW_BITS
        base = self.tag << _ROW_BITS
        return [(self.key + (part * window >> 32) << shift) | base | row for row, part in enumerate(chance)]


def turns(units: Iterable[Stretch], seed: int, epoch: int) -> list[Turn]:
    """In the order in which they are read."""
    made = [Turn(number_of("turn", seed, epoch, unit.name), number_of("tag", unit.name), unit) for unit in units]
    made.sort(key=lambda turn: (turn.key, turn.tag))
    return made


def place_of(mark: int) -> int:
    return mark >> _TAG_BITS + _ROW_BITS


def first_mark(place: int) -> int:
    """Marks of places before this one are less; all others are not."""
    return place << _TAG_BITS + _ROW_BITS


def tags_of(marks: Iterable[int]) -> list[int]:
    """Of which stretch each row is."""
    mask = (1 << _TAG_BITS) - 1
    return [mark >> _ROW_BITS & mask for mark in marks]


def rows_of(marks: Iterable[int]) -> list[int]:
    """Each row's number, from the first row of its stretch."""
    mask = (1 << _ROW_BITS) - 1
    return [mark & mask for mark in marks]


def census(members: Iterable[Member], cut: Cut, world_size: int) -> list[list[int]]:
    """Rows of each rank, by lane."""
    found = [[0] * _LANES for _ in range(world_size)]
    for unit in stretches(members, cut):
        found[unit.rank(world_size)][unit.lane()] += unit.rows
    return found


def full_batches(counted: Sequence[Sequence[int]], batch: int, place: Place) -> int:
    """How many full batches this worker hands out, so that all ranks have equally many: the most that every rank has."""
    mine: list[int] = []
    fewest: int | None = None
    for rank, lanes in enumerate(counted):
        by_worker = [sum(lanes[worker :: place.workers]) // batch for worker in range(place.workers)]
        total = sum(by_worker)
        fewest = total if fewest is None else min(fewest, total)
        if rank == place.rank:
            mine = by_worker
    for _ in range(sum(mine) - (fewest or 0)):
        mine[mine.index(max(mine))] -= 1  # Who has most gives up one.
    return mine[place.worker]


def number_of(*parts: object) -> int:
    """A number below 2**64 that these decide, the same in every process: what stands for chance in a plan."""
    return xxh3("\x00".join(map(str, parts)).encode())
