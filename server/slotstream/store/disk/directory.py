"""Is the directory at the path still the one that was opened? A disk can be unmounted, or another mounted, under a server.

The descriptors of a lost directory go on working, so without asking, samples would be committed into a place that nobody
finds again. The lock file is the mark: it has to be, at its path, the very file whose lock this process holds.
"""

from __future__ import annotations

from pathlib import Path

from slotstream.store.disk.files import Files, store_error
from slotstream.wire.errors import StoreGone

LOCK_NAME = ".lock"


class OpenedDirectory:
    """The data directory as it was opened."""

    def __init__(self, files: Files, path: Path, lock_fd: int) -> None:
        """Raises OSError."""
        self._files = files
        self._path = path
        self._identity = files.identity(lock_fd)

    def check(self) -> None:
        """Raises StoreGone when another directory, or none, is at the path now."""
        try:
            found = self._files.path_identity(self._path / LOCK_NAME)
        except OSError as error:
            raise StoreGone(str(store_error(error, f"looking at the data directory {self._path}"))) from error
        if found != self._identity:
            raise StoreGone(f"the data directory {self._path} is not the one that was opened: unmounted, moved or replaced")
