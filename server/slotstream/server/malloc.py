"""glibc's malloc in a process that moves megabyte messages: its settings, and memory given back after a load.

By default each message of 128 KiB and more is mapped from the kernel and unmapped again, page faults included. Kept on
the heap instead, gRPC moves 1 MiB frames at 2.1 GB/s and not at 1.3 (2 cores). glibc reads these settings from the
environment before main(), so the process has to start over with them. What a load left there would never be given
back, so that is done once the load is over. All threads share one heap: of others glibc gives nothing back that lies at
the end, which may be 64 MiB each, and what one thread freed there another does not get.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import platform
import sys
from collections.abc import Callable

from slotstream.common.memory import resident_bytes

_log = logging.getLogger(__name__)
SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
}
_MARK = "SLOTSTREAM_MALLOC_TUNED"
_LOOK_S = 5.0
_LOOKS = 2  # So often little is seen to move before memory is given back.
_LITTLE_BYTES = 16 << 20  # Between two looks. It pays with page faults for what is taken again.
_WORTH_BYTES = 32 << 20
_LOOKS_IN_USE = 6  # After memory was given back and it was less than that: what is there is in use.


def reexec_with_malloc_settings(*, enabled: bool = True) -> None:
    """Start this process over (same pid, same arguments) with SETTINGS, or return when there is nothing to do.

    Returns when `enabled` is false, without glibc, when the user set any malloc variable, and when it happened already.
    Call it first thing: what the process did before is lost.
    """
    if not enabled or platform.libc_ver()[0] != "glibc" or not sys.executable or not sys.orig_argv:
        return
    if _MARK in os.environ or "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    environment = {**os.environ, **SETTINGS, _MARK: "1"}  # The mark ends the loop even where a wrapper drops the settings.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


async def give_back_when_idle(
    moved_bytes: Callable[[], float], look_s: float = _LOOK_S, resident: Callable[[], int] = resident_bytes
) -> None:
    """Until it is cancelled. `moved_bytes`: of rows, in and out, so far. `resident`: memory that this process has."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # Not glibc.
        return
    least, before, looks, looks_min = resident(), moved_bytes(), 0, _LOOKS
    while True:
        await asyncio.sleep(look_s)
        had, now = resident(), moved_bytes()
        least = min(least, had)
        if now - before < _LITTLE_BYTES:
            looks += 1
        else:
            looks, looks_min = 0, _LOOKS
        before = now
        # Again and again: calls that nobody counts may fill memory too, and what they had is free only when they have ended.
        if looks >= looks_min and had - least >= _WORTH_BYTES:
            await asyncio.to_thread(trim, 0)  # Without the interpreter's lock. Who allocates meanwhile waits.
            given = had - resident()
            looks, looks_min = 0, _LOOKS if given >= _WORTH_BYTES else _LOOKS_IN_USE
            _log.debug("gave %d bytes back to the system", given)
