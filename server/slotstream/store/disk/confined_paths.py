"""Paths below one directory, reached without following a symbolic link anywhere below it.

O_NOFOLLOW alone looks at a path's last name: a namespace's directory that somebody replaced by a link would still lead
elsewhere. So each directory on the way is opened by itself, and the last name is used relative to it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class ConfinedPaths:
    """The directory tree at `root`. `root` itself may be a link: the operator who named it may choose where it is."""

    def __init__(self, root: Path | None = None) -> None:
        """Without a root, paths are taken as they are."""
        self._root = None if root is None else os.fspath(root)

    @contextmanager
    def at(self, path: Path) -> Iterator[tuple[str, int | None]]:
        """(name, directory descriptor) to reach `path` by, while the block runs.

        Raises FileNotFoundError when a directory on the way is missing, and NotADirectoryError when it is a link or a file.
        """
        text = os.fspath(path)  # Text, not a Path's methods: this is done several times a sample.
        if self._root is None or text == self._root:
            yield text, None
            return
        outside, _, below = text.partition(self._root + "/")
        *way, name = below.split("/")
        if outside or not name or ".." in way or name == "..":
            raise OSError(errno.EINVAL, "the path leaves its directory", text)
        fd = os.open(self._root, _DIRECTORY)
        try:
            for step in way:
                next_fd = os.open(step, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = next_fd
            yield name, fd
        finally:
            os.close(fd)
