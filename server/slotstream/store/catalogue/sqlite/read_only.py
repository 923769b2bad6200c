"""The catalogue of a directory that may be in use, read without creating or changing any file there."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slotstream.store.catalogue.base import CatalogueUnreadable
from slotstream.store.catalogue.queries import Candidate, Queue, Standing, Usage
from slotstream.store.catalogue.sqlite import retention_sql, sql
from slotstream.store.catalogue.sqlite.salvage import give_sums
from slotstream.store.records import SampleKey, SampleRecord

_T = TypeVar("_T")


class ReadOnlyCatalogue:
    """Answers `Questions`, for one thread. Everything raises CatalogueUnreadable."""

    def __init__(self, path: Path, now: Callable[[], int] = time.time_ns) -> None:
        """`now`: the wall clock, Unix nanoseconds. Raises OSError, too."""
        self._now = now
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        log, shared = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
        mode = "mode=ro"
        if log.exists() and not shared.exists():
            # A backup, or a mount that lost it: SQLite would have to create the log's shared memory, so let it do that
            # in a copy.
            self._copy = tempfile.TemporaryDirectory(prefix="slotstream-verify-")
            for source in (path, log):
                shutil.copy(source, self._copy.name)
            path = Path(self._copy.name) / path.name
            mode = "mode=rw"
        elif not log.exists():
            mode = "mode=ro&immutable=1"  # Shut down cleanly: without this, SQLite would create a log.
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None)
            give_sums(self._db)
            self._db.execute("SELECT 1 FROM samples LIMIT 1")
        except sqlite3.Error as error:
            raise CatalogueUnreadable(str(error)) from error

    def _ask(self, question: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return question(self._db)
        except sqlite3.Error as error:
            raise CatalogueUnreadable(str(error)) from error

    def get(self, key: SampleKey) -> SampleRecord | None:
        return self._ask(lambda db: sql.get(db, key.namespace, key.sample_id))

    def scan_page(self, after: int, limit: int, namespace: str = "") -> list[tuple[int, SampleRecord]]:
        return self._ask(lambda db: sql.scan(db, after, limit, namespace))

    def candidates(self, queue: Queue, namespace: str, after: tuple[int, int], limit: int) -> list[Candidate]:
        return self._ask(lambda db: retention_sql.candidates(db, queue, namespace, after, limit))

    def committed_until(self, namespace: str, until_unix_ns: int) -> int:
        return self._ask(lambda db: retention_sql.committed_until(db, namespace, until_unix_ns))

    def usage(self, namespace: str) -> Usage:
        return self._ask(lambda db: retention_sql.usage(db, namespace))

    def usages(self, after: str, limit: int) -> list[Usage]:
        return self._ask(lambda db: retention_sql.usages(db, after, limit))

    def standing(self, key: SampleKey) -> Standing:
        return self._ask(lambda db: retention_sql.standing(db, key, self._now()))

    def is_held(self, key: SampleKey) -> bool:
        """Readers are known to the server alone."""
        return False

    def get_meta(self, name: str) -> str | None:
        return self._ask(lambda db: retention_sql.get_meta(db, name))

    def latest_stamp(self) -> int:
        """The latest time that any row was created or committed at, Unix nanoseconds; 0 when there is none."""
        return self._ask(retention_sql.latest_stamp)

    def close(self) -> None:
        self._db.close()
        if self._copy is not None:
            self._copy.cleanup()
