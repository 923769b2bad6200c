"""Row pages read on a GPU: by the copy engine, which moves rows and what is noted of them from the pages into staging.

The copies run on a stream of their own: first the rows, then their notes, then the read's number, which the host looks at. Rows
that the device may still compute are read behind what the model's stream holds by then. Others are read at once: else the
copies would begin when a step ends, and so does vLLM's own copy of what it sampled. Pages that are given to another request
meanwhile would be written over: then the model's stream waits for the last read of one of them, and for no later one
(`wait_for`).

No kernel runs beside the model. Once a kernel of another stream has run beside a CUDA graph, each kernel of the graph begins
0.2 to 0.4 us later, for many seconds: 0.25 ms for a decode step of 530 kernels on an H100. Copies do nothing of the kind
(tests/gpu/beside.py).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from slotstream.connector.reading.staging_memory import COPY_BYTES, StagingMemory
from slotstream.connector.sending.row_check import PAGE_WORDS, PART_WORDS, InSlot, NotedRows, Segment

_ROOM = 256  # Copies of a read, to begin with.


class Copies:
    """Copies from the device to the host, in any order: `count` addresses to and from, and how many bytes each."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.count = 0
        numbers = ctypes.c_uint64 * room
        self.to, self.source, self.nbytes = numbers(), numbers(), numbers()


class Copier(Protocol):
    """What reads need of a device."""

    def prepare(self, done_word: int) -> None:
        """Before the first copy: the address where numbers go. Raises ConfigError."""

    def remember_stream(self) -> None:
        """This thread's current stream is the model's. Before each `copy`."""

    def copy(self, rows: Copies, notes: Copies, number: int, *, behind_model: bool) -> None:
        """Start copying: the rows, behind them their notes, and then the number.

        `behind_model`: behind what the model's stream holds now.
        """

    def hold_model(self, number: int) -> None:
        """What the model's stream gets from now on waits for the read of this number, and for those before it."""

    def settle(self) -> None:
        """Return once no read is under way."""


class PageReads:
    """Reads of `pool` [rows, layers, hidden], with `stamps` int64 [rows, n] beside it, into `memory`. Pages of `page_rows`."""

    def __init__(self, pool: torch.Tensor, stamps: torch.Tensor, memory: StagingMemory, page_rows: int, device: Copier) -> None:
        area = memory.area
        self._memory = memory
        self._page_rows = page_rows
        self._device = device
        self._number = 0
        self._cleared = True  # Whether something clears notes, on the model's stream, that no read waited for yet.
        self._last = [0] * (pool.shape[0] // page_rows)  # By page, the read that it was last part of.
        self._tensors = (pool, stamps)  # Held here: copies are told addresses.
        rows_per_slot = memory.shape.rows_per_slot
        note_bytes = stamps.shape[1] * stamps.element_size()
        assert area.notes.shape[2] == stamps.shape[1], "a row's notes go where they have room"
        # Of rows and of notes: where the first is on the device and in staging, and the bytes of one and of a slot's.
        self._row_places = (pool.data_ptr(), memory.memory.data_ptr(), memory.shape.row_bytes, memory.shape.slot_bytes)
        self._note_places = (stamps.data_ptr(), area.notes.ctypes.data, note_bytes, rows_per_slot * note_bytes)
        self._copies = Copies(_ROOM), Copies(_ROOM)
        self._rows_a_copy = max(1, COPY_BYTES // memory.shape.row_bytes)
        device.prepare(area.done_word.ctypes.data)

    def read(
        self, words: array[int], segments: Sequence[Segment], scratch: int, *, computed: bool = False
    ) -> tuple[int, NotedRows]:
        """Read what `words` say, which are those of `NotedRows`: see `RowSource`, and `Located.computed`."""
        parts, size = len(segments), len(words)
        self._memory.area.put_words(scratch, words)
        _, notes, note_bytes, slot_note_bytes = self._note_places
        for segment in segments:  # Nobody may take what stood there before for what the device notes.
            ctypes.memset(notes + segment.staging_slot * slot_note_bytes, 0xFF, segment.rows * note_bytes)
        self._number = number = self._number + 1
        first = parts * PART_WORDS
        pages, last = words[first : first + (size - first) // PAGE_WORDS], self._last
        for page in pages:
            last[page] = number
        if parts + len(pages) > self._copies[0].room:
            self._copies = Copies(2 * (parts + len(pages))), Copies(2 * (parts + len(pages)))
        self._list_copies(words, parts, pages)
        self._device.copy(*self._copies, number, behind_model=self._cleared or not computed)
        self._cleared = False
        return number, NotedRows(InSlot(scratch, 0, size), parts, self._page_rows)

    def _list_copies(self, words: array[int], parts: int, pages: array[int]) -> None:
        """Have one copy for what lies together: pages next to each other, of one part.

        In loops, as in `read`: most reads have few pages, and are through with them before numpy has begun.
        """
        rows, notes = self._copies
        row_source, row_to, row_bytes, slot_bytes = self._row_places
        note_source, note_to, note_bytes, slot_note_bytes = self._note_places
        size, most, count = self._page_rows, self._rows_a_copy, 0
        for part in range(0, parts * PART_WORDS, PART_WORDS):
            slot, at, behind, left = words[part : part + PART_WORDS]
            to, to_note = row_to + slot * slot_bytes, note_to + slot * slot_note_bytes
            while left > 0:
                page = pages[at]
                place, run = page * size + behind, size - behind
                at += 1
                page += 1
                while run < left and run + size <= most and pages[at] == page:
                    run += size
                    at += 1
                    page += 1
                if run > left:
                    run = left
                rows.to[count], rows.source[count], rows.nbytes[count] = to, row_source + place * row_bytes, run * row_bytes
                notes.to[count], notes.source[count] = to_note, note_source + place * note_bytes
                notes.nbytes[count] = run * note_bytes
                count += 1
                to += run * row_bytes
                to_note += run * note_bytes
                left -= run
                behind = 0
        rows.count = notes.count = count

    def remember_stream(self) -> None:
        """See `RowSource`."""
        self._device.remember_stream()

    def wait_for(self, pages: Iterable[int]) -> None:
        """Before these pages are given to somebody, -1 for none: what still reads one of them is waited for, on the device."""
        done = self._memory.area.done
        if done == self._number:
            return
        last = max([self._last[page] for page in pages if page >= 0], default=0)
        if last > done:
            self._device.hold_model(last)

    def forget(self) -> None:
        """Before the pool is written over as a whole: the model's stream waits for every read, and the next read for it."""
        self._device.hold_model(self._number)
        self._cleared = True

    def settle(self) -> None:
        """See `RowSource`."""
        self._device.settle()
