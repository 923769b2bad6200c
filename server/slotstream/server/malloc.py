"""glibc malloc settings for a process that moves megabyte messages.

By default each message of 128 KiB and more is mapped from the kernel and unmapped again, page faults included. Kept on
the heap instead, gRPC moves 1 MiB frames at 2.1 GB/s and not at 1.3 (2 cores). glibc reads these settings from the
environment before main(), so the process has to start over with them.
"""

from __future__ import annotations

import os
import platform
import sys

SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
_MARK = "SLOTSTREAM_MALLOC_TUNED"


def reexec_with_malloc_settings(*, enabled: bool = True) -> None:
    """Start this process over (same pid, same arguments) with SETTINGS, or return when there is nothing to do.

    Returns when `enabled` is false, without glibc, when the user set any malloc variable, and when it happened already.
    Call it first thing: whatever the process did before is lost.
    """
    if not enabled or platform.libc_ver()[0] != "glibc" or not sys.executable or not sys.orig_argv:
        return
    if _MARK in os.environ or "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    environment = {**os.environ, **SETTINGS, _MARK: "1"}  # The mark ends the loop even where a wrapper drops the settings.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
