"""What can be saved out of a damaged catalogue: every row whose checksum holds. What is lost, the sample files have to tell."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.common.progress import Progress
from slotstream.store.catalogue import page_token
from slotstream.store.catalogue.sqlite import row_sums, schema, sql
from slotstream.store.catalogue.sqlite.damage import ERRORS
from slotstream.store.catalogue.sqlite.row_sums import LEASE, STORED, SUMMED, MalformedRow, checked, row_sum

_log = logging.getLogger(__name__)
_PAGE = 256
_ROWS_A_PAGE = 64  # More than a page of the file can hold: how far to look behind a place that cannot be read.
PARTS = ("", "-wal", "-shm")


@dataclass(slots=True)
class Saved:
    """Rows kept, and rows seen that were damaged; what stood on pages that cannot be read at all was not even seen."""

    rows: int = 0
    damaged: int = 0
    leases: int = 0
    whole: bool = True  # Every page could be read.

    def __str__(self) -> str:
        rest = "" if self.whole else "; some of its pages cannot be read"
        return f"{self.rows} rows and {self.leases} leases are kept, {self.damaged} rows were damaged{rest}"


def set_aside(path: Path) -> Path:
    """Moves the catalogue, with its log, out of the way; where it is then. Raises OSError."""
    aside = path.with_name(f"{path.name}.corrupt-{time.time_ns()}")
    for part in PARTS:
        source = path.with_name(path.name + part)
        if source.exists():
            source.rename(aside.with_name(aside.name + part))
    return aside


def copy_rows(aside: Path, new: sqlite3.Connection) -> Saved:
    """Copy what is sound in the catalogue at `aside` to `new`, within its transaction. Rows keep their numbers."""
    saved, read = Saved(), Progress(_log, "%s rows of the damaged catalogue are read")
    try:
        with closing(sqlite3.connect(aside, isolation_level=None)) as old:
            # Text that is none shows in its row's checksum, and does not keep the rows beside it from being read.
            old.text_factory = lambda raw: raw.decode(errors="surrogateescape")
            old.execute("PRAGMA writable_schema = ON")  # An index or trigger that cannot be understood is passed over.
            give_sums(old)
            for row in _rows(old, saved):
                _keep(new, row, saved)
                read.step()
            _copy_leases(old, new, saved)
            _copy_meta(old, new)
    except ERRORS as error:
        saved.whole = False
        _log.warning("the rest of the catalogue cannot be read: %s", error)
    return saved


def give_sums(old: sqlite3.Connection) -> None:
    """Let a catalogue of an earlier version, whose rows have no checksums, be read as one of this version."""
    if schema.has_sums(old):
        return
    names = [column[1] for column in old.execute("PRAGMA table_info(samples)")]
    row_sums.add_function(old)
    inner = ", ".join(name if name in names else f"0 AS {name}" for name in SUMMED.split(", "))
    old.execute(
        f"CREATE TEMP VIEW samples AS SELECT *, row_sum({SUMMED}) AS row_xxh3 FROM (SELECT id, {inner} FROM main.samples)"
    )
    if old.execute("SELECT 1 FROM main.sqlite_master WHERE name = 'leases'").fetchone():
        old.execute(f"CREATE TEMP VIEW leases AS SELECT *, row_sum({LEASE}) AS row_xxh3 FROM main.leases")


def _rows(old: sqlite3.Connection, saved: Saved) -> Iterator[tuple[Any, ...]]:
    """Every row that can be read, with its number: page by page, and one by one where a page cannot be read."""
    (pages,) = old.execute("PRAGMA page_count").fetchone()
    after, probed = 0, 0
    while probed <= pages * _ROWS_A_PAGE:
        query = f"SELECT id, {STORED} FROM samples WHERE id > ? ORDER BY id LIMIT {_PAGE}"
        try:
            page = old.execute(query, (after,)).fetchall()
            ids = [row[0] for row in page]
            if ids != sorted(set(ids)) or (ids and ids[0] <= after):
                raise MalformedRow("rows are out of order")
        except ERRORS:
            saved.whole = False
            for number in range(after + 1, after + _PAGE + 1):
                with suppress(*ERRORS):
                    yield from old.execute(f"SELECT id, {STORED} FROM samples WHERE id = ?", (number,)).fetchall()
            after += _PAGE
            probed += _PAGE
            continue
        yield from page
        if not page:
            return
        after = ids[-1]


def _keep(new: sqlite3.Connection, row: tuple[Any, ...], saved: Saved) -> None:
    try:
        values = checked(row[1:])
        record = sql.record_from_row(row[1:])
    except MalformedRow:
        saved.damaged += 1
        return
    known = new.execute("SELECT 1 FROM samples WHERE namespace = ? AND sample_id = ?", values[:2]).fetchone()
    if known is not None:
        return
    marks = ", ".join("?" * (len(values) + 2))
    new.execute(f"INSERT INTO samples (id, {STORED}) VALUES ({marks})", (row[0], *values, row_sum(values)))
    sql.put_tags(new, row[0], record)
    saved.rows += 1


def _copy_leases(old: sqlite3.Connection, new: sqlite3.Connection, saved: Saved) -> None:
    with suppress(*ERRORS):
        for row in old.execute(f"SELECT {LEASE}, row_xxh3 FROM leases"):
            with suppress(MalformedRow):
                new.execute(
                    f"INSERT OR REPLACE INTO leases ({LEASE}, row_xxh3) VALUES (?, ?, ?, ?, ?)", (*checked(row), row[-1])
                )
                saved.leases += 1


def _copy_meta(old: sqlite3.Connection, new: sqlite3.Connection) -> None:
    with suppress(*ERRORS):
        for key, value in old.execute("SELECT key, value FROM meta WHERE key IN ('page_key', 'scrub', 'clock', 'rules')"):
            if isinstance(value, str) and (key != "page_key" or page_token.is_key(value)):
                new.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
