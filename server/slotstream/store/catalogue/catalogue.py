"""The catalogue: a SQLite index of the sample files. It can be lost: recovery rebuilds it from them.

A start looks at it as closely as it must (`seal`), and each row has a checksum (`row_sums`). Damage that shows while it is in
use is mended at once: what is sound is kept (`salvage`), what is lost comes back from the files.

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

from slotstream.store.catalogue import checking, retention_sql, salvage, schema, seal, sql
from slotstream.store.catalogue.row_sums import MalformedRow, row_sum
from slotstream.store.catalogue.seal import Seal
from slotstream.store.catalogue.sql import ListQuery
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.wire.errors import ConfigError, InternalFault, IoError, SlotStreamError, StoreFull

FILE_NAME = "catalog.sqlite"
_log = logging.getLogger(__name__)
_BATCH_MAX = 256  # Operations in one transaction.
_LINGER_S = 0.05  # How long a change that nobody waits for may wait for others: a transaction costs as much for one as for ten.
_READERS = 4
_BUSY_TIMEOUT_S = 10.0  # A person's `sqlite3` shell may hold the write lock for a moment.
_MESSAGE_CHARS_MAX = 1024
_SLIM_CHARS_MAX = 1024
_LOG_PAGES = 512  # 2 MiB: what samples leave free has room for the log, and for more.
# Damage of the file itself, as opposed to a full disk or a lock.
_CORRUPT_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# What a database can raise: the sqlite3 module cannot decode a message that quotes a damaged schema.
_ERRORS = (sqlite3.Error, UnicodeDecodeError)
# The disk, and not the file.
_DISK_CODES = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})
# What stands between a sound file and its opening. Anything else that goes wrong then is damage of the file.
_SURROUNDINGS = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
    }
)
_UNDECODABLE = "Could not decode to UTF-8"  # The sqlite3 module's own words, under no code.
_MAGIC = b"SQLite format 3\0"

_TABLES = {
    1: {"samples", "tags", "totals", "meta"},
    2: {"samples", "tags", "totals", "meta", "namespaces", "leases"},
    3: {"samples", "tags", "totals", "meta", "namespaces", "leases"},
}

_T = TypeVar("_T")
_Operation = Callable[[sqlite3.Connection], object]
_Entry = tuple[_Operation, "Future[object]", bool]  # The last: whether it has to survive a power cut.


class CatalogueCorrupt(Exception):
    """The file is not a sound catalogue: it has to be rebuilt. Seen only while opening."""


class CatalogueOld(CatalogueCorrupt):
    """The file is a catalogue of an earlier day: what its rows say is over."""


class CatalogueDamaged(InternalFault):
    """Damage that only came to light when its rows were read. It means: rebuild."""


def catalogue_error(error: Exception) -> SlotStreamError:
    """The expected failure that `error` is: StoreFull where the disk is full, IoError, CatalogueDamaged, else InternalFault."""
    code = getattr(error, "sqlite_errorcode", 0)
    if isinstance(error, MalformedRow) or is_corrupt(error):
        return CatalogueDamaged(f"the catalogue failed: {error}")
    if code & 0xFF == sqlite3.SQLITE_FULL:  # The low byte is the kind of error, the rest its detail.
        return StoreFull("the disk is full: the catalogue cannot be written")
    if code & 0xFF in _DISK_CODES:
        return IoError(f"the catalogue cannot be read or written: {error}")
    return InternalFault(f"the catalogue failed: {error}")


def is_corrupt(error: Exception) -> bool:
    undecodable = isinstance(error, UnicodeDecodeError) or str(error).startswith(_UNDECODABLE)
    return undecodable or getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT_CODES


class Catalogue:
    """Samples by name, state, tags and time. Thread safe. Raises StoreFull, IoError and InternalFault unless it says more."""

    def __init__(self, path: Path) -> None:
        """Open or create the database. Raises CatalogueCorrupt and ConfigError."""
        self.path = path
        self._readers: queue.SimpleQueue[sqlite3.Connection | None] = queue.SimpleQueue()
        self._is_open = False
        self._aside: Path | None = None  # A damaged catalogue from which not all is saved yet.
        self._connect()
        # After a rebuild: the samples whose files are there and whose rows are not, as records. Without it damage is only told.
        self.find_lost: Callable[[Callable[[SampleKey], SampleRecord | None]], Iterator[SampleRecord]] | None = None
        self.rebuilds = 0  # In this process, while it was in use.
        self._operations: deque[_Entry] = deque()
        self._asked = threading.Condition()  # Guards the three around it.
        self._urgent = False  # Somebody waits for one of the operations.
        self._closed = False
        self._thread = threading.Thread(target=self._write_forever, name="catalogue", daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        """Open the file, as closely looked at as it must be. Raises CatalogueCorrupt and ConfigError."""
        with ExitStack() as opened, _opening(self.path):
            told = seal.read(self.path)
            self.was_shut_down_cleanly = told is not None and told.matches(self.path)
            _check_header(self.path)
            self._writer_db = _connect(self.path, opened)
            fresh = _prepare(self._writer_db, self.path, told)
            if not (fresh or self.was_shut_down_cleanly):
                checking.check(self._writer_db)
            self._seal = _begin(self._writer_db, self.path, told, fresh=fresh)
            readers = [_connect_reader(self.path, opened) for _ in range(_READERS)]
            opened.pop_all()
        self._is_open = True
        while not self._readers.empty():  # What stood for readers while the file could not be opened.
            self._readers.get()
        for reader in readers:
            self._readers.put(reader)

    def _disconnect(self) -> None:
        """Close every connection, once nobody uses it. Readers find None until there are new ones."""
        if not self._is_open:
            return
        readers: list[sqlite3.Connection] = []
        while len(readers) < _READERS:
            if (reader := self._readers.get()) is not None:
                readers.append(reader)
        self._is_open = False
        for reader in readers:
            reader.close()
            self._readers.put(None)
        self._writer_db.close()

    def close(self, *, clean: bool = True) -> None:
        """Write what was asked so far and close. `clean` seals the file: the next start need not look at it."""
        if self._closed:
            return
        with self._asked:
            self._closed = True
            self._asked.notify()
        self._thread.join()
        was_open = self._is_open
        self._disconnect()
        log = self.path.with_name(self.path.name + "-wal")  # Gone now, unless somebody else has the file open.
        if clean and was_open and not (log.exists() and log.stat().st_size):
            try:
                replace(self._seal, file_xxh3=seal.hash_of(self.path)).write(self.path)
            except OSError as error:
                _log.warning("the catalogue cannot be sealed, so the next start looks at everything: %s", error)

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
            sql.put(db, _slim(replace(record, metadata={})))  # The upload itself knows all, and the commit writes it.
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

    def forget_arriving(self, key: SampleKey) -> Future[bool]:
        """Forget a sample that was arriving, as if it had never been announced. False when its row says something else."""

        def operation(db: sqlite3.Connection) -> bool:
            before = sql.get(db, key.namespace, key.sample_id)
            if before is None or before.state is not State.ARRIVING:
                return False
            retention_sql.mark_deleting(db, key)
            retention_sql.drop_deleting(db, [key])
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
        """One transaction. False when it failed and holds more than one operation; a single one gets its error.

        One that meets damage is done again once the catalogue is rebuilt.
        """
        return self._write(batch, again=False)

    def _write(self, batch: list[_Entry], *, again: bool) -> bool:
        if not self._is_open and not self._mend(CatalogueDamaged("it could not be opened before")):
            for _, future, _ in batch:
                future.set_exception(IoError("the catalogue cannot be opened"))
            return True
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
            failure = catalogue_error(error) if isinstance(error, _ERRORS) else error
            if isinstance(failure, CatalogueDamaged) and not again and self._mend(failure):
                return self._write(batch, again=True)
            batch[0][1].set_exception(failure)
            return True
        finally:
            if durable:
                with suppress(sqlite3.Error):
                    db.execute("PRAGMA synchronous = NORMAL")
        for (_, future, _), result in zip(batch, results, strict=True):
            future.set_result(result)
        return True

    # Mending.

    def _mend(self, damage: Exception) -> bool:
        """Open the file again; if it is damaged still, begin anew with what is sound. Everybody waits meanwhile.

        In the thread that writes. False when the disk does not let it: then whoever asks next tries again.
        """
        if self.find_lost is None:
            return False
        _log.error("the catalogue %s is damaged (%s): it is looked at again", self.path, damage)
        self._disconnect()
        try:
            self._reopen()
        except (OSError, CatalogueCorrupt, SlotStreamError, ConfigError, *_ERRORS) as error:
            _log.error("the catalogue cannot be opened: %s", error)
            self._disconnect()
            return False
        self.rebuilds += 1
        return True

    def _reopen(self) -> None:
        try:
            self._connect()
            if self._aside is None:
                self._check_rows()
                _log.warning("the catalogue is sound: the damage was in what was read, and not on the disk")
                return
        except (CatalogueCorrupt, *_ERRORS) as error:
            if not isinstance(error, CatalogueCorrupt) and not isinstance(catalogue_error(error), CatalogueDamaged):
                raise
            self._disconnect()
            aside = salvage.set_aside(self.path)
            self._aside = self._aside or aside  # What an earlier attempt began is nothing to save from.
            self._connect()
        saved = self.take_over(self._aside)
        found = self._put_lost()
        _log.error(
            "the catalogue is rebuilt: %s; %d samples come from their files; %s is what it was", saved, found, self._aside
        )
        self._aside = None

    def _check_rows(self) -> None:
        """Raises MalformedRow and sqlite3.Error."""
        after = 0
        while page := sql.scan(self._writer_db, after, _BATCH_MAX):
            after = page[-1][0]

    def _put_lost(self) -> int:
        assert self.find_lost is not None, "checked before"
        db, found = self._writer_db, 0
        db.execute("BEGIN IMMEDIATE")
        for record in self.find_lost(lambda key: sql.get(db, key.namespace, key.sample_id)):
            sql.put(db, record)
            found += 1
        db.execute("COMMIT")
        return found

    def take_over(self, aside: Path) -> salvage.Saved:
        """Copy what is sound in another catalogue. Before anything else is asked of this one, or in the thread that writes."""
        db = self._writer_db
        db.execute("BEGIN IMMEDIATE")
        saved = salvage.copy_rows(aside, db)
        db.execute("COMMIT")
        return saved

    # Reading.

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        while (db := self._readers.get()) is None:
            if not self._is_open:
                self._readers.put(None)
                raise CatalogueDamaged("the catalogue cannot be opened")
        try:
            yield db
        except _ERRORS as error:
            raise catalogue_error(error) from error
        finally:
            self._readers.put(db)

    def ask(self, question: Callable[[sqlite3.Connection], _T]) -> _T:
        """The answer of a query that changes nothing. One that meets damage is asked again once the catalogue is rebuilt."""
        rebuilds = self.rebuilds
        try:
            with self._reader() as db:
                return question(db)
        except CatalogueDamaged as error:
            if self.find_lost is None:
                raise
            damage = error

        def rebuilt(db: sqlite3.Connection) -> None:
            if self.rebuilds == rebuilds:  # Nobody did it meanwhile.
                raise MalformedRow(str(damage))

        self.submit(rebuilt).result()
        with self._reader() as db:
            return question(db)

    def get(self, key: SampleKey) -> SampleRecord | None:
        return self.ask(lambda db: sql.get(db, key.namespace, key.sample_id))

    def list_page(self, query: ListQuery) -> tuple[list[SampleRecord], str]:
        """One page, newest first, and the next page's token ("" on the last). Raises BadPage."""
        with self._asked:
            lingering = bool(self._operations)
        if lingering:  # Who lists sees what was opened before.
            self.submit(lambda db: None).result()
        return self.ask(lambda db: sql.list_page(db, query))

    def scan(self, namespace: str = "") -> Iterator[SampleRecord]:
        """Every row (of one namespace), in the order they were first seen; rows that come and go meanwhile may be missed."""
        after = 0
        while page := self.ask(lambda db, after=after: sql.scan(db, after, _BATCH_MAX, namespace)):  # type: ignore[misc]
            after = page[-1][0]
            for _, record in page:
                yield record

    def scan_page(self, after: int, limit: int) -> list[tuple[int, SampleRecord]]:
        """Up to `limit` rows with their numbers, those numbered above `after`, in the order they were first seen."""
        return self.ask(lambda db: sql.scan(db, after, limit))

    def unfinished(self) -> list[SampleRecord]:
        """Rows that are neither committed nor failed: few, whatever the size of the table."""
        return self.ask(sql.unfinished)

    def totals(self) -> dict[State, tuple[int, int]]:
        """State -> (samples, bytes)."""
        return self.ask(sql.totals)


