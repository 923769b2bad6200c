"""Samples to store, disks that fail, and stores that crash."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slotstream.store.catalogue.base import scan
from slotstream.store.cluster.reading import object_path
from slotstream.store.cluster.store import ObjectStore
from slotstream.store.disk.files import Files
from slotstream.store.records import SampleKey, SampleSpec, State
from slotstream.store.sample.upload import Upload
from slotstream.store.samples import SampleStore
from slotstream.wire.columns import LateColumns, RowFormat
from slotstream.wire.hashing import Buffer, xxh3

CHUNK_ROWS = 3


@dataclass(frozen=True)
class Sample:
    """A sample whose content follows from `seed`. Rows of 2 layers x 8 F32 values: 64 bytes; hash groups of 4 rows."""

    sample_id: str = "s"
    rows: int = 10
    seed: int = 0
    namespace: str = "default"
    model: str = "m"
    exact: bool = True
    rows_max: int = 0
    tags: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    layer_ids: tuple[int, ...] = (3, 7)
    columns: dict[str, bytes] = field(default_factory=dict)

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.namespace, self.sample_id)

    @property
    def row_bytes(self) -> int:
        return 32 * len(self.layer_ids)

    @property
    def data(self) -> bytes:
        return random.Random(self.seed).randbytes(self.rows * self.row_bytes)

    @property
    def token_ids(self) -> list[int]:
        return [self.seed * 1000 + row for row in range(self.rows)]

    def spec(self) -> SampleSpec:
        return SampleSpec(
            self.namespace,
            self.sample_id,
            self.model,
            self.layer_ids,
            RowFormat.of("F32", len(self.layer_ids), 8, self.columns),
            self.rows_max or self.rows,
            self.exact,
            self.tags,
            self.metadata,
        )

    def chunks(self) -> list[tuple[int, int]]:
        return [(start, min(start + CHUNK_ROWS, self.rows)) for start in range(0, self.rows, CHUNK_ROWS)]

    def write(self, upload: Upload, start: int, stop: int) -> None:
        part = self.data[start * self.row_bytes : stop * self.row_bytes]
        upload.write_chunk(start, stop - start, part, xxh3(part))

    def send(self, store: SampleStore, chunks: Iterable[tuple[int, int]] | None = None) -> Upload:
        """An upload with all its rows written."""
        upload = store.open_upload(self.spec())
        for start, stop in self.chunks() if chunks is None else chunks:
            self.write(upload, start, stop)
        return upload

    def put(self, store: SampleStore, chunks: Iterable[tuple[int, int]] | None = None) -> bool:
        """Stores it; whether it was there before."""
        return self.send(store, chunks).commit(self.rows, self.token_ids, columns=LateColumns(self.columns))

    def path(self, store: SampleStore) -> Path:
        return self.key.path(store.data_dir)


def read_all(store: SampleStore, key: SampleKey) -> tuple[bytes, list[int]]:
    with store.reader(key) as reader:
        rows = reader.file.header.num_tokens
        data = b"".join(bytes(piece) for block in reader.blocks(0, rows) for piece in block.data)
        return data, list(reader.token_ids(0, rows))


class Crash(BaseException):
    """The process is gone: nothing runs after this, clean-ups included."""


class FaultyFiles(Files):
    """A disk on which the n-th call of an operation fails, with an errno or as a crash. Records the order of calls."""

    def __init__(self, **faults: tuple[int, int | type[Crash]]) -> None:
        """`faults`: operation -> (which call, counted from 1; 0 for every call, errno or Crash)."""
        self.faults = faults
        self.calls: list[str] = []
        self.crashed = False

    def _before(self, operation: str) -> None:
        if self.crashed:
            raise Crash
        self.calls.append(operation)
        at, what = self.faults.get(operation, (-1, 0))
        if at == 0 or self.calls.count(operation) == at:
            if isinstance(what, int):
                raise OSError(what, os.strerror(what))
            self.crashed = True
            raise Crash

    def create(self, path: Path) -> int:
        self._before("create")
        return super().create(path)

    def preallocate(self, fd: int, nbytes: int) -> bool:
        self._before("preallocate")
        return super().preallocate(fd, nbytes)

    def pwrite(self, fd: int, data: Buffer, at: int) -> None:
        self._before("pwrite")
        super().pwrite(fd, data, at)

    def pread(self, fd: int, nbytes: int, at: int) -> bytes:
        self._before("pread")
        return super().pread(fd, nbytes, at)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._before("truncate")
        super().truncate(fd, nbytes)

    def sync_data(self, fd: int) -> None:
        self._before("sync_data")
        super().sync_data(fd)

    def sync_dir(self, path: Path) -> None:
        self._before("sync_dir")
        super().sync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._before("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._before("unlink")
        super().unlink(path)


FULL = errno.ENOSPC
BROKEN = errno.EIO


def crash(store: SampleStore) -> None:
    """Ends a store as a killed process would: its lock and its threads are gone, its files stay as they are."""
    store._catalogue.close(clean=False)
    store._files.close(store._lock_fd)
    store._lock_fd = -1


def crash_server(store: ObjectStore) -> None:
    """The same of one of several: it renews, sweeps and removes nothing any more."""
    store._keeper.stop()
    store._cleaners.shutdown(cancel_futures=True)
    store._senders.shutdown(cancel_futures=True)
    store._catalogue.close()
    store._blobs.close()
    with suppress(OSError):
        store._files.close(store._lock_fd)


def crash_in(store: SampleStore, action: Callable[[], Any]) -> None:
    """Runs `action`, which crashes, and lets the store end there."""
    try:
        action()
    except Crash:
        crash(store)
        return
    raise AssertionError("it did not crash")


def tree(directory: Path) -> dict[str, int]:
    """Every file below a directory, with its size, but the store's own."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): path.stat().st_size
        for path in found
        if path.parent != directory or not path.name.startswith(("catalog.sqlite", ".lock"))
    }


def stored(store: SampleStore) -> dict[str, int]:
    """The files of a store's samples, with their sizes; of objects, those of committed samples, named as files would be."""
    if not isinstance(store, ObjectStore):
        return tree(store.data_dir)
    found = {}
    for record in scan(store._catalogue):
        if record.state is State.COMMITTED:
            there = store._blobs.checksum(object_path(record).as_posix())
            assert there is not None, f"the object of {record.key} is gone"
            found[str(record.key.path(Path()))] = there.nbytes
    return found
