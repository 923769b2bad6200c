"""Processes that a process started, directly or not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def descendants(pid: int, command_part: str) -> list[int]:
    """Those that live and whose command line contains `command_part`."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):  # A thread, or a process, that ended meanwhile.
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += descendants(child, command_part)
                if command_part.encode() in Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" "):
                    found.append(child)
    return found
