"""Engines that are compared with each other compute with the same threads.

vLLM's CPU build splits a sum by its number of threads, and so rounds otherwise with another number; left to itself it binds
fewer threads where a KV connector is configured (docs/requests.md). SLOTSTREAM_TEST_THREADS is how many the tests bind.
"""

from __future__ import annotations

import os


def threads() -> int:
    """How many threads each engine has."""
    return int(os.environ.get("SLOTSTREAM_TEST_THREADS", "1"))


def same_threads() -> dict[str, str]:
    """What both engines have in their environment, served or offline: so many of this process's cores, one unless told."""
    count = threads()
    cores = sorted(os.sched_getaffinity(0))[:count]
    assert len(cores) == count, f"{count} threads cannot be bound to {len(cores)} cores"
    # Offline there is no worker of its own that vLLM would bind: OpenMP itself is told.
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "OMP_NUM_THREADS": str(count)}
