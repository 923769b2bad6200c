"""The threads that wait for the disk, and which of them writes chunks: a thread, or the event loop itself.

A chunk that is written where it was just read is still in the CPU's cache, and no thread has to be woken for it: 15% less CPU
time a byte on two cores. But a disk that stops would stop the event loop, and every other stream with it. So a write that took
long sends those after it to the thread, until the disk has been fast again for a while.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from slotstream.common.cores import for_cores
from slotstream.common.throttle import Throttle
from slotstream.server.lines import Lines, NarrowLines
from slotstream.server.pulse import Pulse

_CHUNK_THREADS_MAX = 4
_OF_A_NAMESPACE = 8  # Threads that wait for reads, or checks, of one namespace at most.
_SLOW_S = 0.05  # 2 MiB take the page cache under 1 ms; a disk that is written to at its own speed takes this and more.
_SLOW_FOR_S = 5.0


class DiskSpeed:
    """How long writes of chunks took lately. Any thread may call it."""

    def __init__(self) -> None:
        self._slow_until = 0.0

    @property
    def is_fast(self) -> bool:
        """Whether no write of the last seconds was slow."""
        return time.monotonic() >= self._slow_until

    def note(self, seconds: float) -> None:
        """A chunk was written, and it took so long."""
        if seconds >= _SLOW_S:
            self._slow_until = time.monotonic() + _SLOW_FOR_S


@dataclass(slots=True)
class DiskThreads:
    """Threads that wait for the disk.

    On few cores one thread opens samples and writes the chunks that the event loop leaves to it: mostly copies into the page
    cache, and more threads would only take the processor from the loop. On many, several threads check and write all chunks:
    that needs no Python, and a core does 6 GB/s of the one and 4 of the other at best. Commits and reads wait for the disk
    itself; so do checks, deletions and all that the catalogue writes. Lookups ask the catalogue alone, and have threads that no
    sample's disk holds up. Of chunks and commits each stream has a line of its own. Of reads and of checks no namespace has
    more than half of the threads: the files of one may hang.
    """

    chunk_threads: int = field(default_factory=lambda: for_cores(_CHUNK_THREADS_MAX))
    chunks: ThreadPoolExecutor = field(init=False)
    commits: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, "commit"))
    reads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2 * _OF_A_NAMESPACE, "read"))
    checks: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2 * _OF_A_NAMESPACE, "check"))
    lookups: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "lookup"))
    chunk_lines: Lines = field(init=False)
    commit_lines: Lines = field(init=False)
    read_lines: NarrowLines = field(init=False)
    check_lines: NarrowLines = field(init=False)
    disk_speed: DiskSpeed = field(default_factory=DiskSpeed)
    faults: Throttle = field(default_factory=lambda: Throttle(every_s=60.0))  # In the log, by class: one may meet every sample.
    loop: Pulse = field(default_factory=lambda: Pulse("event loop"))  # Excused while it writes chunks itself.

    def __post_init__(self) -> None:
        self.chunks = ThreadPoolExecutor(self.chunk_threads, "chunk")
        self.chunk_lines, self.commit_lines = Lines(self.chunks), Lines(self.commits)
        self.read_lines = NarrowLines(self.reads, _OF_A_NAMESPACE)
        self.check_lines = NarrowLines(self.checks, _OF_A_NAMESPACE)

    @property
    def checks_ahead(self) -> bool:
        """Whether a chunk's hash is computed by another thread than the one that writes its sample."""
        return self.chunk_threads > 1

    @property
    def loop_writes(self) -> bool:
        """Whether the event loop writes chunks itself."""
        return not self.checks_ahead and self.disk_speed.is_fast

    def shutdown(self) -> None:
        """Let the threads finish what they have and end them."""
        for pool in (self.chunks, self.commits, self.reads, self.checks, self.lookups):
            pool.shutdown()
