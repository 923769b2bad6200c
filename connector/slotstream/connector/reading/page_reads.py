"""Row pages read on a GPU: one kernel a read, which writes rows and what is noted of them straight into staging.

It runs on a stream of its own, in a few blocks, behind what the model's stream holds when the read begins. Its last block to
end writes the read's number: all of the read is there before its number is. Pages that are given to another request meanwhile
would be written over: then the model's stream waits for the last read of one of them, and for no later one (`wait_for`).
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from slotstream.connector.reading.staging_memory import StagingMemory
from slotstream.connector.sending.row_check import PAGE_WORDS, PART_WORDS, InSlot, NotedRows, Segment
from slotstream.wire.errors import ConfigError

# Two blocks write 35 to 47 GB/s to the host, and a decode beside them is as fast as without: 1.000 to 1.005 of its time on an
# H100 (tests/gpu/read_kernel.py). Four take the whole link, and the model's own reads of memory wait: 1.06 to 1.12.
_BLOCKS = 2
_WARPS = 16
_BLOCK = 16384  # Elements that a block moves at a time, at most.
_EVENTS = 64  # Reads that the model's stream can wait for one by one: two steps' of the largest.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # Of elements of so many bytes.


class Launcher(Protocol):
    """What reads need of a device."""

    def prepare(self, memory: Sequence[torch.Tensor], constants: Sequence[int]) -> None:
        """Before the first launch: the memory that all launches work on, and the kernel's constants, in its order."""

    def launch(self, scratch: int, parts: int, number: int) -> None:
        """Start the kernel with these, behind what the model's stream holds now."""

    def hold_model(self, number: int) -> None:
        """What the model's stream gets from now on waits for the read of this number, and for those before it."""

    def settle(self) -> None:
        """Return once no read is under way."""


class PageReads:
    """Reads of `pool` [rows, layers, hidden], with `stamps` int64 [rows, 2] beside it, into `memory`. Pages of `page_rows`."""

    def __init__(
        self, pool: torch.Tensor, stamps: torch.Tensor, memory: StagingMemory, page_rows: int, device: Launcher
    ) -> None:
        bits = _BITS[pool.element_size()]
        self._memory = memory
        self._page_rows = page_rows
        self._device = device
        self._number = 0
        self._last = np.zeros(pool.shape[0] // page_rows + 1, np.int64)  # By page, the read that it was last part of.
        area = memory.area
        row = pool[0].numel()
        # Held here: launches are told addresses, and nobody else has the count of the blocks that are done, which comes last.
        self._used = (
            pool.view(bits),
            stamps,
            memory.memory[: memory.memory.numel() // 8 * 8].view(torch.int64),
            memory.memory.view(bits),
            torch.from_numpy(area.notes),
            torch.from_numpy(area.done_word),
            torch.zeros(1, dtype=torch.int32, device=pool.device),
        )
        shape = memory.shape
        mask = (1 << pool.element_size() * 8 - 1) - 1
        block = min(_BLOCK, 1 << (row - 1).bit_length())
        constants = (
            page_rows,
            shape.slot_bytes // 8,
            shape.slot_bytes // pool.element_size(),
            shape.rows_per_slot,
            row,
            mask,
            block,
        )
        device.prepare(self._used, constants)

    def read(self, words: array[int], segments: Sequence[Segment], scratch: int) -> tuple[int, NotedRows]:
        """Read what `words` say, which are those of `NotedRows`: see `RowSource`."""
        area, parts, size = self._memory.area, len(segments), len(words)
        area.put_words(scratch, words)
        # Nobody may take what stood there before for what the device notes.
        area.notes[[segment.staging_slot for segment in segments], : max([segment.rows for segment in segments]), 0] = -1
        self._number = number = self._number + 1
        first = parts * PART_WORDS
        self._last[words[first : first + (size - first) // PAGE_WORDS]] = number
        self._device.launch(scratch, parts, number)
        return number, NotedRows(InSlot(scratch, 0, size), parts, self._page_rows)

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
        """After a sleep the count of blocks may be anything: without this no number would come any more."""
        self._device.hold_model(self._number)
        self._used[-1].zero_()

    def settle(self) -> None:
        """See `RowSource`."""
        self._device.settle()


class CudaLauncher:
    """A `Launcher` for a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._reads = [torch.cuda.Event() for _ in range(_EVENTS)]  # type: ignore[no-untyped-call]
        self._number = 0
        self._device = device
        self._model = torch.cuda.current_stream(device)
        self._run: Any = None
        self._constants: Sequence[int] = ()

    def prepare(self, memory: Sequence[torch.Tensor], constants: Sequence[int]) -> None:
        """See `Launcher`."""
        from slotstream.connector.reading.page_kernel import read

        with torch.cuda.device(self._device):
            kernel = read.warmup(*memory, 0, 0, 0, *constants, grid=(_BLOCKS,), num_warps=_WARPS)
            # What Triton's own launch calls in the end: that takes 33 us, and this 8 (H100's host).
            run = kernel.run
            addresses = [_device_address(tensor) for tensor in memory]
        where = (_BLOCKS, 1, 1, self._side.cuda_stream, kernel.function, kernel.packed_metadata)
        self._run = functools.partial(run, *where, None, None, None, *addresses)
        self._constants = constants

    def launch(self, scratch: int, parts: int, number: int) -> None:
        """See `Launcher`."""
        if torch._C._cuda_getCurrentRawStream(self._device.index) != self._model.cuda_stream:
            self._model = torch.cuda.current_stream(self._device)
        self._ready.record(self._model)
        self._ready.wait(self._side)
        self._run(scratch, parts, number, *self._constants)
        self._reads[number % _EVENTS].record(self._side)
        self._number = number

    def hold_model(self, number: int) -> None:
        """See `Launcher`."""
        # The event of an older read was recorded again: the oldest that is left comes behind that read.
        event = self._reads[max(number, self._number - _EVENTS + 1) % _EVENTS]
        event.wait(torch.cuda.current_stream(self._device))

    def settle(self) -> None:
        """See `Launcher`."""
        self._side.synchronize()


def _device_address(memory: torch.Tensor) -> int:
    """Where the device finds this memory: pinned host memory may have another address there. Raises ConfigError."""
    found = ctypes.c_uint64()
    attribute = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    error = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(
        ctypes.byref(found), attribute, ctypes.c_uint64(memory.data_ptr())
    )
    if error:
        raise ConfigError(f"a GPU that cannot write into host memory cannot be read: CUDA error {error}")
    return found.value
