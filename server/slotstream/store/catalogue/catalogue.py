"""The catalogue: a SQLite index of the sample files. It can be lost: recovery rebuilds it from them.

One thread writes. Whatever was asked of it while it was busy becomes its next transaction, so many commits share one.
`synchronous=NORMAL`: a power cut may lose the last rows and never the database; the files they index are durable before.
Only what no file can tell is synced (`durable=True`): that a sample is to be deleted, or is out of service.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from slotstream.store.catalogue import retention_sql, sql
from slotstream.store.catalogue.sql import ListQuery
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.wire.errors import ConfigError, InternalFault, SlotStreamError, StoreFull

FILE_NAME = "catalog.sqlite"
_log = logging.getLogger(__name__)
_BATCH_MAX = 256  # Operations in one transaction.
_LINGER_S = 0.05  # How long a change that nobody waits for may wait for others: a transaction costs as much for one as for ten.
_READERS = 4
_BUSY_TIMEOUT_S = 10.0  # A person's `sqlite3` shell may hold the write lock for a moment.
_MESSAGE_CHARS_MAX = 1024
# Damage of the file itself, as opposed to a full disk or a lock.
_CORRUPT_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# What a database can raise: the sqlite3 module cannot decode a message that quotes a damaged schema.
_ERRORS = (sqlite3.Error, UnicodeDecodeError)

_TABLES = {
    1: {"samples", "tags", "totals", "meta"},
    2: {"samples", "tags", "totals", "meta", "namespaces", "leases"},
}

_T = TypeVar("_T")
_Operation = Callable[[sqlite3.Connection], object]
_Entry = tuple[_Operation, "Future[object]", bool]  # The last: whether it has to survive a power cut.


class CatalogueCorrupt(Exception):
    """The file is not a sound catalogue: it has to be rebuilt. Seen only while opening."""


class CatalogueDamaged(InternalFault):
    """Damage that only came to light when its rows were read. While opening it means: rebuild."""


def catalogue_error(error: Exception) -> SlotStreamError:
    """The expected failure that `error` is: StoreFull where the disk is full, CatalogueDamaged, else InternalFault."""
    code = getattr(error, "sqlite_errorcode", 0)
    if isinstance(error, sql.MalformedRow) or is_corrupt(error):
        return CatalogueDamaged(f"the catalogue failed: {error}")
    if code & 0xFF == sqlite3.SQLITE_FULL:  # The low byte is the kind of error, the rest its detail.
        return StoreFull("the disk is full: the catalogue cannot be written")
    return InternalFault(f"the catalogue failed: {error}")


def is_corrupt(error: Exception) -> bool:
    return isinstance(error, UnicodeDecodeError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT_CODES


class Catalogue:
    """Samples by name, state, tags and time. Thread safe. Raises StoreFull and InternalFault unless it says more."""

    def __init__(self, path: Path) -> None:
        """Open or create the database. Raises CatalogueCorrupt and ConfigError."""
        self.path = path
        self._readers: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        with ExitStack() as opened, _opening(path):
            self._writer_db = _connect(path, opened)
            _prepare(self._writer_db, path)
            self.was_shut_down_cleanly = _begin_unclean(self._writer_db)
            for _ in range(_READERS):
                self._readers.put(_connect_reader(path, opened))
            opened.pop_all()
        self._operations: deque[_Entry] = deque()
        self._asked = threading.Condition()  # Guards the three around it.
        self._urgent = False  # Somebody waits for one of the operations.
        self._closed = False
        self._thread = threading.Thread(target=self._write_forever, name="catalogue", daemon=True)
        self._thread.start()

    def close(self, *, clean: bool = True) -> None:
        """Write what was asked so far and close. `clean` lets the next start skip its scan."""
        if self._closed:
            return
        if clean:
            with suppress(SlotStreamError):
                self.submit(_mark_clean).result()
        with self._asked:
            self._closed = True
            self._asked.notify()
        self._thread.join()
        for _ in range(_READERS):
            self._readers.get().close()
        self._writer_db.close()

    @property
    def writer(self) -> threading.Thread:
        """The thread that writes; it ends when the catalogue is closed."""
        return self._thread

    # Writing. Each method returns at once; the future is done when the change is committed.

    def submit(
        self, operation: Callable[[sqlite3.Connection], _T], *, urgent: bool = True, durable: bool = False
    ) -> Future[_T]:
        """Run `operation` in the writer's next transaction; one that is not `urgent` may wait for others a little.

        Operations run in the order they were asked for. One may run twice, so it must not act outside the database.
        One that raises undoes the whole transaction, and the others in it begin again: what is to be expected is returned.
        `durable`: the future is done once the change, with all before it, survives a power cut.
        """
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # It cannot be cancelled: the change may be on disk already.
        with self._asked:
            if self._closed:
                future.set_exception(InternalFault("the catalogue is closed"))
                return future
            first = not self._operations
            self._operations.append((operation, future, durable))  # type: ignore[arg-type]  # Future is invariant.
            if first or (urgent and not self._urgent):
                self._asked.notify()
            self._urgent = self._urgent or urgent
        return future

    def put_arriving(self, record: SampleRecord) -> Future[bool]:
        """Show `record` as arriving. A committed row of that name stays, and so does one that is arriving: False."""

        def operation(db: sqlite3.Connection) -> bool:
            before = sql.get(db, record.namespace, record.sample_id)
            if before is not None and before.state is not State.FAILED:
                return False
            sql.put(db, record)
            return True

        return self.submit(operation, urgent=False)

    def put_committed(self, record: SampleRecord) -> Future[None]:
        """Show `record` as committed, whatever was there. Its file is durable already."""
        return self.submit(lambda db: sql.put(db, record))

    def put_failed(self, record: SampleRecord, code: str, message: str) -> Future[bool]:
        """Show `record` as failed, keeping what a row of that name says. A committed row is never downgraded: False."""

        def operation(db: sqlite3.Connection) -> bool:
            before = sql.get(db, record.namespace, record.sample_id)
            if before is not None and before.state not in (State.ARRIVING, State.FAILED):
                return False
            base = before if before is not None and before.state is State.ARRIVING else record
            sql.put(db, _failed(base, code, message))
            return True

        return self.submit(operation)

    def put_damaged(self, record: SampleRecord, message: str) -> Future[None]:
        """Show a committed sample as failed because its file is damaged or gone.

        Durable: another upload may take the sample's place, and its file must not be found beside the old one's row.
        """
        return self.submit(lambda db: sql.put(db, _failed(record, "DAMAGED", message)), durable=True)

    def drop_deleting(self, keys: Sequence[SampleKey]) -> Future[None]:
        """Forget samples whose deletion is finished; one that was committed anew meanwhile stays."""
        return self.submit(lambda db: retention_sql.drop_deleting(db, keys))

    def _write_forever(self) -> None:
        while batch := self._next_batch():
            if not self._write_batch(batch):
                # One of them cannot be done: each on its own, so that it alone fails.
                for one in batch:
                    self._write_batch([one])

    def _next_batch(self) -> list[_Entry]:
        """What to do next, once there is something; nothing when all is done and the catalogue is closed."""
        with self._asked:
            self._asked.wait_for(lambda: self._operations or self._closed)
            self._asked.wait_for(lambda: self._urgent or self._closed or len(self._operations) >= _BATCH_MAX, _LINGER_S)
            batch = [self._operations.popleft() for _ in range(min(len(self._operations), _BATCH_MAX))]
            self._urgent = self._urgent and bool(self._operations)
            return batch

    def _write_batch(self, batch: list[_Entry]) -> bool:
        """One transaction. False when it failed and holds more than one operation; a single one gets its error."""
        db = self._writer_db
        durable = any(entry[2] for entry in batch)
        try:
            if durable:
                db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            results = [operation(db) for operation, _, _ in batch]
            db.execute("COMMIT")
        except Exception as error:
            with suppress(sqlite3.Error):
                if db.in_transaction:
                    db.execute("ROLLBACK")
            if len(batch) > 1:
                return False
            batch[0][1].set_exception(catalogue_error(error) if isinstance(error, _ERRORS) else error)
            return True
        finally:
            if durable:
                with suppress(sqlite3.Error):
                    db.execute("PRAGMA synchronous = NORMAL")
        for (_, future, _), result in zip(batch, results, strict=True):
            future.set_result(result)
        return True

    # Reading.

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        db = self._readers.get()
        try:
            yield db
        except _ERRORS as error:
            raise catalogue_error(error) from error
        finally:
            self._readers.put(db)

    def get(self, key: SampleKey) -> SampleRecord | None:
        with self._reader() as db:
            return sql.get(db, key.namespace, key.sample_id)

    def list_page(self, query: ListQuery) -> tuple[list[SampleRecord], str]:
        """One page, newest first, and the next page's token ("" on the last). Raises BadPage."""
        with self._asked:
            lingering = bool(self._operations)
        if lingering:  # Who lists sees what was opened before.
            self.submit(lambda db: None).result()
        with self._reader() as db:
            return sql.list_page(db, query)

    def scan(self, namespace: str = "") -> Iterator[SampleRecord]:
        """Every row (of one namespace), in the order they were first seen; rows that come and go meanwhile may be missed."""
        after = 0
        while True:
            with self._reader() as db:
                page = sql.scan(db, after, _BATCH_MAX, namespace)
            if not page:
                return
            after = page[-1][0]
            for _, record in page:
                yield record

    def scan_page(self, after: int, limit: int) -> list[tuple[int, SampleRecord]]:
        """Up to `limit` rows with their numbers, those numbered above `after`, in the order they were first seen."""
        with self._reader() as db:
            return sql.scan(db, after, limit)

    def unfinished(self) -> list[SampleRecord]:
        """Rows that are neither committed nor failed: few, whatever the size of the table."""
        with self._reader() as db:
            return sql.unfinished(db)

    def ask(self, question: Callable[[sqlite3.Connection], _T]) -> _T:
        """The answer of a query that changes nothing."""
        with self._reader() as db:
            return question(db)

    def totals(self) -> dict[State, tuple[int, int]]:
        """State -> (samples, bytes)."""
        with self._reader() as db:
            return sql.totals(db)


