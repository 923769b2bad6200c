"""Staging as everybody who looks into it sees it: the slots, what the device notes of each row, and how far its reads are.

Two processes may have it mapped, and the device writes to it. Nothing in it has a lock: each word has one writer.
"""

from __future__ import annotations

import mmap
from array import array
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slotstream.common.memory import map_memory
from slotstream.connector.sending.staging_pool import StagingShape

Words = npt.NDArray[np.int64]

_WORD_BYTES = 8
_LINE_WORDS = 8  # Words of one cache line.
_SLOT_BITS = 24


def control_bytes(shape: StagingShape) -> int:
    """How much memory an area needs beside its slots, in whole pages."""
    words = 2 * _LINE_WORDS + _ring_words(shape) + shape.slots * shape.rows_per_slot * shape.note_words
    return _whole_pages(words * _WORD_BYTES)


def control_offset(shape: StagingShape) -> int:
    """Where that begins, in memory that holds both."""
    return _whole_pages(shape.nbytes)


def map_staging(shape: StagingShape, fd: int) -> StagingArea:
    """The area in memory that another process made. Raises OSError."""
    at = control_offset(shape)
    whole = memoryview(map_memory(at + control_bytes(shape), fd))
    return StagingArea(whole[: shape.nbytes], whole[at:], shape)


class HostMemory(Protocol):
    """The memory that staging lies in. `fd`: by which another process can map it, as `map_staging` does; -1 where none can."""

    fd: int
    area: StagingArea


class StagingArea:
    """Slots of `shape` in `slots`, and `control_bytes` beside them in `control`.

    `notes`: int64 [slots, rows of a slot, note words]: see `row_check.note_words`. A row's notes come behind the row.
    """

    def __init__(self, slots: memoryview, control: memoryview, shape: StagingShape) -> None:
        self.slots = slots
        self._slot_words = slots[: len(slots) // _WORD_BYTES * _WORD_BYTES].cast("q")
        self._control = control.cast("B").cast("q")
        words = np.frombuffer(control, np.int64)
        ring = 2 * _LINE_WORDS
        notes = ring + _ring_words(shape)
        count = shape.slots * shape.rows_per_slot * shape.note_words
        self.notes = words[notes : notes + count].reshape(shape.slots, shape.rows_per_slot, shape.note_words)
        self.done_word = words[:1]
        self._taken = self._control[_LINE_WORDS : _LINE_WORDS + 1]
        self._ring = self._control[ring:notes]
        self._slot_bytes = shape.slot_bytes

    @property
    def done(self) -> int:
        """The number of the last read that is over: every row and note of it, and of those before, is here."""
        return self._control[0]

    def words(self, slot: int) -> Words:
        """A slot as words: scratch of a read."""
        at = slot * self._slot_bytes
        return np.frombuffer(self.slots[at : at + self._slot_bytes // _WORD_BYTES * _WORD_BYTES], np.int64)

    def put_words(self, slot: int, words: array[int]) -> None:
        """Write these at a slot's begin. A slot begins at a word."""
        at = slot * self._slot_bytes // _WORD_BYTES
        self._slot_words[at : at + len(words)] = words

    def lending(self, first_turn: int) -> LeaseRing:
        """The ring through which slots are lent, from this turn on. The lender and the engine have one each."""
        return LeaseRing(self._ring, self._taken, first_turn)


class LeaseRing:
    """Free slots on their way from the lender to the engine, which leases them. One thread on each side.

    A word holds its turn and its slot, and is written at once, so that nobody sees half of it. What is not of the turn that is
    next has not been lent yet. There are more words than slots: none is written over before it was taken.
    """

    def __init__(self, words: memoryview[int], taken: memoryview[int], first_turn: int) -> None:
        self._words = words
        self._taken = taken
        self.turn = first_turn

    def clear(self) -> None:
        """Nothing is lent. The lender calls it first."""
        for at in range(len(self._words)):
            self._words[at] = -1
        self._taken[0] = self.turn

    def lend(self, slots: list[int]) -> None:
        """Lend these."""
        for slot in slots:
            self._words[self.turn % len(self._words)] = self.turn << _SLOT_BITS | slot
            self.turn += 1

    @property
    def stock(self) -> int:
        """How many were lent and not taken. The lender asks."""
        return self.turn - self._taken[0]

    def ready(self, count: int) -> list[int]:
        """Up to `count` slots that can be taken: the next ones."""
        size, turn = len(self._words), self.turn
        at = turn % size
        words = self._words[at : at + count].tolist()
        if len(words) < count:
            words += self._words[: count - len(words)].tolist()
        slots = []
        for word in words:
            if word >> _SLOT_BITS != turn:
                break
            slots.append(word & (1 << _SLOT_BITS) - 1)
            turn += 1
        return slots

    def take(self, count: int) -> None:
        """The first `count` of those are taken."""
        self.turn += count
        self._taken[0] = self.turn

    def after(self) -> int:
        """A turn that no slot was, or will be, lent in here: where another one who lends may begin."""
        return self.turn + 2 * len(self._words)


def _ring_words(shape: StagingShape) -> int:
    return -(-(shape.num_slots + 1) // _LINE_WORDS) * _LINE_WORDS


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
