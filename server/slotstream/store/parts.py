"""What the parts of one store share, in one object: a seventh thing is one line here."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from slotstream.store.catalogue.base import Catalogue
from slotstream.store.disk.clock import Clock
from slotstream.store.disk.directory import OpenedDirectory
from slotstream.store.disk.files import Files
from slotstream.store.records import SampleKey

_STRIPES = 256  # Striped, so that the locks do not grow with the ids.


def _locks() -> tuple[threading.Lock, ...]:
    return tuple(threading.Lock() for _ in range(_STRIPES))


@dataclass(frozen=True, slots=True)
class StoreParts:
    """Made once, when the store opens."""

    data_dir: Path
    files: Files
    opened: OpenedDirectory  # `opened.check()` says whether `data_dir` is still the one that was opened.
    catalogue: Catalogue
    clock: Clock
    free_bytes_min: int  # Bytes of disk that uploads leave free.
    _id_locks: tuple[threading.Lock, ...] = field(default_factory=_locks, init=False, repr=False)

    def id_lock(self, key: SampleKey) -> AbstractContextManager[object]:
        """Held by the one thread that publishes, deletes or restores `key`."""
        return self._id_locks[hash(key) % _STRIPES]
