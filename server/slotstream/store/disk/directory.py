"""Whether the data directory is still the one that was opened, and which directories in it are durable.

A disk can be unmounted, or another mounted, under a server. The descriptors of a lost directory go on working, so without
asking, samples would be committed into a place that nobody finds again. The lock file is the mark: it has to be, at its path,
the very file whose lock this process holds.
"""

from __future__ import annotations

import threading
from pathlib import Path

from slotstream.store.disk.files import Files, store_error
from slotstream.wire.errors import StoreGone

LOCK_NAME = ".lock"
CATALOGUE_NAME = "catalog.sqlite"
_DURABLE_MAX = 4096  # Directories known to be durable; forgetting them costs a sync each.


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


class DurableDirectories:
    """Makes the directories that files are put into. Thread safe."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._durable: set[Path] = set()
        self._lock = threading.Lock()

    def make(self, directory: Path) -> None:
        """Make `directory` and its parent, durably, unless they are there. Raises StoreFull, IoError and InternalFault."""
        with self._lock:
            # A directory that exists may not be durable yet: its maker may have died before its sync.
            for path in (directory.parent, directory):
                try:
                    if path in self._durable and self._files.path_size(path) is not None:
                        continue
                    self._files.make_dir(path)
                    self._files.sync_dir(path.parent)
                except OSError as error:
                    raise store_error(error, f"creating the directory {path}") from error
                if len(self._durable) >= _DURABLE_MAX:
                    self._durable.clear()
                self._durable.add(path)
