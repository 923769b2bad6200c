"""Faults of the disk below Python and SQLite, armed and disarmed while a process runs. faulty_disk.c is the other half."""

from __future__ import annotations

import ctypes
import enum
import mmap
from pathlib import Path

from faults.shim import library

RULES = 8


class Call(enum.IntFlag):
    OPEN = 1
    READ = 2
    WRITE = 4
    SYNC = 8
    RENAME = 16
    UNLINK = 32
    TRUNCATE = 64
    ALLOCATE = 128
    MKDIR = 256


class _Rule(ctypes.Structure):
    _fields_ = [
        ("calls", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("per_million", ctypes.c_uint32),
        ("half", ctypes.c_uint32),
        ("hang_us", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("seen", ctypes.c_uint64),
        ("done", ctypes.c_uint64),
        ("below", ctypes.c_char * 512),
        ("part", ctypes.c_char * 64),
    ]


class FaultyDisk:
    """The faults of one process tree, on the files below `directory`. `environment` is what a process is started with."""

    def __init__(self, plan: Path, directory: Path) -> None:
        """`plan`: where the rules are shared with the process."""
        plan.write_bytes(bytes(RULES * ctypes.sizeof(_Rule)))
        with plan.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._rules = (_Rule * RULES).from_buffer(self._memory)
        self._directory = str(directory).encode()
        self.environment = {"LD_PRELOAD": str(library("faulty_disk")), "SLOTSTREAM_FAULTS": str(plan)}

    def arm(
        self,
        calls: Call,
        error: int = 0,
        *,
        share: float = 1.0,
        part: str = "",
        half: bool = False,
        hang_s: float = 0.0,
        seed: int = 1,
        rule: int = 0,
    ) -> None:
        """From now on these calls, on files whose path holds `part`, fail so often in such a way."""
        one = self._rules[rule]
        one.calls = 0
        one.error, one.per_million, one.half, one.hang_us = error, round(share * 1e6), half, round(hang_s * 1e6)
        one.seed, one.seen, one.done = seed, 0, 0
        one.below, one.part = self._directory, part.encode()
        one.calls = int(calls)  # Last: from here on the rule counts.

    def pause(self) -> None:
        """The disk works again."""
        for one in self._rules:
            one.calls = 0

    def disarm(self) -> int:
        """The disk works again; how many calls had failed."""
        self.pause()
        return sum(one.done for one in self._rules)
