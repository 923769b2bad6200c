"""Objects, read as files are: what reads and verifies samples needs no more than a few operations of a disk."""

from __future__ import annotations

import errno
import itertools
import threading
from pathlib import Path

from slotstream.store.blobs.base import Blobs, OpenBlob
from slotstream.store.disk.files import Files
from slotstream.store.records import SampleKey, SampleRecord
from slotstream.wire.errors import BadNamespace, BadSampleId
from slotstream.wire.hashing import Buffer
from slotstream.wire.layout import FILE_SUFFIX


def object_key(key: SampleKey, attempt: str) -> str:
    """Of an attempt's object. None is ever used twice."""
    return f"{key.namespace}/{key.shard}/{key.sample_id}.{attempt}{FILE_SUFFIX}"


def object_path(record: SampleRecord) -> Path:
    """Of a committed sample's object, for `BlobFiles`."""
    return Path(object_key(record.key, record.attempt))


def attempt_of(name: str) -> tuple[SampleKey, str] | None:
    """The sample and the attempt of an object's key; None where it is none of ours."""
    parts = name.split("/")
    if len(parts) != 3 or not parts[2].endswith(FILE_SUFFIX):
        return None
    sample_id, dot, attempt = parts[2].removesuffix(FILE_SUFFIX).rpartition(".")
    try:
        key = SampleKey.checked(parts[0], sample_id)
    except (BadNamespace, BadSampleId):
        return None
    return (key, attempt) if dot and attempt and key.shard == parts[1] else None


class BlobFiles(Files):
    """The reading operations of `Files`, of objects: a path is an object's key. Thread safe. Raises OSError, and IoError."""

    def __init__(self, blobs: Blobs, *, all_of_it: bool = False) -> None:
        """`all_of_it`: most of what is opened is read to its end, and not its header alone."""
        self._blobs, self._all_of_it = blobs, all_of_it
        self._open: dict[int, OpenBlob] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # Guards both.

    def open_read(self, path: Path) -> int:
        blob = self._blobs.open(path.as_posix(), all_of_it=self._all_of_it)
        if blob is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", path.as_posix())
        with self._lock:
            number = next(self._numbers)
            self._open[number] = blob
        return number

    def close(self, fd: int) -> None:
        with self._lock:
            blob = self._open.pop(fd)
        blob.close()

    def pread(self, fd: int, nbytes: int, at: int) -> bytes:
        return self._open[fd].read(at, nbytes)

    def pread_view(self, fd: int, nbytes: int, at: int) -> Buffer:
        return self._open[fd].view(at, nbytes)

    def size(self, fd: int) -> int:
        return self._open[fd].nbytes

    def path_size(self, path: Path) -> int | None:
        """By a read: of a bucket that is gone, the store says only there that it is that, and not the object."""
        blob = self._blobs.open(path.as_posix())
        if blob is None:
            return None
        blob.close()
        return blob.nbytes

    def drop_cached(self, path: Path) -> None:
        """Nothing of it is here."""
