"""Is a catalogue sound? Asked at each start that does not find it sealed. Every read of a row checks its checksum."""

from __future__ import annotations

import sqlite3

from slotstream.store.catalogue.sqlite import schema, sql
from slotstream.store.catalogue.sqlite.row_sums import MalformedRow
from slotstream.store.records import State

_COUNTED = (
    "SELECT namespace, sum(state = 'committed'), sum(iif(state = 'committed', file_bytes, 0)), sum(state = 'failed') "
    "FROM samples WHERE state IN ('committed', 'failed') GROUP BY namespace ORDER BY namespace"
)
_TOTALS = "SELECT state, count(*), sum(file_bytes) FROM samples GROUP BY state ORDER BY state"


def check(db: sqlite3.Connection) -> None:
    """Raises MalformedRow and sqlite3.Error where the file, an index, a trigger or a count is not as it should be."""
    (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise MalformedRow(verdict)
    if schema.layout(db) != schema.expected_layout():
        raise MalformedRow("its tables, indexes and triggers are not slotstream's")
    if db.execute("SELECT * FROM namespaces ORDER BY namespace").fetchall() != db.execute(_COUNTED).fetchall():
        raise MalformedRow("the counts by namespace are not those of its rows")
    kept = db.execute("SELECT state, samples, bytes FROM totals ORDER BY state").fetchall()
    counted = {state: (count, nbytes) for state, count, nbytes in db.execute(_TOTALS)}
    if {state: (count, nbytes) for state, count, nbytes in kept} != {
        str(state): counted.pop(str(state), (0, 0)) for state in State
    } or counted:
        raise MalformedRow("the counts by state are not those of its rows")
    sql.page_key(db)
