"""Where damaged files go: out of the way, never served, never deleted by us.

A sample's file becomes `DIR/.quarantine/<namespace>/<sample_id>.<committed_unix_ns>.safetensors`. A person may still save rows
from such a file, delete it, or restore it (`restoring`); the id is free for another upload of the sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from slotstream.store.disk.directory import OpenedDirectory
from slotstream.store.disk.files import Files
from slotstream.store.records import SampleKey, SampleRecord
from slotstream.wire.errors import BadNamespace, BadSampleId
from slotstream.wire.layout import FILE_SUFFIX

QUARANTINE_NAME = ".quarantine"
_LOOKED_AT_MAX = 100_000


class Quarantine:
    """The quarantine of one data directory. Raises OSError."""

    def __init__(self, files: Files, data_dir: Path, opened: OpenedDirectory) -> None:
        self._files = files
        self._data_dir = data_dir
        self._opened = opened

    def take(self, record: SampleRecord) -> str:
        """Move the sample's file here, durably; its new path below the data directory. Raises FileNotFoundError, StoreGone."""
        self._opened.check()
        directory = self._data_dir / QUARANTINE_NAME / record.namespace
        for path in (directory.parent, directory):
            self._files.make_dir(path)
            self._files.sync_dir(path.parent)
        source = record.key.path(self._data_dir)
        target = directory / f"{record.sample_id}.{record.committed_unix_ns}{FILE_SUFFIX}"
        self._files.rename(source, target)
        self._files.sync_dir(directory)
        self._files.sync_dir(source.parent)
        return str(target.relative_to(self._data_dir))

    def held(self, namespace: str = "") -> Iterator[tuple[SampleKey, int, Path]]:
        """The files (of one namespace): of which sample, when that was committed, and where. Skips names that are not ours."""
        for space in self._files.walk(self._data_dir / QUARANTINE_NAME):
            if namespace and space.name != namespace:
                continue
            for entry in self._files.walk(Path(space.path)):
                sample_id, dot, stamp = entry.name.removesuffix(FILE_SUFFIX).rpartition(".")
                if not (entry.name.endswith(FILE_SUFFIX) and dot and stamp.isascii() and stamp.isdigit()):
                    continue
                with suppress(BadNamespace, BadSampleId):
                    yield SampleKey.checked(space.name, sample_id), int(stamp), Path(entry.path)

    def totals(self) -> tuple[int, int]:
        """Files here and their bytes; counts no further than a hundred thousand of them."""
        count = nbytes = 0
        for space in self._files.walk(self._data_dir / QUARANTINE_NAME):
            for entry in self._files.walk(Path(space.path)):
                with suppress(FileNotFoundError):
                    nbytes += entry.stat(follow_symlinks=False).st_size
                    count += 1
                if count >= _LOOKED_AT_MAX:
                    return count, nbytes
        return count, nbytes


def holds(files: Files, data_dir: Path, key: SampleKey, committed_unix_ns: int) -> bool:
    """Whether the quarantine has the file that was committed under `key` at that time."""
    path = data_dir / QUARANTINE_NAME / key.namespace / f"{key.sample_id}.{committed_unix_ns}{FILE_SUFFIX}"
    return files.path_size(path) is not None
