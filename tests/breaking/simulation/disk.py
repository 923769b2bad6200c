"""The disk: a directory of tmpfs behind `PowerFiles`, which knows what is durable. Operations take simulated time, fail while
the nemesis says so, and do nothing for a process that was killed. SQLite's statements go the same way.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from simulation.scheduler import Killed, SimThread, running
from store.power import PowerFiles, cut_log

from slotstream.wire.hashing import Buffer

PLENTY = 1 << 40  # Free bytes.
_CATALOGUE = ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite.seal")


@dataclass(frozen=True)
class Trouble:
    """What goes wrong for a while: of these operations, so many in a hundred fail with one of these errors."""

    operations: frozenset[str]
    errors: tuple[int, ...]
    percent: int

    def __str__(self) -> str:
        names = "/".join(errno.errorcode[error] for error in self.errors)
        return f"{self.percent}% of {', '.join(sorted(self.operations))}: {names}"


class SimFiles(PowerFiles):
    """The disk of a seed, through all its servers, until the power is cut."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.root = root
        self.trouble: Trouble | None = None
        self.free = PLENTY
        self.away = False  # Another directory is at the path.
        self.slow = 1.0
        self.fds: set[int] = set()  # Open ones of the process that serves.
        self.connections: list[SimConnection] = []
        self.log_synced = 0  # Bytes of the catalogue's log that survive.
        self._countdown: tuple[int, SimThread] | None = None

    def confine(self, root: Path) -> None:
        """Nobody puts links there, and the way past them costs more than all else."""

    # What every operation meets.

    def _before(self, operation: str) -> None:
        self.take_time(operation)
        if self.fails(operation):
            error = running().rng.choice(self.trouble.errors)  # type: ignore[union-attr]
            running().note(f"disk {operation} fails: {errno.errorcode[error]}")
            raise OSError(error, os.strerror(error))

    def take_time(self, operation: str) -> None:
        scheduler = running()
        if self._countdown is not None:
            left, thread = self._countdown
            self._countdown = (left - 1, thread) if left else None
            if not left:
                scheduler.note(f"about to {operation}")
                scheduler.wake(thread)
        chance = scheduler.rng.random()
        if chance < 0.6:
            scheduler.pause()
        else:
            scheduler.pause(self.slow * (0.03 if chance > 0.97 else 0.001) * scheduler.rng.random())
        scheduler.note(f"disk {operation}")

    def fails(self, operation: str) -> bool:
        trouble = self.trouble
        return trouble is not None and operation in trouble.operations and running().rng.random() * 100 < trouble.percent

    def wake_before(self, operations: int, thread: SimThread) -> None:
        """Wake `thread` when so many operations have begun from now."""
        self._countdown = (operations, thread)

    # Descriptors.

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self.fds.add(fd)
        return fd

    def open_read(self, path: Path) -> int:
        self._before("open_read")
        fd = super().open_read(path)
        self.fds.add(fd)
        return fd

    def lock(self, path: Path) -> int:
        fd = super().lock(path)
        self.fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        if running().current.process.dead:
            raise Killed
        self.fds.discard(fd)
        super().close(fd)

    # What `FaultyFiles` leaves as it is.

    def pwrite(self, fd: int, data: Buffer, at: int) -> None:
        if self.fails("pwrite") and len(data) > 1:
            super().pwrite(fd, memoryview(data)[: running().rng.randrange(1, len(data))], at)  # Some of it gets there.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().pwrite(fd, data, at)

    def make_dir(self, path: Path) -> None:
        self._before("make_dir")
        super().make_dir(path)

    def path_size(self, path: Path) -> int | None:
        self._before("path_size")
        return super().path_size(path)

    def path_identity(self, path: Path) -> tuple[int, int] | None:
        running().maybe_pause()
        return (0, 0) if self.away else super().path_identity(path)

    def free_bytes(self, path: Path) -> int:
        running().maybe_pause()
        return self.free

    def walk(self, path: Path) -> Iterator[os.DirEntry[str]]:
        self._before("walk")
        return iter(sorted(super().walk(path), key=lambda entry: entry.name))

    def drop_cached(self, path: Path) -> None:
        return

    # The ends of a process.

    def kill(self, end: Callable[[], None]) -> None:
        """`end` kills every thread of the process; its files stay as they are."""
        kept = {name: (self.root / name).read_bytes() for name in _CATALOGUE if (self.root / name).exists()}
        end()
        self._hang_up()
        for name in _CATALOGUE:  # SQLite tidied up when its connections were closed, which a process that dies does not.
            (self.root / name).unlink(missing_ok=True)
            if name in kept:
                (self.root / name).write_bytes(kept[name])

    def cut_power(self, end: Callable[[], None], after: Path) -> SimFiles:
        """`end` kills every thread of the process; `after` becomes what is there when the power is back. That disk."""
        rng = running().rng
        self.lose_power(after, rng)
        catalogue = rng.choice(("kept", "cut", "cut", "lost"))
        running().note(f"the catalogue is {catalogue}")
        if catalogue != "lost":
            log = self.root / "catalog.sqlite-wal"
            size = log.stat().st_size if log.exists() else 0
            cut_log(self.root, after, size if catalogue == "kept" else min(size, self.log_synced), rng)
        end()
        self._hang_up()
        shutil.rmtree(self.root)
        found = SimFiles(after)
        found.trouble, found.free, found.away, found.slow = self.trouble, self.free, self.away, self.slow
        return found

    def _hang_up(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self._open.clear()
        for connection in self.connections:
            with suppress(sqlite3.Error):
                connection.close()
        self.connections.clear()
        self._countdown = None


class SimConnection(sqlite3.Connection):
    """SQLite itself is real. Its transactions take time and may fail as the disk does."""

    disk: SimFiles
    _is_full = False

    @classmethod
    def connect(cls, path: Path, **options: Any) -> Self:
        running().maybe_pause()
        connection: Self = sqlite3.connect(path, factory=cls, **options)
        cls.disk.connections.append(connection)
        return connection

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        is_end = sql == "COMMIT"
        if is_end or sql.startswith(("BEGIN", "SELECT")):
            if is_end:
                self.disk.take_time("catalogue")
            else:
                running().maybe_pause()
            if self.disk.fails("catalogue"):
                self._fail(is_read=sql.startswith("SELECT"))
        cursor = super().execute(sql, parameters)
        if sql.startswith("PRAGMA synchronous"):
            self._is_full = sql.endswith("FULL")
        elif self._is_full and not self.in_transaction:
            log = self.disk.root / "catalog.sqlite-wal"
            self.disk.log_synced = log.stat().st_size if log.exists() else 0
        return cursor

    def _fail(self, *, is_read: bool) -> None:
        code = sqlite3.SQLITE_IOERR if is_read else running().rng.choice((sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR))
        running().note(f"the catalogue fails: {code}")
        error = sqlite3.OperationalError("the simulated disk fails")
        error.sqlite_errorcode = code
        raise error
