"""What each process of the GPU benchmark computes during a load, by /proc: vLLM's, the sender's, the server's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from children import family, tasks

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LEAST = 0.05  # Cores; a process that computes less is left out.


@dataclass(frozen=True, slots=True)
class _Thread:
    """CPU seconds so far."""

    user: float
    system: float


def _name(pid: int) -> str:
    """What it is, by its command line: `slotstream serve`, a sender, vLLM's own title, or the script's name."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    text = " ".join(words)
    for part, name in (("slotstream.cli.main", "server"), ("gpu_engine.py", "vLLM's front end"), ("EngineCore", "EngineCore")):
        if part in text:
            return name
    return words[0] if words[0].startswith("VLLM::") else _python_name(words)


def _python_name(words: list[str]) -> str:
    """The module or code that Python runs."""
    for option in ("-m", "-c"):
        if option in words:
            return words[words.index(option) + 1][:40]
    return words[0][:40]


def _threads(pid: int) -> dict[tuple[int, int], _Thread]:
    """(process, thread) -> its times, of every process below `pid`."""
    found = {}
    for process in family(pid)[1:]:
        for task in tasks(process):
            try:
                fields = (task / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[process, int(task.name)] = _Thread(int(fields[11]) / _TICKS_PER_S, int(fields[12]) / _TICKS_PER_S)
    return found


@contextmanager
def watched_processes() -> Iterator[list[dict[str, Any]]]:
    """A list that is filled in at the end: for each process below this one its name and the cores that it kept busy.

    `user` and `system` count all its threads; `busiest` is the one thread that computed most, and 1 is all that one can do.
    """
    found: list[dict[str, Any]] = []
    before, began = _threads(os.getpid()), time.monotonic()
    yield found
    took = time.monotonic() - began
    by_process: dict[int, list[_Thread]] = {}
    nothing = _Thread(0.0, 0.0)
    for key, now in _threads(os.getpid()).items():
        then = before.get(key, nothing)
        by_process.setdefault(key[0], []).append(_Thread((now.user - then.user) / took, (now.system - then.system) / took))
    for process, threads in by_process.items():
        user, system = sum(one.user for one in threads), sum(one.system for one in threads)
        if user + system >= _LEAST:
            busiest = max(one.user + one.system for one in threads)
            try:
                name = _name(process)
            except OSError:
                continue
            found.append({"process": name, "user": user, "system": system, "busiest": busiest, "threads": len(threads)})
    found.sort(key=lambda one: -float(one["user"] + one["system"]))


def report_processes(title: str, row: str, found: list[dict[str, Any]]) -> str:
    """The table of `watched_processes`."""
    lines = [f"processes, {title}, {row}", f"{'':42}{'cores':>8}{'in the kernel':>16}{'busiest thread':>16}"]
    for one in found:
        cores = one["user"] + one["system"]
        lines.append(f"{one['process']:42}{cores:>8.2f}{one['system']:>16.2f}{one['busiest']:>16.2f}")
    return "\n".join(lines)
