"""The hashes of a batch's rows, on several threads where that pays.

A core hashes 6 GB/s of rows that it does not have in its cache (H200's host; else seven times that). A step's 256 MiB would
take 40 ms, and 16 layers of an 8B model are 5.4 GB/s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from slotstream.common.cores import for_cores
from slotstream.wire.hashing import xxh3

_THREADS_MAX = 4
_WORTH_BYTES = 4 << 20  # Below that handing it to a thread costs about what that saves.
_TASKS_EACH = 2  # Of a batch, for each thread: they do not all begin at once.


class Digests:
    """Hashes buffers in the order in which they are given. One thread asks."""

    def __init__(self, cores: int | None = None) -> None:
        """`cores`: how many this process may use, unless the system is to say."""
        self._count = for_cores(_THREADS_MAX, cores=cores)
        self._threads = ThreadPoolExecutor(self._count, "slotstream-hash") if self._count > 1 else None

    def of(self, buffers: Sequence[memoryview]) -> Iterator[int]:
        """The xxh3-64 of each buffer, as soon as it is known. They must stay as they are until the last one was taken."""
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if self._threads is None or nbytes < _WORTH_BYTES:
            return map(xxh3, buffers)
        # In runs: a future for each buffer takes the interpreter longer than some buffers take the thread.
        runs = _runs(buffers, max(_WORTH_BYTES, nbytes // (self._count * _TASKS_EACH)))
        return itertools.chain.from_iterable(self._threads.map(_hash_all, runs))

    def close(self) -> None:
        """End the threads, once they have done what they have."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)


def _runs(buffers: Sequence[memoryview], nbytes: int) -> Iterator[Sequence[memoryview]]:
    """The buffers in order, in runs of at least `nbytes` but for the last."""
    first = size = 0
    for at, buffer in enumerate(buffers, 1):
        size += buffer.nbytes
        if size >= nbytes or at == len(buffers):
            yield buffers[first:at]
            first, size = at, 0


def _hash_all(buffers: Sequence[memoryview]) -> list[int]:
    return [xxh3(buffer) for buffer in buffers]