def _slim(record: SampleRecord) -> SampleRecord:
    """`record` without tags and metadata that are long: what was not committed costs a peer nothing, and little disk."""
    long = [
        name
        for name, texts in (("tags", record.tags), ("metadata", record.metadata))
        if sum(map(len, (*texts, *texts.values()))) > _SLIM_CHARS_MAX
    ]
    return replace(record, **{name: {} for name in long}) if long else record  # type: ignore[arg-type]


def _failed(record: SampleRecord, code: str, message: str) -> SampleRecord:
    record, text = _slim(record), message[:_MESSAGE_CHARS_MAX]
    return replace(record, state=State.FAILED, file_bytes=0, committed_unix_ns=0, error_code=code, error_message=text)


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """What goes wrong meanwhile, as CatalogueCorrupt or ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF in _SURROUNDINGS and code != sqlite3.SQLITE_IOERR_SHORT_READ:
            raise ConfigError(f"cannot open the catalogue {path}: {error}") from error
        raise CatalogueCorrupt(str(error)) from error


def _check_header(path: Path) -> None:
    """Raises MalformedRow for a version of the file's format that would make SQLite say that it may not write, or not open."""
    if not path.exists():
        return
    with path.open("rb") as file:
        header = file.read(20)
    if header and (not header.startswith(_MAGIC) or header[18:20] not in (b"\1\1", b"\2\2")):
        raise MalformedRow("its header is not that of a SQLite database")


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


