"""Large memory: in huge pages where the kernel gives them, and kept by glibc where blocks are freed and taken again."""

from __future__ import annotations

import contextlib
import functools
import mmap
from pathlib import Path

_LARGE_BYTES = 31 << 20


def map_memory(nbytes: int, fd: int = -1) -> mmap.mmap:
    """`nbytes` (at least 1) of zeroed memory, page aligned, unmapped when the last view of it is gone. Raises OSError.

    With `fd`, a file of so many bytes, as memfd_create makes one, every process that maps it shares the memory.

    In huge pages new memory costs a quarter of what it does in small ones, and another process reads it twice as fast
    (process_vm_readv pins page by page). Pages are taken from the system as they are first touched.
    """
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd < 0 else mmap.MAP_SHARED)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel without them.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@functools.cache  # Once a process: what was freed first is kept, so another one of that size is megabytes to clear.
def keep_freed_blocks() -> None:
    """Have glibc keep freed blocks of megabytes, as gRPC's messages are, for the next ones.

    Until a large block was freed it gives them back to the system, and each message costs a page fault for every 4 KiB: of a
    client's CPU for a read that is a third. What counts is the largest block freed so far, up to 32 MiB; twice that is
    kept (mallopt(3), M_MMAP_THRESHOLD). So this frees one, untouched. Settings in the environment stay as they are.
    """
    bytes(_LARGE_BYTES)


def resident_bytes() -> int:
    """Memory that this process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
