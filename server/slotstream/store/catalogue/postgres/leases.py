"""Who holds which sample until when. Each of these runs in a transaction that has locked the sample's row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from slotstream.store.catalogue.postgres.failures import RowDamaged
from slotstream.store.catalogue.postgres.texts import kept, told
from slotstream.store.catalogue.row_values import LEASE, row_sum
from slotstream.store.records import SampleKey

_OF_SAMPLES = "(namespace, sample_id) IN (SELECT * FROM unnest(%s::text[], %s::text[]))"
_PUT = (
    f"INSERT INTO leases ({LEASE}, row_xxh3) VALUES (%s, %s, %s, %s, %s) ON CONFLICT (namespace, sample_id, holder) "
    "DO UPDATE SET until_unix_ns = excluded.until_unix_ns, row_xxh3 = excluded.row_xxh3"
)
_COUNT = "SELECT count(*), count(*) FILTER (WHERE namespace = %s) FROM leases"


def _checked(row: Sequence[Any]) -> tuple[SampleKey, str, int]:
    """The sample, holder and end of a lease. Raises RowDamaged."""
    namespace, sample_id, holder, until, digest = row
    holder = told(holder)
    if row_sum((namespace, sample_id, holder, until)) != digest:
        raise RowDamaged(f"a lease on {namespace}/{sample_id} does not match its checksum")
    return SampleKey(namespace, sample_id), holder, until


def _names(keys: Sequence[SampleKey]) -> tuple[list[str], list[str]]:
    return [key.namespace for key in keys], [key.sample_id for key in keys]


def leased_until(db: psycopg.Connection, keys: Sequence[SampleKey], now_unix_ns: int) -> dict[SampleKey, int]:
    """When the last lease on each of the samples ends; those that none holds now are left out. Raises RowDamaged."""
    ends: dict[SampleKey, int] = {}
    for row in db.execute(f"SELECT {LEASE}, row_xxh3 FROM leases WHERE {_OF_SAMPLES}", _names(keys)):
        key, _, until = _checked(row)
        if until > now_unix_ns:
            ends[key] = max(until, ends.get(key, 0))
    return ends


def give(db: psycopg.Connection, key: SampleKey, holder: str, until_unix_ns: int, leases_max: int, namespace_max: int) -> bool:
    """Give `holder` a sample until then, in place of a lease of its own. One at a time in all the catalogue.

    False when `leases_max` are held already, or `namespace_max` in its namespace.
    """
    name = (key.namespace, key.sample_id, kept(holder))
    known = "SELECT 1 FROM leases WHERE namespace = %s AND sample_id = %s AND holder = %s"
    if db.execute(known, name).fetchone() is None:
        row = db.execute(_COUNT, (key.namespace,)).fetchone()
        assert row is not None, "a count is one row"
        if row[0] >= leases_max or row[1] >= namespace_max:
            return False
    _put(db, key, holder, until_unix_ns)
    return True


def _put(db: psycopg.Connection, key: SampleKey, holder: str, until_unix_ns: int) -> None:
    digest = row_sum((key.namespace, key.sample_id, holder, until_unix_ns))
    db.execute(_PUT, (key.namespace, key.sample_id, kept(holder), until_unix_ns, digest))


def release(db: psycopg.Connection, keys: Sequence[SampleKey], holder: str | None = None) -> None:
    """Drop the leases of `holder` on the samples; None: everybody's."""
    whose, values = ("", ()) if holder is None else (" AND holder = %s", (kept(holder),))
    db.execute(f"DELETE FROM leases WHERE {_OF_SAMPLES}{whose}", (*_names(keys), *values))


def shorten(db: psycopg.Connection, until_unix_ns: int) -> None:
    """No lease lasts longer than until then. Raises RowDamaged."""
    rows = db.execute(
        f"SELECT {LEASE}, row_xxh3 FROM leases WHERE until_unix_ns > %s ORDER BY {LEASE} FOR UPDATE", (until_unix_ns,)
    )
    for key, holder, _ in [_checked(row) for row in rows]:
        _put(db, key, holder, until_unix_ns)


def forget(db: psycopg.Connection, now_unix_ns: int) -> None:
    """Drop the leases that have ended. Raises RowDamaged: a lease that says so may have a flipped bit."""
    ended = f"SELECT {LEASE}, row_xxh3 FROM leases WHERE until_unix_ns <= %s FOR UPDATE SKIP LOCKED"
    found = [_checked(row) for row in db.execute(ended, (now_unix_ns,))]
    if found:
        db.execute(
            "DELETE FROM leases WHERE (namespace, sample_id, holder) IN "
            "(SELECT * FROM unnest(%s::text[], %s::text[], %s::text[]))",
            (*_names([key for key, _, _ in found]), [kept(holder) for _, holder, _ in found]),
        )
