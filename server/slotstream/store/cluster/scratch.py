"""The scratch directory of one server, where samples land on their way to their objects. Nothing in it has to survive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from slotstream.store.disk.files import Files
from slotstream.store.records import PARTIAL_SUFFIX


class ScratchFiles(Files):
    """A disk of which nothing has to survive: it waits for no sync."""

    def sync_data(self, fd: int) -> None:
        pass

    def sync_dir(self, path: Path) -> None:
        pass


def empty(files: Files, directory: Path) -> int:
    """Remove what the last server left there: scratch files of samples, and nothing else. How many. Raises OSError."""
    removed = 0
    for entry in _scratch(files, directory):
        files.unlink(Path(entry.path))
        removed += 1
    return removed


def nbytes(files: Files, directory: Path) -> int:
    """Of all scratch files there are now. Raises OSError."""
    total = 0
    for entry in _scratch(files, directory):
        with suppress(FileNotFoundError):
            total += entry.stat(follow_symlinks=False).st_size
    return total


def _scratch(files: Files, directory: Path) -> Iterator[os.DirEntry[str]]:
    for space in list(files.walk(directory)):
        for shard in list(files.walk(Path(space.path))) if space.is_dir(follow_symlinks=False) else ():
            for entry in list(files.walk(Path(shard.path))) if shard.is_dir(follow_symlinks=False) else ():
                if entry.name.endswith(PARTIAL_SUFFIX):
                    yield entry
