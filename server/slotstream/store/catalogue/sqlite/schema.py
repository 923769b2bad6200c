"""The catalogue's tables: how each version comes out of the one before, and what they have to look like in the end."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache

from slotstream.store.catalogue.sqlite import retention_sql, row_sums, sql

VERSION = 3
# From this version to the next; from none, the first version's tables.
_STEPS = {0: sql.SCHEMA, 1: retention_sql.UPGRADE, 2: row_sums.UPGRADE + retention_sql.INDEX}


def bring_forward(db: sqlite3.Connection, version: int) -> None:
    """Make the tables of VERSION out of those of `version` (0: an empty database), in one transaction."""
    row_sums.add_function(db)
    steps = "".join(step for number, step in _STEPS.items() if number >= version)
    # In one transaction: whoever is interrupted here finds the version that was there before.
    db.executescript(f"BEGIN IMMEDIATE;{steps}PRAGMA user_version = {VERSION};COMMIT;")


def layout(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    """Every table, index and trigger, with the statement that made it."""
    rows = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_stat%'")
    return sorted(rows.fetchall(), key=repr)


@cache
def expected_layout() -> list[tuple[object, ...]]:
    """The layout of a sound catalogue of VERSION."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        bring_forward(db, 0)
        return layout(db)


def has_sums(db: sqlite3.Connection) -> bool:
    """Whether the rows have checksums. The version that the file names is not trusted."""
    return any(column[1] == "row_xxh3" for column in db.execute("PRAGMA table_info(samples)"))