def _prepare(db: sqlite3.Connection, path: Path, told: Seal | None) -> bool:
    """Settings of the connection that writes; the tables. Whether they are new. Raises CatalogueCorrupt and ConfigError."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute(f"PRAGMA journal_size_limit = {64 << 20}")
    db.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
    fresh = _check_schema(db, path, told)
    sql.make_page_key(db)
    return fresh


def _check_schema(db: sqlite3.Connection, path: Path, told: Seal | None) -> bool:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    # A newer slotstream says its version beside the catalogue too. One that only the catalogue says may be a flipped bit.
    flipped = told is not None and (version ^ told.schema).bit_count() == 1
    if version > schema.VERSION and not flipped:
        raise ConfigError(f"{path} was written by a newer slotstream (schema {version}; this one knows {schema.VERSION})")
    names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    fresh = version == 0 and not names
    if not fresh and (version not in _TABLES or not _TABLES[version] <= names):
        raise CatalogueCorrupt("it lacks slotstream's tables")
    if version == schema.VERSION:
        return False
    if not fresh:
        if schema.has_sums(db):
            raise CatalogueCorrupt("its version is not that of its tables")
        if told is not None:
            raise CatalogueOld("a newer catalogue was here before")
        _log.info("bringing the catalogue %s from schema %d to %d", path, version, schema.VERSION)
    schema.bring_forward(db, version)
    return fresh


def _begin(db: sqlite3.Connection, path: Path, told: Seal | None, *, fresh: bool) -> Seal:
    """Give the catalogue its next generation, and the directory too, durably. Raises CatalogueOld and ConfigError."""
    before = _generation(db)
    if told is not None and before < told.generation and not fresh:
        raise CatalogueOld(f"it is of start {before}, and there were {told.generation}")
    following = Seal(max(before, told.generation if told else 0) + 1, schema.VERSION)
    try:
        if told is not None and told.file_xxh3:
            replace(told, file_xxh3="").write(path)
        # FULL: a power cut must not bring an earlier generation back.
        db.execute("PRAGMA synchronous = FULL")
        text = str(following.generation)
        db.execute("INSERT OR REPLACE INTO meta VALUES ('generation', ?)", (f"{text} {row_sum((text,))}",))
        db.execute("PRAGMA synchronous = NORMAL")
        following.write(path)
    except OSError as error:
        raise ConfigError(f"cannot write beside the catalogue {path}: {error.strerror or error}") from error
    return following


def _generation(db: sqlite3.Connection) -> int:
    """How often the catalogue was opened; 0 before a version that counts. Raises MalformedRow."""
    row = db.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()
    if row is None:
        return 0
    try:
        text, _, digest = row[0].partition(" ")
        if int(digest) == row_sum((text,)):
            return int(text)
    except (ValueError, AttributeError) as error:
        raise MalformedRow("its generation is malformed") from error
    raise MalformedRow("its generation does not match its checksum")
