"""The catalogue's part of retention: what schema version 2 added, and its queries. Each walks an index; none scans a table.

samples.reads, .acked_unix_ns   how often every row of the sample was read to the end, and when a reader was done with it
namespaces                      samples, bytes and failed rows by namespace, kept by triggers
leases                          who holds which sample until when, also over a restart
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from slotstream.store.catalogue.queries import Candidate, Queue, Standing, Usage
from slotstream.store.catalogue.sqlite.row_sums import LEASE, STORED, MalformedRow, change, checked, find, row_sum
from slotstream.store.records import SampleKey, State

UPGRADE = """
ALTER TABLE samples ADD COLUMN reads INTEGER NOT NULL DEFAULT 0;
ALTER TABLE samples ADD COLUMN acked_unix_ns INTEGER NOT NULL DEFAULT 0;
CREATE INDEX samples_committed ON samples (namespace, committed_unix_ns) WHERE state = 'committed';
CREATE INDEX samples_failed ON samples (namespace, created_unix_ns) WHERE state = 'failed';
CREATE INDEX samples_read ON samples (namespace, reads) WHERE reads > 0;
CREATE INDEX samples_acked ON samples (namespace, acked_unix_ns) WHERE acked_unix_ns > 0;

CREATE TABLE namespaces (
    namespace TEXT PRIMARY KEY,
    samples   INTEGER NOT NULL,  -- committed
    bytes     INTEGER NOT NULL,  -- of their files
    failed    INTEGER NOT NULL   -- rows of failed samples
) WITHOUT ROWID;
INSERT INTO namespaces
    SELECT namespace, sum(state = 'committed'), sum(iif(state = 'committed', file_bytes, 0)), sum(state = 'failed')
    FROM samples WHERE state IN ('committed', 'failed') GROUP BY namespace;
CREATE TRIGGER namespaces_inserted AFTER INSERT ON samples WHEN new.state IN ('committed', 'failed') BEGIN
    INSERT INTO namespaces VALUES (
        new.namespace, new.state = 'committed', iif(new.state = 'committed', new.file_bytes, 0), new.state = 'failed'
    ) ON CONFLICT (namespace) DO UPDATE SET
        samples = samples + excluded.samples, bytes = bytes + excluded.bytes, failed = failed + excluded.failed;
END;
CREATE TRIGGER namespaces_deleted AFTER DELETE ON samples WHEN old.state IN ('committed', 'failed') BEGIN
    UPDATE namespaces SET
        samples = samples - (old.state = 'committed'),
        bytes = bytes - iif(old.state = 'committed', old.file_bytes, 0),
        failed = failed - (old.state = 'failed')
    WHERE namespace = old.namespace;
    DELETE FROM namespaces WHERE namespace = old.namespace AND samples = 0 AND failed = 0;
END;
CREATE TRIGGER namespaces_updated AFTER UPDATE OF state, file_bytes ON samples BEGIN
    INSERT INTO namespaces VALUES (
        new.namespace, new.state = 'committed', iif(new.state = 'committed', new.file_bytes, 0), new.state = 'failed'
    ) ON CONFLICT (namespace) DO UPDATE SET
        samples = samples + excluded.samples, bytes = bytes + excluded.bytes, failed = failed + excluded.failed;
    UPDATE namespaces SET
        samples = samples - (old.state = 'committed'),
        bytes = bytes - iif(old.state = 'committed', old.file_bytes, 0),
        failed = failed - (old.state = 'failed')
    WHERE namespace = old.namespace;
    DELETE FROM namespaces WHERE namespace = old.namespace AND samples = 0 AND failed = 0;
END;

CREATE TABLE leases (
    namespace     TEXT NOT NULL,
    sample_id     TEXT NOT NULL,
    holder        TEXT NOT NULL,     -- chosen by the reader
    until_unix_ns INTEGER NOT NULL,
    PRIMARY KEY (namespace, sample_id, holder)
) WITHOUT ROWID;
CREATE INDEX leases_until ON leases (until_unix_ns);
"""

# What version 3 adds.
INDEX = """
CREATE INDEX samples_committed_read ON samples (namespace, committed_unix_ns)
    WHERE state = 'committed' AND (reads > 0 OR acked_unix_ns > 0);
