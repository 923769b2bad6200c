"""The catalogue's tables and queries. `samples` is meant to be read by people too: `sqlite3 DIR/catalog.sqlite`.

samples   one row a sample, in every state; see the comments in SCHEMA
tags      one row a sample and tag, so that a tag filter is one index walk
totals    samples and bytes by state, kept by triggers, so that metrics never scan
meta      key and value; `generation` counts the starts (see `seal`), `page_key` seals page tokens

What retention needs beside these is in `retention_sql`, the checksums of rows in `row_sums`, the versions in `schema`.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from slotstream.store.catalogue import page_token
from slotstream.store.catalogue.of_request import OF_REQUEST_MAX, id_ranges, is_of_request
from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.catalogue.row_values import record_of, values_of
from slotstream.store.catalogue.sqlite.row_sums import COLUMNS, STORED, MalformedRow, checked, named_and_checked, row_sum
from slotstream.store.records import SampleRecord, State, kept_model

_TAG_SAMPLE = 1000  # Rows looked at to guess which of several tags is the rarest.

SCHEMA = """
CREATE TABLE samples (
    id                INTEGER PRIMARY KEY,
    namespace         TEXT NOT NULL,
    sample_id         TEXT NOT NULL,
    state             TEXT NOT NULL CHECK (state IN ('arriving', 'committed', 'failed', 'deleting')),
    model             TEXT NOT NULL,
    dtype             TEXT NOT NULL,     -- safetensors spelling
    layer_ids         TEXT NOT NULL,     -- JSON list, in the file's order
    hidden_size       INTEGER NOT NULL,  -- elements
    num_tokens        INTEGER NOT NULL,  -- rows; the most it can hold while arriving
    file_bytes        INTEGER NOT NULL,  -- 0 until committed
    created_unix_ns   INTEGER NOT NULL,
    committed_unix_ns INTEGER NOT NULL,  -- 0 until committed
    error_code        TEXT NOT NULL,     -- stable code, when failed
    error_message     TEXT NOT NULL,
    tags              TEXT NOT NULL,     -- JSON object of strings
    metadata          TEXT NOT NULL,     -- JSON object of strings: what the connector recorded
    header_xxh3       TEXT NOT NULL,     -- xxh3-64 of the file's header, 16 hex characters
    UNIQUE (namespace, sample_id)
);
CREATE INDEX samples_created ON samples (created_unix_ns);
CREATE INDEX samples_namespace ON samples (namespace, created_unix_ns);
CREATE INDEX samples_model ON samples (model, created_unix_ns);
CREATE INDEX samples_namespace_model ON samples (namespace, model, created_unix_ns);
CREATE INDEX samples_unfinished ON samples (state, created_unix_ns) WHERE state <> 'committed';

CREATE TABLE tags (
    key             TEXT NOT NULL,
    value           TEXT NOT NULL,
    created_unix_ns INTEGER NOT NULL,
    sample          INTEGER NOT NULL REFERENCES samples (id),
    PRIMARY KEY (key, value, created_unix_ns, sample)
) WITHOUT ROWID;
CREATE INDEX tags_sample ON tags (sample);