def _failed(record: SampleRecord, code: str, message: str) -> SampleRecord:
    text = message[:_MESSAGE_CHARS_MAX]
    return replace(record, state=State.FAILED, file_bytes=0, committed_unix_ns=0, error_code=code, error_message=text)


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """What the database raises meanwhile, as CatalogueCorrupt or ConfigError."""
    try:
        yield
    except _ERRORS as error:
        if is_corrupt(error):
            raise CatalogueCorrupt(str(error)) from error
        raise ConfigError(f"cannot open the catalogue {path}: {error}") from error


def _connect(path: Path, opened: ExitStack) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    opened.callback(db.close)
    return db


def _connect_reader(path: Path, opened: ExitStack) -> sqlite3.Connection:
    db = _connect(path, opened)
    db.execute("PRAGMA query_only = ON")
    # SQLite opens the log with the first query, by its path: at a time when the path is still this directory's.
    db.execute("SELECT 1 FROM samples LIMIT 1").fetchone()
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Settings of the connection that writes; the tables, if they are not there. Raises CatalogueCorrupt and ConfigError."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute(f"PRAGMA journal_size_limit = {64 << 20}")
    _check_schema(db, path)
    sql.make_page_key(db)


def _check_schema(db: sqlite3.Connection, path: Path) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > sql.SCHEMA_VERSION:
        raise ConfigError(f"{path} was written by a newer slotstream (schema {version}; this one knows {sql.SCHEMA_VERSION})")
    names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    fresh = version == 0 and not names
    if not fresh and (version == 0 or not _TABLES[version] <= names):
        raise CatalogueCorrupt("it lacks slotstream's tables")
    if version < sql.SCHEMA_VERSION:
        if not fresh:
            _log.info("bringing the catalogue %s from schema %d to %d", path, version, sql.SCHEMA_VERSION)
        begin = sql.SCHEMA if fresh else ""
        # In one transaction: whoever is interrupted here finds the version that was there before.
        db.executescript(f"BEGIN IMMEDIATE;{begin}{retention_sql.UPGRADE}PRAGMA user_version = {sql.SCHEMA_VERSION};COMMIT;")
    db.executescript(retention_sql.INDEX)


def _begin_unclean(db: sqlite3.Connection) -> bool:
    """Whether the last server here shut down cleanly; from now on, durably, it counts as not. Raises CatalogueCorrupt."""
    row = db.execute("SELECT value FROM meta WHERE key = 'clean_shutdown'").fetchone()
    clean = bool(row == ("1",))
    if clean:
        # FULL: a power cut must not bring the mark back, or the next start would trust a catalogue that lost rows.
        db.execute("PRAGMA synchronous = FULL")
        db.execute("DELETE FROM meta WHERE key = 'clean_shutdown'")
        db.execute("PRAGMA synchronous = NORMAL")
    else:
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise CatalogueCorrupt(verdict)
    return clean


def _mark_clean(db: sqlite3.Connection) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES ('clean_shutdown', '1')")