"""


# Each queue of candidates: the index, its first column that counts, and the rows in it.
QUEUES = {
    Queue.OLDEST: ("samples_committed", "committed_unix_ns", "state = 'committed'"),
    Queue.OLDEST_READ: (
        "samples_committed_read",
        "committed_unix_ns",
        "state = 'committed' AND (reads > 0 OR acked_unix_ns > 0)",
    ),
    Queue.READ: ("samples_read", "reads", "reads > 0 AND state = 'committed'"),
    Queue.ACKED: ("samples_acked", "acked_unix_ns", "acked_unix_ns > 0 AND state = 'committed'"),
    Queue.FAILED: ("samples_failed", "created_unix_ns", "state = 'failed'"),
    Queue.REFUSED: ("samples_refused", "created_unix_ns", "state = 'failed' AND dtype = ''"),
}
_COUNTS = frozenset({Queue.READ, Queue.ACKED})
_SUMMED = STORED.split(", ")[:-1]
_STATE, _COMMITTED = _SUMMED.index("state"), _SUMMED.index("committed_unix_ns")


def candidates(db: sqlite3.Connection, queue: Queue, namespace: str, after: tuple[int, int], limit: int) -> list[Candidate]:
    """Up to `limit` samples of a queue behind position `after`, in order. (n, -1) stands before all whose column is n."""
    index, column, rows = QUEUES[queue]
    query = (
        f"SELECT id FROM samples INDEXED BY {index} "
        f"WHERE namespace = ? AND {rows} AND ({column}, id) > (?, ?) ORDER BY {column}, id LIMIT ?"
    )
    db.execute("BEGIN")  # One state of the file: a row that is deleted meanwhile is no index that leads nowhere.
    try:
        found = db.execute(query, (namespace, *after, limit)).fetchall()
        return [_candidate(db, queue, namespace, number) for (number,) in found]
    finally:
        if db.in_transaction:  # Some errors have ended it.
            db.execute("ROLLBACK")


def _candidate(db: sqlite3.Connection, queue: Queue, namespace: str, number: int) -> Candidate:
    """What the row says, which has a checksum; what the index says of it has none. Raises MalformedRow."""
    row = db.execute(f"SELECT {STORED} FROM samples WHERE id = ?", (number,)).fetchone()
    if row is None:
        raise MalformedRow("an index of the catalogue leads nowhere")
    values = dict(zip(_SUMMED, checked(row), strict=True))
    _, column, _ = QUEUES[queue]
    failed = queue in (Queue.FAILED, Queue.REFUSED)
    state = State.FAILED if failed else State.COMMITTED
    if (values["namespace"], values["state"]) != (namespace, state) or (queue in _COUNTS and not values[column]):
        raise MalformedRow("an index of the catalogue leads to another row than it says")
    stamp = values["created_unix_ns"] if failed else values["committed_unix_ns"]
    position = (values[column], number)
    return Candidate(SampleKey(namespace, values["sample_id"]), stamp, values["file_bytes"], position, values["error_code"])


def committed_until(db: sqlite3.Connection, namespace: str, until_unix_ns: int) -> int:
    """How many samples of a namespace were committed by then: a walk over these alone."""
    (count,) = db.execute(
        "SELECT count(*) FROM samples INDEXED BY samples_committed "
        "WHERE namespace = ? AND state = 'committed' AND committed_unix_ns <= ?",
        (namespace, until_unix_ns),
    ).fetchone()
    return int(count)


def usage(db: sqlite3.Connection, namespace: str) -> Usage:
    row = db.execute("SELECT samples, bytes, failed FROM namespaces WHERE namespace = ?", (namespace,)).fetchone()
    return _usage((namespace, *row)) if row is not None else Usage(namespace)


def _usage(row: tuple[Any, ...]) -> Usage:
    if not isinstance(row[0], str) or not all(type(value) is int and value >= 0 for value in row[1:]):
        raise MalformedRow("a count of the catalogue is malformed")
    return Usage(*row)


def usages(db: sqlite3.Connection, after: str, limit: int) -> list[Usage]:
    """Namespaces behind `after` in the order of their names."""
    rows = db.execute("SELECT * FROM namespaces WHERE namespace > ? ORDER BY namespace LIMIT ?", (after, limit))
    return [_usage(row) for row in rows]


def latest_stamp(db: sqlite3.Connection) -> int:
    """The latest time that any row was created or committed at; 0 when there is none. Raises MalformedRow."""
    (created,) = db.execute("SELECT max(created_unix_ns) FROM samples").fetchone()
    latest = _stamp(created)
    for (namespace,) in db.execute("SELECT namespace FROM namespaces").fetchall():
        (committed,) = db.execute(
            "SELECT max(committed_unix_ns) FROM samples INDEXED BY samples_committed "
            "WHERE namespace = ? AND state = 'committed'",
            (namespace,),
        ).fetchone()
        latest = max(latest, _stamp(committed))
    return latest


def _stamp(value: object) -> int:
    if value is not None and not isinstance(value, int):
        raise MalformedRow("a time in the catalogue is none")
    return value or 0


# Reads, acks and leases.


def standing(db: sqlite3.Connection, key: SampleKey, now_unix_ns: int) -> Standing:
    row = find(db, key.namespace, key.sample_id)
    reads, acked = row[1][-2:] if row is not None else (0, 0)
    return Standing(reads, acked, leased_until(db, key, now_unix_ns))


def count_read(db: sqlite3.Connection, key: SampleKey, committed_unix_ns: int) -> None:
    row = find(db, key.namespace, key.sample_id)
    if row is not None and (row[1][_STATE], row[1][_COMMITTED]) == (State.COMMITTED, committed_unix_ns):
        change(db, row, reads=row[1][-2] + 1)


def ack(db: sqlite3.Connection, key: SampleKey, now_unix_ns: int) -> bool:
    """Notes that a reader is done with a committed sample; the first time stays. False when it is not committed."""
    row = find(db, key.namespace, key.sample_id)
    if row is None or row[1][_STATE] != State.COMMITTED:
        return False
    if not row[1][-1]:
        change(db, row, acked_unix_ns=now_unix_ns)
    return True


def leased_until(db: sqlite3.Connection, key: SampleKey, now_unix_ns: int) -> int:
    """When the last lease on a sample ends; 0 when none holds now."""
    query = f"SELECT {LEASE}, row_xxh3 FROM leases WHERE namespace = ? AND sample_id = ?"
    ends = [checked(row)[3] for row in db.execute(query, (key.namespace, key.sample_id))]
    return max((until for until in ends if until > now_unix_ns), default=0)


def lease(db: sqlite3.Connection, key: SampleKey, holder: str, until_unix_ns: int, leases_max: int, namespace_max: int) -> bool:
    """Give `holder` a committed sample until then, in place of a lease of its own.

    False when `leases_max` are held already, or `namespace_max` in its namespace.
    """
    name = (key.namespace, key.sample_id, holder)
    known = db.execute("SELECT 1 FROM leases WHERE namespace = ? AND sample_id = ? AND holder = ?", name).fetchone()
    if known is None:
        in_all, there = db.execute(
            "SELECT count(*), count(*) FILTER (WHERE namespace = ?) FROM leases", (key.namespace,)
        ).fetchone()
        if in_all >= leases_max or there >= namespace_max:
            return False
    values = (*name, until_unix_ns)
    db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", (*values, row_sum(values)))
    return True


def release(db: sqlite3.Connection, key: SampleKey, holder: str | None) -> None:
    """Drop the lease of `holder` on a sample; None: everybody's."""
    whose = (holder,) if holder is not None else ()
    also = " AND holder = ?" if holder is not None else ""
    db.execute(f"DELETE FROM leases WHERE namespace = ? AND sample_id = ?{also}", (key.namespace, key.sample_id, *whose))


