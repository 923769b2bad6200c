"""Opens a catalogue, as closely looked at as it must be: sealed, or checked; brought forward; given its next generation."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from slotstream.store.catalogue.sqlite import checking, log_end, schema, seal, sql
from slotstream.store.catalogue.sqlite.damage import CatalogueCorrupt, CatalogueOld
from slotstream.store.catalogue.sqlite.row_sums import MalformedRow, row_sum
from slotstream.store.catalogue.sqlite.seal import Seal
from slotstream.wire.errors import ConfigError

_log = logging.getLogger(__name__)
READERS = 4
_MODE = 0o640  # As that of samples.
_BUSY_TIMEOUT_S = 10.0  # A person's `sqlite3` shell may hold the write lock for a moment.
_LOG_PAGES = 512  # 2 MiB: what samples leave free has room for the log, and for more.
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
_MAGIC = b"SQLite format 3\0"

_TABLES = {
    1: {"samples", "tags", "totals", "meta"},
    2: {"samples", "tags", "totals", "meta", "namespaces", "leases"},
    3: {"samples", "tags", "totals", "meta", "namespaces", "leases"},
}


@dataclass(frozen=True, slots=True)
class Opened:
    """The connections of one catalogue, and what the directory says of it from now on."""

    writer: sqlite3.Connection
    readers: tuple[sqlite3.Connection, ...]
    seal: Seal
    was_sealed: bool  # Not a bit of it changed since a clean stop.
    log_was_cut: bool  # Its log has more than SQLite took: rows may be older than their files.


def open_database(path: Path) -> Opened:
    """Open or create the catalogue at `path`. Raises CatalogueCorrupt, CatalogueOld and ConfigError."""
    with ExitStack() as opened, _explained(path):
        _keep_from_others(path)
        told = seal.read(path)
        sealed = told is not None and told.matches(path)
        _check_header(path)
        written = 0 if sealed else log_end.frames_written(path)
        writer = _connect(path, opened)
        fresh = _prepare(writer, path, told)
        cut = written > log_end.frames_taken(path)
        if not (fresh or sealed):
            _log.info("the catalogue was not closed cleanly: its %d MiB are checked", path.stat().st_size >> 20)
            checking.check(writer)
        following = _next_start(writer, path, told, fresh=fresh)
        readers = tuple(_connect_reader(path, opened) for _ in range(READERS))
        opened.pop_all()
    return Opened(writer, readers, following, sealed, cut)


def _keep_from_others(path: Path) -> None:
    """Create the file with the mode that SQLite gives its log too, and take rights from those that earlier versions made.

    Before SQLite has the file open: to close another descriptor of it would end its locks.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE))
        for part in path.parent.glob(f"{path.name}*"):
            fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                mode = stat.S_IMODE(os.fstat(fd).st_mode)
                if mode & ~_MODE:
                    os.fchmod(fd, mode & _MODE)
            finally:
                os.close(fd)
    except OSError as error:  # Another's files, or a disk that cannot: what needs them says more.
        _log.warning("who may read the catalogue %s stays as it is: %s", path, error.strerror or error)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
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


def _next_start(db: sqlite3.Connection, path: Path, told: Seal | None, *, fresh: bool) -> Seal:
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
