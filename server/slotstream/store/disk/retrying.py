"""Reads that fail are tried again: a failing disk, a stale handle and a lack of memory say nothing about a file's bytes."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

PAUSES_S = (0.01, 0.1)  # Before the second attempt, and before the third, which is the last.
# What is at a path, and not how the disk does: nothing, a link, a directory, a device.
_FACTS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EISDIR})
# No file descriptor and no permission: both stay so for longer than anybody should wait.
_LASTING = frozenset({errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM})

_T = TypeVar("_T")


def is_fact(error: OSError) -> bool:
    """Whether the error says what is at the path. Any other says only that it could not be looked at."""
    return error.errno in _FACTS


def retried(read: Callable[[], _T]) -> _T:
    """What `read` returns, called up to three times. Raises the last OSError; at once where waiting cannot help."""
    for pause_s in PAUSES_S:
        try:
            return read()
        except OSError as error:
            if is_fact(error) or error.errno in _LASTING:
                raise
        time.sleep(pause_s)
    return read()
