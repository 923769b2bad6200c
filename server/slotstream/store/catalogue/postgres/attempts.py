"""Attempts: which objects are on their way, and which have to go. See `store/catalogue/attempts.py`."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from slotstream.store.catalogue.attempts import EXPIRED_S, LATE_S, LIFE_S, REMOVED_AFTER_S, Attempt
from slotstream.store.records import SampleKey
from slotstream.store.shared_state import AttemptCounts

_NS = 1_000_000_000
_PUT = "INSERT INTO attempts VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (attempt) DO NOTHING"
_OPEN = "SELECT EXISTS (SELECT 1 FROM attempts WHERE namespace = %s AND sample_id = %s AND NOT ended)"
_DUE = (
    "SELECT a.attempt, a.namespace, a.sample_id, a.ended FROM attempts AS a WHERE a.due_unix_ns <= now_unix_ns() "
    "AND (a.ended OR a.due_unix_ns <= now_unix_ns() - %s) "
    "AND NOT EXISTS (SELECT 1 FROM holds AS h WHERE h.attempt = a.attempt AND h.until_unix_ns > now_unix_ns()) "
    "ORDER BY a.due_unix_ns LIMIT %s"
)
_COUNT = (
    "SELECT count(*) FILTER (WHERE NOT ended), count(*) FILTER (WHERE ended), "
    "count(*) FILTER (WHERE due_unix_ns <= now_unix_ns() - %s AND NOT EXISTS "
    "(SELECT 1 FROM holds AS h WHERE h.attempt = a.attempt AND h.until_unix_ns > now_unix_ns())) FROM attempts AS a"
)
_KNOWN = (
    "SELECT k.attempt FROM unnest(%s::text[], %s::text[], %s::text[]) AS k (attempt, namespace, sample_id) "
    "WHERE EXISTS (SELECT 1 FROM attempts AS a WHERE a.attempt = k.attempt) OR EXISTS (SELECT 1 FROM samples AS s "
    "WHERE s.namespace = k.namespace AND s.sample_id = k.sample_id AND s.attempt = k.attempt)"
)
_HOLD = (
    "INSERT INTO holds SELECT attempt, %s FROM unnest(%s::text[]) AS attempt ORDER BY attempt "
    "ON CONFLICT (attempt) DO UPDATE SET until_unix_ns = excluded.until_unix_ns"
)


def begin(db: psycopg.Connection, key: SampleKey, attempt: str, now_unix_ns: int) -> None:
    db.execute(_PUT, (attempt, key.namespace, key.sample_id, now_unix_ns, now_unix_ns + round(LIFE_S * _NS), False))


def leave(db: psycopg.Connection, key: SampleKey, attempt: str, now_unix_ns: int) -> None:
    """Its sample is not there any more: its object goes, once those who read it have had their time."""
    db.execute(_PUT, (attempt, key.namespace, key.sample_id, now_unix_ns, now_unix_ns + round(REMOVED_AFTER_S * _NS), True))


def take(db: psycopg.Connection, attempt: str) -> bool:
    """It is a sample from here on. False where it is not open."""
    return db.execute("DELETE FROM attempts WHERE attempt = %s AND NOT ended", (attempt,)).rowcount > 0


def end(db: psycopg.Connection, attempt: str, now_unix_ns: int) -> bool:
    """False where it is not open."""
    due = now_unix_ns + round(REMOVED_AFTER_S * _NS)  # What its server was sending at this moment has arrived by then.
    ended = db.execute("UPDATE attempts SET ended = true, due_unix_ns = %s WHERE attempt = %s AND NOT ended", (due, attempt))
    return ended.rowcount > 0


def end_all(db: psycopg.Connection, key: SampleKey, now_unix_ns: int) -> None:
    """A sample is deleted: what was on its way under its id must not bring it back."""
    due = now_unix_ns + round(REMOVED_AFTER_S * _NS)
    of = "namespace = %s AND sample_id = %s AND NOT ended"
    db.execute(f"UPDATE attempts SET ended = true, due_unix_ns = %s WHERE {of}", (due, key.namespace, key.sample_id))


def forget(db: psycopg.Connection, attempts: Sequence[str], now_unix_ns: int) -> None:
    """Those that were ended; and holds that are over."""
    db.execute("DELETE FROM attempts WHERE attempt = ANY (%s) AND ended", (list(attempts),))
    db.execute("DELETE FROM holds WHERE until_unix_ns <= %s", (now_unix_ns,))


def renew(db: psycopg.Connection, attempts: Sequence[str], now_unix_ns: int) -> set[str]:
    due = now_unix_ns + round(LIFE_S * _NS)
    renewed = "UPDATE attempts SET due_unix_ns = %s WHERE attempt = ANY (%s) AND NOT ended RETURNING attempt"
    return {row[0] for row in db.execute(renewed, (due, list(attempts)))}


def hold(db: psycopg.Connection, attempts: Sequence[str], now_unix_ns: int) -> None:
    db.execute(_HOLD, (now_unix_ns + round(REMOVED_AFTER_S * _NS), list(attempts)))


def is_open(db: psycopg.Connection, key: SampleKey) -> bool:
    """Whether somebody is sending the sample."""
    row = db.execute(_OPEN, (key.namespace, key.sample_id)).fetchone()
    return row is not None and bool(row[0])


def due(db: psycopg.Connection, limit: int) -> list[Attempt]:
    rows = db.execute(_DUE, (round(EXPIRED_S * _NS), limit))
    return [Attempt(SampleKey(namespace, sample_id), name, ended) for name, namespace, sample_id, ended in rows]


def count(db: psycopg.Connection) -> AttemptCounts:
    row = db.execute(_COUNT, (round(LATE_S * _NS),)).fetchone()
    assert row is not None, "a count is one row"
    return AttemptCounts(*map(int, row))


def oldest(db: psycopg.Connection) -> int:
    """When it began, Unix nanoseconds; 0 where none is open."""
    row = db.execute("SELECT begun_unix_ns FROM attempts WHERE NOT ended ORDER BY begun_unix_ns LIMIT 1").fetchone()
    return 0 if row is None else int(row[0])


def known(db: psycopg.Connection, attempts: Sequence[str], keys: Sequence[SampleKey]) -> set[str]:
    names = list(attempts), [key.namespace for key in keys], [key.sample_id for key in keys]
    return {row[0] for row in db.execute(_KNOWN, names)}


def all_open(db: psycopg.Connection) -> dict[str, tuple[SampleKey, int]]:
    rows = db.execute("SELECT attempt, namespace, sample_id, due_unix_ns FROM attempts WHERE NOT ended")
    return {name: (SampleKey(namespace, sample_id), int(due)) for name, namespace, sample_id, due in rows}


def let_go(db: psycopg.Connection, attempts: Sequence[str]) -> None:
    db.execute("DELETE FROM attempts WHERE attempt = ANY (%s)", (list(attempts),))
