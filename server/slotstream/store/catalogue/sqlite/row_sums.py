"""A checksum a row: one flipped bit is found where it is read, and only that row is doubted.

`samples.row_xxh3` is over all other columns but the number, `leases.row_xxh3` likewise (see `row_values`). What has to survive
a restart beside rows has one too, behind its text.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from slotstream.store.catalogue.row_values import COLUMNS as COLUMNS
from slotstream.store.catalogue.row_values import LEASE as LEASE
from slotstream.store.catalogue.row_values import STORED as STORED
from slotstream.store.catalogue.row_values import SUMMED as SUMMED
from slotstream.store.catalogue.row_values import row_sum as row_sum
from slotstream.wire.hashing import xxh3

_NAMES = SUMMED.split(", ")

UPGRADE = f"""
ALTER TABLE samples ADD COLUMN row_xxh3 INTEGER NOT NULL DEFAULT 0;
UPDATE samples SET row_xxh3 = row_sum({SUMMED});
ALTER TABLE leases ADD COLUMN row_xxh3 INTEGER NOT NULL DEFAULT 0;
CREATE INDEX samples_refused ON samples (namespace, created_unix_ns) WHERE state = 'failed' AND dtype = '';
UPDATE leases SET row_xxh3 = row_sum({LEASE});
UPDATE meta SET value = value || ' ' || row_sum(value) WHERE key = 'scrub';
"""


class MalformedRow(sqlite3.DatabaseError):
    """A row that this program did not write: the file was damaged, or somebody edited it."""


def add_function(db: sqlite3.Connection) -> None:
    """`row_sum(...)` for SQL: an upgrade needs it, nothing else does."""
    db.create_function("row_sum", -1, lambda *values: row_sum(values), deterministic=True)


def checked(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """`row` without its checksum, which comes last. Raises MalformedRow."""
    try:
        if row_sum(row[:-1]) == row[-1]:
            return row[:-1]
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedRow("a row of the catalogue is malformed") from error
    raise MalformedRow("a row of the catalogue does not match its checksum")


def named_and_checked(db: sqlite3.Connection, after_id: int, limit: int) -> list[tuple[int, str, str, str]]:
    """(id, namespace, sample_id, state) of up to `limit` rows from `after_id` on. Raises MalformedRow for a wrong checksum.

    SQLite spells the values as `row_sum` does, in half the time. What it spells otherwise is looked at again.
    """
    where = "FROM samples WHERE id > ? ORDER BY id LIMIT ?"
    query = f"SELECT id, namespace, sample_id, state, json_array({SUMMED}), row_xxh3 {where}"
    try:
        rows = db.execute(query, (after_id, limit)).fetchall()
        if all(xxh3(row[4].encode()) >> 1 == row[5] for row in rows):
            return [row[:4] for row in rows]
    except sqlite3.OperationalError:  # Such as a blob, which JSON cannot spell.
        pass
    rows = db.execute(f"SELECT id, {STORED} {where}", (after_id, limit)).fetchall()
    for row in rows:
        checked(row[1:])
    return [row[:4] for row in rows]


def find(db: sqlite3.Connection, namespace: str, sample_id: str) -> tuple[int, tuple[Any, ...]] | None:
    """The number and the summed columns of a sample's row. Raises MalformedRow."""
    query = f"SELECT id, {STORED} FROM samples WHERE namespace = ? AND sample_id = ?"
    row = db.execute(query, (namespace, sample_id)).fetchone()
    if row is None:
        return None
    values = checked(row[1:])
    if values[:2] != (namespace, sample_id):
        raise MalformedRow("an index of the catalogue leads to another sample's row")
    return row[0], values


def change(db: sqlite3.Connection, row: tuple[int, tuple[Any, ...]], **changes: object) -> None:
    """Change columns of a row that `find` found, and its checksum with them."""
    values = [changes.get(name, value) for name, value in zip(_NAMES, row[1], strict=True)]
    columns = "".join(f"{name} = ?, " for name in changes)
    db.execute(f"UPDATE samples SET {columns}row_xxh3 = ? WHERE id = ?", (*changes.values(), row_sum(values), row[0]))
