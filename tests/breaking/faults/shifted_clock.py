"""The wall clock of one process tree, set while it runs. shifted_clock.c is the other half."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from faults.shim import library

DAY_NS = 86_400 * 10**9


class ShiftedClock:
    """`environment` is what a process is started with."""

    def __init__(self, path: Path) -> None:
        """`path`: where the shift is shared with the process."""
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.environment = {"LD_PRELOAD": str(library("shifted_clock")), "SLOTSTREAM_CLOCK": str(path)}

    def shift(self, ns: int) -> None:
        """From now on the clock is `ns` ahead of the true one, or behind it."""
        self._memory[:] = struct.pack("=q", ns)
