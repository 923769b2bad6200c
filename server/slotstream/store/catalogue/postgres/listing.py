"""Pages of a listing. Each walks one index in the order of the pages: a page costs the same at any number of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psycopg

from slotstream.store.catalogue import page_token
from slotstream.store.catalogue.of_request import OF_REQUEST_MAX, id_ranges, is_of_request
from slotstream.store.catalogue.postgres.failures import RowDamaged
from slotstream.store.catalogue.postgres.rows import NAMES, record_from_row
from slotstream.store.catalogue.postgres.texts import kept
from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.records import SampleRecord, State, kept_model

_TAG_SAMPLE = 1000  # Rows looked at to guess which of several tags is the rarest.
_QUALIFIED = ", ".join(f"s.{name}" for name in NAMES)


def list_page(db: psycopg.Connection, query: ListQuery) -> tuple[list[SampleRecord], str]:
    """One page, newest first, and the token of the next one ("" on the last). Raises BadPage and RowDamaged."""
    key = _page_key(db)
    before = page_token.unseal(key, query.page_token, query.fingerprint()) if query.page_token else None
    # One walk a namespace, each as short as the page, and merged: a walk over all would take as long as others have samples.
    parts = [query] if query.namespaces is None else [replace(query, namespace=name) for name in query.namespaces]
    if (cut := kept_model(query.model)) != query.model:  # What is not stored keeps the beginning of a long name.
        parts += [replace(part, model=cut) for part in parts]
    if not parts:
        return [], ""
    tags = _rarest_first(db, query.tags)
    texts, values = [], []
    for part in parts:
        text, of_part = _walk(db, part, tags, before)
        texts.append(f"({text})")
        values += [*of_part, query.page_size + 1]
    text = " UNION ALL ".join(texts)
    if len(parts) > 1:
        text = f"SELECT * FROM ({text}) AS parts ORDER BY 2 DESC, 1 DESC LIMIT %s"
        values.append(query.page_size + 1)
    rows = db.execute(text, values).fetchall()
    page = rows[: query.page_size]
    more = len(rows) > query.page_size
    token = page_token.seal(key, page[-1][1], page[-1][0], query.fingerprint()) if more else ""
    return [record_from_row(row[2:]) for row in page], token


def _page_key(db: psycopg.Connection) -> bytes:
    """Raises RowDamaged where there is none."""
    row = db.execute("SELECT value FROM meta WHERE key = 'page_key'").fetchone()
    if row is None or not page_token.is_key(row[0]):
        raise RowDamaged("the key of the page tokens is gone")
    return bytes.fromhex(row[0])


def _walk(
    db: psycopg.Connection, query: ListQuery, tags: list[tuple[str, str]], before: tuple[int, int] | None
) -> tuple[str, list[Any]]:
    """The statement of one walk, which ends with a LIMIT, and its values but for that."""
    created, number, source, where = "s.created_unix_ns", "s.id", "samples AS s", ["true"]
    values: list[Any] = []
    if query.request_id:
        where.append("s.id = ANY (%s::bigint[])")
        values.append(_request_rows(db, query.namespace, query.request_id))
    elif tags:
        created, number, source = "t.created_unix_ns", "t.sample", "tags AS t JOIN samples AS s ON s.id = t.sample"
        where.append("t.key = %s AND t.value = %s")
        values += tags[0]
        tags = tags[1:]
    for key, value in tags:
        where.append(
            f"EXISTS (SELECT 1 FROM tags AS o WHERE o.key = %s AND o.value = %s AND o.created_unix_ns = {created} "
            f"AND o.sample = {number})"
        )
        values += [key, value]
    if query.state is not None:
        where.append(f"s.state = '{query.state}'")
        if query.state is not State.COMMITTED:
            where.append("s.state <> 'committed'")  # The index of few samples has this condition.
    filters: tuple[tuple[str, str | int], ...] = (
        ("s.namespace = %s", query.namespace),
        ("s.model = %s", kept(query.model)),
        (f"{created} >= %s", query.created_from_unix_ns),
        (f"{created} < %s", query.created_until_unix_ns),
    )
    for condition, wanted in filters:
        if wanted:
            where.append(condition)
            values.append(wanted)
    if before is not None:
        where.append(f"({created}, {number}) < (%s, %s)")
        values += before
    text = f"SELECT {number}, {created}, {_QUALIFIED} FROM {source} WHERE {' AND '.join(where)}"
    return f"{text} ORDER BY {created} DESC, {number} DESC LIMIT %s", values


def _rarest_first(db: psycopg.Connection, tags: Mapping[str, str]) -> list[tuple[str, str]]:
    """The tags as the tables have them."""
    spelled = [(kept(key), kept(value)) for key, value in tags.items()]
    if len(spelled) < 2:
        return spelled

    def count(tag: tuple[str, str]) -> int:
        rows = f"SELECT 1 FROM tags WHERE key = %s AND value = %s LIMIT {_TAG_SAMPLE}"
        row = db.execute(f"SELECT count(*) FROM ({rows}) AS found", tag).fetchone()
        return 0 if row is None else int(row[0])

    return sorted(spelled, key=count)


def _request_rows(db: psycopg.Connection, namespace: str, request_id: str) -> list[int]:
    """The rows of a request's samples, by what vLLM calls it; "" is every namespace. Each is found along the ids' own index."""
    spaces = "(SELECT %s AS namespace)" if namespace else "(SELECT DISTINCT namespace FROM deltas WHERE %s = '')"
    exact = f"SELECT s.id FROM {spaces} AS n JOIN samples AS s ON s.namespace = n.namespace AND s.sample_id = %s"
    if found := db.execute(exact, (namespace, kept(request_id))).fetchall():
        return [number for (number,) in found]
    ranges = id_ranges(request_id)
    if not ranges:
        return []
    similar = db.execute(
        f"SELECT s.id, s.sample_id, s.metadata, r.low FROM {spaces} AS n "
        "CROSS JOIN unnest(%s::text[], %s::text[]) AS r (low, high) CROSS JOIN LATERAL ("
        "SELECT id, sample_id, metadata FROM samples WHERE namespace = n.namespace "
        f"AND sample_id >= r.low AND sample_id < r.high LIMIT {OF_REQUEST_MAX}) AS s LIMIT {OF_REQUEST_MAX}",
        (namespace, [low for low, _ in ranges], [high for _, high in ranges]),
    )
    return [number for number, sample_id, metadata, low in similar if is_of_request(sample_id, metadata, low)]