CREATE TABLE totals (state TEXT PRIMARY KEY, samples INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO totals VALUES ('arriving', 0, 0), ('committed', 0, 0), ('failed', 0, 0), ('deleting', 0, 0);
CREATE TRIGGER samples_inserted AFTER INSERT ON samples BEGIN
    UPDATE totals SET samples = samples + 1, bytes = bytes + new.file_bytes WHERE state = new.state;
END;
CREATE TRIGGER samples_deleted AFTER DELETE ON samples BEGIN
    UPDATE totals SET samples = samples - 1, bytes = bytes - old.file_bytes WHERE state = old.state;
END;
CREATE TRIGGER samples_updated AFTER UPDATE OF state, file_bytes ON samples BEGIN
    UPDATE totals SET samples = samples - 1, bytes = bytes - old.file_bytes WHERE state = old.state;
    UPDATE totals SET samples = samples + 1, bytes = bytes + new.file_bytes WHERE state = new.state;
END;

CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""

_COLUMNS = COLUMNS
_QUALIFIED = ", ".join(f"s.{name}" for name in STORED.split(", "))
_GET = f"SELECT {STORED} FROM samples WHERE namespace = ? AND sample_id = ?"
_UPSERT = (
    f"INSERT INTO samples ({STORED}) VALUES ({', '.join('?' * len(STORED.split(', ')))}) "
    "ON CONFLICT (namespace, sample_id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in STORED.split(", ")[2:])
    + " RETURNING id"
)


def record_from_row(row: tuple[Any, ...]) -> SampleRecord:
    """The record of a row of `STORED`. Raises MalformedRow when the row cannot be one of ours."""
    try:
        return record_of(checked(row))
    except ValueError as error:
        raise MalformedRow(str(error)) from error


def put(db: sqlite3.Connection, record: SampleRecord) -> None:
    """Insert `record`, or replace the row of the same name, with its tags."""
    values = (*values_of(record), 0, 0)
    (row_id,) = db.execute(_UPSERT, (*values, row_sum(values))).fetchone()
    db.execute("DELETE FROM tags WHERE sample = ?", (row_id,))
    put_tags(db, row_id, record)


def put_tags(db: sqlite3.Connection, row_id: int, record: SampleRecord) -> None:
    tags = [(key, value, record.created_unix_ns, row_id) for key, value in record.tags.items()]
    if tags:
        db.executemany("INSERT INTO tags VALUES (?, ?, ?, ?)", tags)


def get(db: sqlite3.Connection, namespace: str, sample_id: str) -> SampleRecord | None:
    row = db.execute(_GET, (namespace, sample_id)).fetchone()
    if row is None:
        return None
    record = record_from_row(row)
    if (record.namespace, record.sample_id) != (namespace, sample_id):
        raise MalformedRow("an index of the catalogue leads to another sample's row")
    return record


def scan(db: sqlite3.Connection, after_id: int, limit: int, namespace: str = "") -> list[tuple[int, SampleRecord]]:
    """Up to `limit` rows with an id above `after_id`, in id order: for walks over everything, page by page."""
    where = "AND namespace = ?" if namespace else ""
    values: tuple[object, ...] = (after_id, namespace, limit) if namespace else (after_id, limit)
    rows = db.execute(f"SELECT id, {STORED} FROM samples WHERE id > ? {where} ORDER BY id LIMIT ?", values)
    page: list[tuple[int, SampleRecord]] = []
    for row in rows:
        if row[0] <= after_id:  # In a damaged tree: a walk that follows it might never end.
            raise MalformedRow("the rows of the catalogue are out of order")
        after_id = row[0]
        page.append((after_id, record_from_row(row[1:])))
    return page


def names(db: sqlite3.Connection, after_id: int, limit: int, *, check: bool) -> list[tuple[int, str, str, str]]:
    """As `scan`, of each row no more than (id, namespace, sample_id, state). `check`: that its checksum holds."""
    query = "SELECT id, namespace, sample_id, state FROM samples WHERE id > ? ORDER BY id LIMIT ?"
    rows = named_and_checked(db, after_id, limit) if check else db.execute(query, (after_id, limit)).fetchall()
    for row in rows:
        if row[0] <= after_id:
            raise MalformedRow("the rows of the catalogue are out of order")
        after_id = row[0]
    return rows


def unfinished(db: sqlite3.Connection) -> list[SampleRecord]:
    """Rows in states that only a running server may leave behind for long."""
    states = "state IN ('arriving', 'deleting') AND state <> 'committed'"
    rows = db.execute(f"SELECT {STORED} FROM samples INDEXED BY samples_unfinished WHERE {states}")
    return [record_from_row(row) for row in rows]


def list_page(db: sqlite3.Connection, query: ListQuery) -> tuple[list[SampleRecord], str]:
    """One page, newest first, and the token of the next one ("" on the last). Raises BadPage."""
    key = page_key(db)
    before = page_token.unseal(key, query.page_token, query.fingerprint()) if query.page_token else None
    # One walk a namespace, each as short as the page, and merged: a walk over all would take as long as others have samples.
    parts = [query] if query.namespaces is None else [replace(query, namespace=name) for name in query.namespaces]
    if (kept := kept_model(query.model)) != query.model:  # What is not stored keeps the beginning of a long name.
        parts += [replace(part, model=kept) for part in parts]
    rows: list[tuple[Any, ...]] = []
    for part in parts:
        sql, values = _list_sql(db, part, before)
        rows += db.execute(sql, (*values, query.page_size + 1)).fetchall()
    if len(parts) > 1:
        rows.sort(key=lambda row: (row[1], row[0]), reverse=True)
    page = rows[: query.page_size]
    more = len(rows) > query.page_size
    token = page_token.seal(key, page[-1][1], page[-1][0], query.fingerprint()) if more else ""
    return [record_from_row(row[2:]) for row in page], token


def request_rows(db: sqlite3.Connection, namespace: str, request_id: str) -> list[int]:
    """The rows of a request's samples, by what vLLM calls it; "" is every namespace. Each is found along the ids' own index."""
    spaces = "(SELECT ? AS namespace)" if namespace else "(SELECT namespace FROM namespaces WHERE ? = '')"
    exact = f"SELECT s.id FROM {spaces} AS n CROSS JOIN samples AS s ON s.namespace = n.namespace AND s.sample_id = ?"
    if found := db.execute(exact, (namespace, request_id)).fetchall():
        return [row_id for (row_id,) in found]
    ranges = id_ranges(request_id)
    if not ranges:
        return []
    query = (
        f"WITH ranges (low, high) AS (VALUES {', '.join(['(?, ?)'] * len(ranges))}) "
        f"SELECT s.id, s.sample_id, s.metadata, ranges.low FROM {spaces} AS n CROSS JOIN ranges CROSS JOIN samples AS s "
        "ON s.namespace = n.namespace AND s.sample_id >= ranges.low AND s.sample_id < ranges.high LIMIT ?"
    )
    similar = db.execute(query, (*chain(*ranges), namespace, OF_REQUEST_MAX))
    return [row_id for row_id, sample_id, metadata, low in similar if is_of_request(sample_id, metadata, low)]


def totals(db: sqlite3.Connection) -> dict[State, tuple[int, int]]:
    """State -> (samples, bytes)."""
    rows = db.execute("SELECT state, samples, bytes FROM totals").fetchall()
    try:
        return {State(state): (int(samples), int(nbytes)) for state, samples, nbytes in rows}
    except (ValueError, TypeError) as error:
        raise MalformedRow("a total of the catalogue is malformed") from error


def make_page_key(db: sqlite3.Connection) -> None:
    """Give the catalogue the key of its page tokens, unless it has one."""
    db.execute("INSERT OR IGNORE INTO meta VALUES ('page_key', ?)", (secrets.token_hex(page_token.KEY_BYTES),))


def page_key(db: sqlite3.Connection) -> bytes:
    """Raises MalformedRow where there is none."""
    row = db.execute("SELECT value FROM meta WHERE key = 'page_key'").fetchone()
    if row is None or not isinstance(row[0], str) or not page_token.is_key(row[0]):
        raise MalformedRow("the key of the page tokens is gone")
    return bytes.fromhex(row[0])


def _list_sql(db: sqlite3.Connection, query: ListQuery, before: tuple[int, int] | None) -> tuple[str, list[object]]:
    """The statement walks one index in the order of the listing, so that a page costs the same at any table size."""
    tags = _rarest_first(db, query.tags)
    where: list[str] = []
    values: list[object] = []
    if query.request_id:
        found = request_rows(db, query.namespace, query.request_id)
        source = "samples AS s NOT INDEXED"  # By their numbers: they are few.
        created, row_id = "s.created_unix_ns", "s.id"
        where.append(f"s.id IN ({', '.join('?' * len(found))})")
        values += found
    elif tags:
        source = "tags AS t CROSS JOIN samples AS s ON s.id = t.sample"
        created, row_id = "t.created_unix_ns", "t.sample"
        where.append("t.key = ? AND t.value = ?")
        values += tags.pop(0)
    else:
        source = f"samples AS s INDEXED BY {_index(query)}"
        created, row_id = "s.created_unix_ns", "s.id"
    for key, value in tags:
        where.append(
            f"EXISTS (SELECT 1 FROM tags AS o WHERE o.key = ? AND o.value = ? AND o.created_unix_ns = {created} "
            f"AND o.sample = {row_id})"
        )
        values += [key, value]
    if query.state is not None:
        where.append(f"s.state = '{query.state}'")
        if _index(query) == "samples_unfinished" and not query.request_id:
            where.append("s.state <> 'committed'")  # SQLite uses a partial index only when its condition stands here.
    filters: tuple[tuple[str, str | int], ...] = (
        ("s.namespace = ?", query.namespace),
        ("s.model = ?", query.model),
        (f"{created} >= ?", query.created_from_unix_ns),
        (f"{created} < ?", query.created_until_unix_ns),
    )
    for condition, wanted in filters:
        if wanted:
            where.append(condition)
            values.append(wanted)
    if before is not None:
        where.append(f"({created}, {row_id}) < (?, ?)")
        values += before
    condition = f"WHERE {' AND '.join(where)} " if where else ""
    columns = f"{row_id}, {created}, {_QUALIFIED}"
    return f"SELECT {columns} FROM {source} {condition}ORDER BY {created} DESC, {row_id} DESC LIMIT ?", values


def _index(query: ListQuery) -> str:
    if query.state not in (None, State.COMMITTED):
        return "samples_unfinished"  # Few samples are; nearly all rows of every other index are committed.
    if query.namespace and query.model:
        return "samples_namespace_model"
    if query.namespace:
        return "samples_namespace"
    return "samples_model" if query.model else "samples_created"


def _rarest_first(db: sqlite3.Connection, tags: Mapping[str, str]) -> list[tuple[str, str]]:
    if len(tags) < 2:
        return list(tags.items())

    def count(tag: tuple[str, str]) -> int:
        rows = "SELECT 1 FROM tags WHERE key = ? AND value = ? LIMIT ?"
        return int(db.execute(f"SELECT count(*) FROM ({rows})", (*tag, _TAG_SAMPLE)).fetchone()[0])

    return sorted(tags.items(), key=count)
