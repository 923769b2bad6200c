"""What changes nothing. Each is one statement, so it sees one state of the tables, and walks an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from slotstream.store.catalogue.attempts import Generation
from slotstream.store.catalogue.postgres import leases
from slotstream.store.catalogue.postgres.rows import NAMES, STORED, checked, record_from_row, stored_values
from slotstream.store.catalogue.postgres.texts import kept, told
from slotstream.store.catalogue.queries import Candidate, Queue, Standing, Usage
from slotstream.store.catalogue.row_values import row_sum
from slotstream.store.records import SampleKey, SampleRecord, State

# Each queue of candidates: its column that counts, and the rows in it, as its index names them.
_QUEUES = {
    Queue.OLDEST: ("committed_unix_ns", "state = 'committed'"),
    Queue.OLDEST_READ: ("committed_unix_ns", "state = 'committed' AND (reads > 0 OR acked_unix_ns > 0)"),
    Queue.READ: ("reads", "reads > 0 AND state = 'committed'"),
    Queue.ACKED: ("acked_unix_ns", "acked_unix_ns > 0 AND state = 'committed'"),
    Queue.FAILED: ("created_unix_ns", "state = 'failed'"),
    Queue.REFUSED: ("created_unix_ns", "state = 'failed' AND dtype = ''"),
}
_USAGE = (
    "coalesce(sum(samples) FILTER (WHERE state = 'committed'), 0), coalesce(sum(bytes) FILTER (WHERE state = 'committed'), 0), "
    "coalesce(sum(samples) FILTER (WHERE state = 'failed'), 0)"
)


def get(db: psycopg.Connection, key: SampleKey) -> SampleRecord | None:
    """Raises RowDamaged."""
    query = f"SELECT {STORED} FROM samples WHERE namespace = %s AND sample_id = %s"
    row = db.execute(query, (key.namespace, key.sample_id)).fetchone()
    return None if row is None else record_from_row(row)


def get_many(db: psycopg.Connection, keys: Sequence[SampleKey]) -> list[SampleRecord | None]:
    """Raises RowDamaged."""
    # A join, for what is asked of several namespaces in any other way walks the whole table: sessions make no bitmaps.
    query = f"SELECT {STORED} FROM unnest(%s::text[], %s::text[]) AS wanted (namespace, sample_id) JOIN samples USING "
    names = [key.namespace for key in keys], [key.sample_id for key in keys]
    rows = db.execute(query + "(namespace, sample_id)", names)
    found = {record.key: record for record in map(record_from_row, rows)}
    return [found.get(key) for key in keys]


def scan_page(db: psycopg.Connection, after: int, limit: int, namespace: str) -> list[tuple[int, SampleRecord]]:
    """Raises RowDamaged."""
    where, values = ("AND namespace = %s", (after, namespace, limit)) if namespace else ("", (after, limit))
    rows = db.execute(f"SELECT id, {STORED} FROM samples WHERE id > %s {where} ORDER BY id LIMIT %s", values)
    return [(row[0], record_from_row(row[1:])) for row in rows]


def unfinished(db: psycopg.Connection) -> list[SampleRecord]:
    """Raises RowDamaged."""
    rows = db.execute(f"SELECT {STORED} FROM samples WHERE state IN ('arriving', 'deleting') AND state <> 'committed'")
    return [record_from_row(row) for row in rows]


def totals(db: psycopg.Connection) -> dict[State, tuple[int, int]]:
    found = dict.fromkeys(State, (0, 0))
    for state, samples, nbytes in db.execute("SELECT state, sum(samples), sum(bytes) FROM deltas GROUP BY state"):
        found[State(state)] = (int(samples), int(nbytes))
    return found


def usage(db: psycopg.Connection, namespace: str) -> Usage:
    row = db.execute(f"SELECT {_USAGE} FROM deltas WHERE namespace = %s", (namespace,)).fetchone()
    assert row is not None, "sums are one row"
    return Usage(namespace, *map(int, row))


def usages(db: psycopg.Connection, after: str, limit: int) -> list[Usage]:
    rows = db.execute(
        f"SELECT namespace, {_USAGE} FROM deltas WHERE namespace > %s GROUP BY namespace "
        "HAVING sum(samples) FILTER (WHERE state IN ('committed', 'failed')) > 0 ORDER BY namespace LIMIT %s",
        (after, limit),
    )
    return [Usage(namespace, *map(int, counts)) for namespace, *counts in rows]


def candidates(db: psycopg.Connection, queue: Queue, namespace: str, after: tuple[int, int], limit: int) -> list[Candidate]:
    """Raises RowDamaged."""
    column, rows = _QUEUES[queue]
    found = db.execute(
        f"SELECT id, {STORED} FROM samples WHERE namespace = %s AND {rows} AND ({column}, id) > (%s, %s) "
        f"ORDER BY {column}, id LIMIT %s",
        (namespace, *after, limit),
    )
    return [_candidate(queue, column, row) for row in found]


def _candidate(queue: Queue, column: str, row: tuple[Any, ...]) -> Candidate:
    values = dict(zip(NAMES, checked(stored_values(row[1:])), strict=False))
    failed = queue in (Queue.FAILED, Queue.REFUSED)
    stamp = values["created_unix_ns"] if failed else values["committed_unix_ns"]
    key = SampleKey(values["namespace"], values["sample_id"])
    return Candidate(key, stamp, values["file_bytes"], (values[column], row[0]), values["error_code"])


def committed_until(db: psycopg.Connection, namespace: str, until_unix_ns: int) -> int:
    row = db.execute(
        "SELECT count(*) FROM samples WHERE namespace = %s AND state = 'committed' AND committed_unix_ns <= %s",
        (namespace, until_unix_ns),
    ).fetchone()
    assert row is not None, "a count is one row"
    return int(row[0])


def standing(db: psycopg.Connection, key: SampleKey) -> Standing:
    """Raises RowDamaged."""
    query = f"SELECT {STORED}, now_unix_ns() FROM (SELECT 1) AS one LEFT JOIN samples ON namespace = %s AND sample_id = %s"
    row = db.execute(query, (key.namespace, key.sample_id)).fetchone()
    assert row is not None, "a left join of one row has one"
    leased = leases.leased_until(db, [key], row[-1])
    if row[0] is None:
        return Standing(leased_until_unix_ns=leased.get(key, 0))
    values = dict(zip(NAMES, checked(stored_values(row[:-1])), strict=False))
    return Standing(values["reads"], values["acked_unix_ns"], leased.get(key, 0))


def now(db: psycopg.Connection) -> int:
    row = db.execute("SELECT now_unix_ns()").fetchone()
    assert row is not None, "a SELECT without FROM has one row"
    return int(row[0])


def get_meta(db: psycopg.Connection, name: str) -> str | None:
    """None also where it is not what was told."""
    row = db.execute("SELECT value FROM meta WHERE key = %s", (kept(name),)).fetchone()
    text, _, digest = ("" if row is None else told(row[0])).rpartition(" ")
    return text if digest == str(row_sum((text,))) else None


def set_meta(db: psycopg.Connection, name: str, value: str) -> None:
    """In a transaction that writes."""
    text = kept(f"{value} {row_sum((value,))}")
    db.execute("INSERT INTO meta VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (kept(name), text))


def generation(db: psycopg.Connection) -> Generation:
    row = db.execute("SELECT catalogue, number FROM generation").fetchone()
    assert row is not None, "the table has one row"
    return Generation(row[0], int(row[1]))


def set_generation(db: psycopg.Connection, number: int) -> bool:
    """In a transaction that writes. False where it is as large already."""
    return db.execute("UPDATE generation SET number = %s WHERE number < %s", (number, number)).rowcount > 0
