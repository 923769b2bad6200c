"""What a benchmark ran on, and what it says meanwhile."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def progress(text: str) -> None:
    """To stderr, without a newline: stdout is for the results."""
    print(text, end="", file=sys.stderr, flush=True)


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`."""
    mounts = (line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines())
    holding = [(len(where), kind) for where, kind in mounts if path.is_relative_to(where)]
    return max(holding, default=(0, "unknown"))[1]


def plain(options: argparse.Namespace) -> dict[str, Any]:
    """A benchmark's options, as JSON can hold them."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}


def cpu_use() -> dict[str, float]:
    """CPU seconds of the whole machine so far: user, system, idle, and `steal`, which its host gave to others."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
    user, nice, system, idle, waiting, irq, softirq, steal = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
    return {"user": user + nice, "system": system + irq + softirq, "idle": idle + waiting, "steal": steal}


def quietest_core(cores: Iterable[int]) -> int:
    """Of these cores, the one that runs Python fastest now.

    Where a host's cores are shared with others, the same work may take twice as long on the one next to it.
    """
    allowed = os.sched_getaffinity(0)
    try:
        return min(sorted(cores), key=_loop_ms)
    finally:
        os.sched_setaffinity(0, allowed)


def of_same_core(core: int) -> set[int]:
    """`core` and the other hardware threads of it, as far as the system tells: they share its units and its cache."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return {core}
    found = {core}
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _loop_ms(core: int) -> float:
    os.sched_setaffinity(0, {core})
    took = []
    for _ in range(3):
        began = time.perf_counter()
        sum(number * number for number in range(20_000))
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e3


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": cpu,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "python": platform.python_version(),
        "grpcio": version("grpcio"),
        "slotstream": version("slotstream"),
        "load_average": os.getloadavg()[0],
    }