def shorten_leases(db: sqlite3.Connection, until_unix_ns: int) -> None:
    """No lease lasts longer than until then. Raises MalformedRow."""
    for row in db.execute(f"SELECT {LEASE}, row_xxh3 FROM leases WHERE until_unix_ns > ?", (until_unix_ns,)).fetchall():
        values = (*checked(row)[:3], until_unix_ns)
        db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", (*values, row_sum(values)))


def forget_leases(db: sqlite3.Connection, now_unix_ns: int) -> None:
    """Drops the leases that have ended. Raises MalformedRow: a lease that says so may have a flipped bit."""
    for row in db.execute(f"SELECT {LEASE}, row_xxh3 FROM leases WHERE until_unix_ns <= ?", (now_unix_ns,)):
        checked(row)
    db.execute("DELETE FROM leases WHERE until_unix_ns <= ?", (now_unix_ns,))


# Deleting.


def mark_deleting(db: sqlite3.Connection, key: SampleKey) -> None:
    row = find(db, key.namespace, key.sample_id)
    if row is not None:
        change(db, row, state=str(State.DELETING))


def drop_deleting(db: sqlite3.Connection, keys: Sequence[SampleKey]) -> None:
    """Removes the rows that are still DELETING: one that was committed again meanwhile stays."""
    for key in keys:
        name = (key.namespace, key.sample_id)
        row = db.execute("SELECT id, state FROM samples WHERE namespace = ? AND sample_id = ?", name).fetchone()
        if row is not None and row[1] == State.DELETING:
            db.execute("DELETE FROM tags WHERE sample = ?", (row[0],))
            db.execute("DELETE FROM samples WHERE id = ?", (row[0],))
            db.execute("DELETE FROM leases WHERE namespace = ? AND sample_id = ?", name)


# What has to survive a restart, by name.


def get_meta(db: sqlite3.Connection, key: str) -> str | None:
    """None also where it is not what was told: a bit of it may have flipped, also one that makes it no text."""
    row = db.execute("SELECT CAST(value AS BLOB) FROM meta WHERE key = ?", (key,)).fetchone()
    text, _, digest = ("" if row is None else bytes(row[0]).decode(errors="replace")).rpartition(" ")
    return text if digest == str(row_sum((text,))) else None


def set_meta(db: sqlite3.Connection, key: str, value: str) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, f"{value} {row_sum((value,))}"))
