"""The hashes of a batch's rows, on several threads where that pays.

A core hashes 6 GB/s of rows that it does not have in its cache (H200's host; else seven times that). A step's 256 MiB would
take 40 ms, and 16 layers of an 8B model are 5.4 GB/s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from slotstream.wire.cores import for_cores
from slotstream.wire.hashing import xxh3

_THREADS_MAX = 4
_WORTH_BYTES = 4 << 20  # Below that handing it to threads costs about what they save.


class Digests:
    """Hashes buffers in the order in which they are given. One thread asks."""

    def __init__(self, cores: int | None = None) -> None:
        """`cores`: how many this process may use, unless the system is to say."""
        threads = for_cores(_THREADS_MAX, cores=cores)
        self._threads = ThreadPoolExecutor(threads, "slotstream-hash") if threads > 1 else None

    def of(self, buffers: Sequence[memoryview]) -> Iterator[int]:
        """The xxh3-64 of each buffer, as soon as it is known. They must stay as they are until the last one was taken."""
        if self._threads is None or sum(buffer.nbytes for buffer in buffers) < _WORTH_BYTES:
            return map(xxh3, buffers)
        return self._threads.map(xxh3, buffers)

    def close(self) -> None:
        """End the threads, once they have done what they have."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
