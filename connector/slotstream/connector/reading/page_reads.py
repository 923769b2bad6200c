"""Row pages read on a GPU: by the copy engine, which moves rows and what is noted of them from the pages into staging.

The copies run on a stream of their own, behind what the model's stream holds when the read begins: first the rows, then their
notes, then the read's number, which the host looks at. Pages that are given to another request meanwhile would be written over:
then the model's stream waits for the last read of one of them, and for no later one (`wait_for`).

No kernel runs beside the model. Once a kernel of another stream has run beside a CUDA graph, each kernel of the graph begins
0.2 to 0.4 us later, for many seconds: 0.25 ms for a decode step of 530 kernels on an H100. Copies do nothing of the kind
(tests/gpu/beside.py).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from slotstream.connector.reading.staging_memory import COPY_BYTES, StagingMemory
from slotstream.connector.sending.row_check import PAGE_WORDS, PART_WORDS, InSlot, NotedRows, Segment
from slotstream.wire.errors import ConfigError

_FEW = 3  # So many copies, 6 us each, take the host no longer than one call for all, 20 us and 1 us each (H100's host).
_ROOM = 256  # Copies of a read, to begin with.
_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
_HOST_POINTERS_DO = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_REFUSED = (1, 801)  # CUDA_ERROR_INVALID_VALUE and CUDA_ERROR_NOT_SUPPORTED: what one copy alone may not meet.
_BLACKWELL = 10  # Its major compute capability.
_EVENTS = 64  # Reads that the model's stream can wait for one by one: two steps' of the largest.


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

    def copy(self, rows: Copies, notes: Copies, number: int) -> None:
        """Start copying, behind what the model's stream holds now: the rows, behind them their notes, and then the number."""

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
        self._last = np.zeros(pool.shape[0] // page_rows + 1, np.int64)  # By page, the read that it was last part of.
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

    def read(self, words: array[int], segments: Sequence[Segment], scratch: int) -> tuple[int, NotedRows]:
        """Read what `words` say, which are those of `NotedRows`: see `RowSource`."""
        area, parts, size = self._memory.area, len(segments), len(words)
        area.put_words(scratch, words)
        # Nobody may take what stood there before for what the device notes.
        area.notes[[segment.staging_slot for segment in segments], : max([segment.rows for segment in segments]), 0] = -1
        self._number = number = self._number + 1
        first = parts * PART_WORDS
        pages = words[first : first + (size - first) // PAGE_WORDS]
        self._last[pages] = number
        if parts + len(pages) > self._copies[0].room:
            self._copies = Copies(2 * (parts + len(pages))), Copies(2 * (parts + len(pages)))
        self._list_copies(words, parts, pages)
        self._device.copy(*self._copies, number)
        return number, NotedRows(InSlot(scratch, 0, size), parts, self._page_rows)

    def _list_copies(self, words: array[int], parts: int, pages: array[int]) -> None:
        """Have one copy for what lies together: pages next to each other, of one part.

        In loops: most reads have few pages, and are through with them before numpy has begun.
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

    def wait_for(self, pages: Iterable[int]) -> None:
        """Before these pages are given to somebody, -1 for none: what still reads one of them is waited for, on the device."""
        done = self._memory.area.done
        if done == self._number:
            return
        given = [page for page in pages if page >= 0]
        last = self._last[given].max() if given else 0
        if last > done:
            self._device.hold_model(int(last))

    def forget(self) -> None:
        """Before the pool is written over as a whole: the model's stream waits for every read."""
        self._device.hold_model(self._number)

    def settle(self) -> None:
        """See `RowSource`."""
        self._device.settle()


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: in which order sources are read; hints of places, and flags."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_kind", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("to_kind", ctypes.c_int),
        ("to_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


def takes_batches(cuda: Any, device: int, capability: int) -> bool:
    """Whether one call may start many copies on a device, by its number and its major compute capability.

    Not before CUDA 12.8. Not where pinned memory has other addresses on the device, as under WSL: the call takes the host's for
    the device's, and the fault ends the process (github.com/sgl-project/sglang/issues/40232). Not on Blackwell: it was seen to
    hang and to crash there (github.com/vllm-project/vllm/issues/49276, github.com/InternLM/lmdeploy/pull/4838).
    """
    if not hasattr(cuda, "cuMemcpyBatchAsync") or capability >= _BLACKWELL:
        return False
    handle, found = ctypes.c_int(), ctypes.c_int()
    error = cuda.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)) or cuda.cuDeviceGetAttribute(
        ctypes.byref(found), ctypes.c_int(_HOST_POINTERS_DO), handle
    )
    return error == 0 and found.value == 1


class DriverCopies:
    """Copies to the host on one stream, by CUDA's driver: torch has no call for many."""

    def __init__(self, cuda: Any, stream: int, *, batches: bool) -> None:
        """`cuda`: libcuda. `batches`: see `takes_batches`."""
        self._cuda = cuda
        self._stream = ctypes.c_void_p(stream)
        self._batch = cuda.cuMemcpyBatchAsync if batches else None  # CUDA 12.8's form; later drivers keep it.
        self._how = _CopyAttributes(order=_IN_STREAM_ORDER)

    def start(self, copies: Copies) -> int:
        """Start them; CUDA's error, 0 for none."""
        if self._batch is not None and copies.count > _FEW:
            first, failed = ctypes.c_size_t(0), ctypes.c_size_t()
            how = ctypes.byref(self._how), ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(failed)
            count = ctypes.c_size_t(copies.count)
            error = int(self._batch(copies.to, copies.source, copies.nbytes, count, *how, self._stream))
            if error not in _REFUSED:
                return error
            self._batch = None  # Should some of them have begun, they are made twice.
        for at in range(copies.count):
            copy = ctypes.c_void_p(copies.to[at]), ctypes.c_uint64(copies.source[at]), ctypes.c_size_t(copies.nbytes[at])
            if error := int(self._cuda.cuMemcpyDtoHAsync_v2(*copy, self._stream)):
                return error
        return 0


class DoneWord:
    """The word of host memory where the number of the last read goes, behind all that a stream of `device` holds by then."""

    def __init__(self, cuda: Any, stream: int, device: torch.device) -> None:
        """`cuda`: libcuda."""
        self._cuda = cuda
        self._stream = ctypes.c_void_p(stream)
        self._device = device
        self._host = ctypes.c_void_p()
        self._of_device = ctypes.c_uint64()  # The same word: pinned host memory may have another address on the device.
        self._numbers: torch.Tensor | None = None
        self._by_way_of: torch.Tensor | None = None

    @property
    def is_copied(self) -> bool:
        """Whether numbers are copied there. Then the one of the read so many as `_EVENTS` before must have arrived."""
        return self._numbers is not None

    def begin(self, address: int) -> int:
        """Find out how to write there, and write 0; CUDA's error, 0 for none.

        Where a stream cannot write to memory by itself, copies do: of a number in host memory, to the device and back.
        """
        self._host = ctypes.c_void_p(address)
        found = ctypes.byref(self._of_device)
        if error := int(self._cuda.cuPointerGetAttribute(found, _DEVICE_POINTER, ctypes.c_uint64(address))):
            return error
        if (error := self.write(0)) in _REFUSED:
            self._copy_from_now_on()
            error = self.write(0)
        return error

    def _copy_from_now_on(self) -> None:
        self._numbers = torch.zeros(_EVENTS, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._by_way_of = torch.zeros(1, dtype=torch.int64, device=self._device)

    def write(self, number: int) -> int:
        """Write it behind everything that the stream holds; CUDA's error, 0 for none."""
        if self._numbers is None or self._by_way_of is None:
            return int(self._cuda.cuStreamWriteValue64_v2(self._stream, self._of_device, ctypes.c_uint64(number), 0))
        at = number % _EVENTS
        self._numbers.numpy()[at] = number
        source = ctypes.c_void_p(self._numbers.data_ptr() + at * self._numbers.element_size())
        between, nbytes = ctypes.c_uint64(self._by_way_of.data_ptr()), ctypes.c_size_t(self._numbers.element_size())
        return int(
            self._cuda.cuMemcpyHtoDAsync_v2(between, source, nbytes, self._stream)
            or self._cuda.cuMemcpyDtoHAsync_v2(self._host, between, nbytes, self._stream)
        )


class CudaCopier:
    """A `Copier` for a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._reads = [torch.cuda.Event() for _ in range(_EVENTS)]  # type: ignore[no-untyped-call]
        self._number = 0
        self._device = device
        self._model = torch.cuda.current_stream(device)
        cuda = ctypes.CDLL("libcuda.so.1")
        major, _ = torch.cuda.get_device_capability(device)
        self._copies = DriverCopies(cuda, self._side.cuda_stream, batches=takes_batches(cuda, device.index, major))
        self._done = DoneWord(cuda, self._side.cuda_stream, device)

    def prepare(self, done_word: int) -> None:
        """See `Copier`."""
        with torch.cuda.device(self._device):
            error = self._done.begin(done_word)
            self._side.synchronize()
        if error:
            raise ConfigError(f"a GPU that cannot write into host memory cannot be read: CUDA error {error}")

    def copy(self, rows: Copies, notes: Copies, number: int) -> None:
        """See `Copier`. Raises RuntimeError."""
        if torch._C._cuda_getCurrentRawStream(self._device.index) != self._model.cuda_stream:
            self._model = torch.cuda.current_stream(self._device)
        self._ready.record(self._model)
        self._ready.wait(self._side)
        if self._done.is_copied:
            self._reads[number % _EVENTS].synchronize()
        error = self._copies.start(rows) or self._copies.start(notes) or self._done.write(number)
        if error:
            raise RuntimeError(f"rows could not be copied to the host: CUDA error {error}")
        self._reads[number % _EVENTS].record(self._side)
        self._number = number

    def hold_model(self, number: int) -> None:
        """See `Copier`."""
        # The event of an older read was recorded again: the oldest that is left comes behind that read.
        event = self._reads[max(number, self._number - _EVENTS + 1) % _EVENTS]
        event.wait(torch.cuda.current_stream(self._device))

    def settle(self) -> None:
        """See `Copier`."""
        self._side.synchronize()
