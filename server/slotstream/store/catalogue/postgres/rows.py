"""The rows of one transaction: locked in the order of their keys, changed in memory, and written together in the end.

The transactions of other servers lock in the same order, so they wait for each other and seldom meet crosswise. A row that
another transaction adds meanwhile shows when it is written here too: then all is undone and done again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import psycopg

from slotstream.store.catalogue.postgres.failures import RowDamaged
from slotstream.store.catalogue.postgres.texts import kept, told
from slotstream.store.catalogue.row_values import SUMMED, record_of, row_sum, values_of
from slotstream.store.records import SampleKey, SampleRecord

_Values = tuple[Any, ...]  # Of STORED.

_SUMMED = f"{SUMMED}, attempt"
STORED = f"{_SUMMED}, row_xxh3"
NAMES = STORED.split(", ")
_AT = {name: place for place, name in enumerate(NAMES)}
_NUMBERS = frozenset(
    ["hidden_size", "num_tokens", "file_bytes", "created_unix_ns", "committed_unix_ns", "reads", "acked_unix_ns", "row_xxh3"]
)
_TEXTS = tuple(_AT[name] for name in ("model", "error_message"))  # What may have any character.
_ARRAYS = ", ".join(f"%s::{'bigint' if name in _NUMBERS else 'text'}[]" for name in NAMES)

_LOCK = (
    f"SELECT s.id, {', '.join(f's.{name}' for name in NAMES)} "
    "FROM unnest(%s::text[], %s::text[]) AS k (namespace, sample_id) "
    "JOIN samples AS s ON s.namespace = k.namespace AND s.sample_id = k.sample_id "
    "ORDER BY s.namespace, s.sample_id FOR UPDATE OF s"
)
# Numbers are given in the order in which the samples were asked for, and rows are added in that of their keys.
_INSERT = (
    f"WITH numbered AS MATERIALIZED (SELECT nextval('sample_numbers') AS id, n.* FROM unnest({_ARRAYS}) AS n ({STORED})) "
    f"INSERT INTO samples (id, {STORED}) SELECT id, {STORED} FROM numbered ORDER BY namespace, sample_id "
    "RETURNING namespace, sample_id, id"
)
_UPDATE = (
    f"UPDATE samples AS s SET {', '.join(f'{name} = n.{name}' for name in NAMES[2:])} "
    f"FROM unnest(%s::bigint[], {_ARRAYS}) AS n (id, {STORED}) WHERE s.id = n.id"
)
_TAGS = (
    "INSERT INTO tags (key, value, created_unix_ns, sample) "
    "SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[])"
)


def stored_values(row: Sequence[Any]) -> _Values:
    """A row of `STORED`, as the database has it, with the texts that we know. Its checksum is not looked at."""
    values = list(row)
    for place in _TEXTS:
        values[place] = told(values[place])
    return tuple(values)


def checked(values: _Values) -> _Values:
    """Without the checksum. Raises RowDamaged."""
    if _sum(values[:-1]) != values[-1]:
        raise RowDamaged(f"the catalogue's row of {values[0]}/{values[1]} does not match its checksum")
    return values[:-1]


def record_from_row(row: Sequence[Any]) -> SampleRecord:
    """The record of a row of `STORED`. Raises RowDamaged."""
    return _record(stored_values(row))


def _record(values: _Values) -> SampleRecord:
    try:
        record = record_of(checked(values))
    except ValueError as error:
        raise RowDamaged(f"the catalogue's row of {values[0]}/{values[1]} cannot be one of a sample") from error
    return replace(record, attempt=attempt) if (attempt := values[_AT["attempt"]]) else record


def _summed(values: Sequence[Any]) -> _Values:
    return (*values, _sum(values))


def _sum(values: Sequence[Any]) -> int:
    """Of the columns of `_SUMMED`. The attempt counts where there is one: rows had none before."""
    return row_sum(values if values[-1] else values[:-1])


class Rows:
    """Of one transaction and its keys; other keys may not be asked for."""

    def __init__(self, db: psycopg.Connection, keys: Iterable[SampleKey]) -> None:
        """Locks them."""
        self._db = db
        ordered = sorted(set(keys), key=lambda key: (key.namespace, key.sample_id))
        self._ids: dict[SampleKey, int] = {}
        self._before: dict[SampleKey, _Values] = {}
        self._now: dict[SampleKey, _Values | None] = dict.fromkeys(ordered)
        self._added: dict[SampleKey, None] = {}  # In the order in which they were.
        self._undo: list[tuple[SampleKey, _Values | None]] = []  # What the operation changed, and what it was.
        self.moved: list[SampleKey] = []  # Once they are written: those whose state is another one, or whose row is.
        if ordered:
            names = [key.namespace for key in ordered], [key.sample_id for key in ordered]
            for number, *row in db.execute(_LOCK, names):
                key, values = SampleKey(row[0], row[1]), stored_values(row)
                self._ids[key] = number
                self._before[key] = self._now[key] = values

    def find(self, key: SampleKey) -> dict[str, Any] | None:
        """All columns but the checksum. Raises RowDamaged."""
        values = self._now[key]
        return None if values is None else dict(zip(NAMES[:-1], checked(values), strict=True))

    def get(self, key: SampleKey) -> SampleRecord | None:
        """Raises RowDamaged."""
        values = self._now[key]
        return None if values is None else _record(values)

    def put(self, record: SampleRecord) -> None:
        """Add `record`, or replace the row of the same name."""
        self._set(record.key, _summed((*values_of(record), 0, 0, record.attempt)))

    def change(self, key: SampleKey, **changes: object) -> None:
        """Change columns of a row that is there. Raises RowDamaged."""
        found = self.find(key)
        assert found is not None, "who changes a row has looked for it"
        self._set(key, _summed([changes.get(name, value) for name, value in found.items()]))

    def drop(self, key: SampleKey) -> None:
        self._set(key, None)

    def begin(self) -> None:
        """An operation begins, which `undo` would undo."""
        self._undo.clear()

    def undo(self) -> None:
        while self._undo:
            self._put_back(*self._undo.pop())

    def _set(self, key: SampleKey, values: _Values | None) -> None:
        self._undo.append((key, self._now[key]))
        self._put_back(key, values)

    def _put_back(self, key: SampleKey, values: _Values | None) -> None:
        self._now[key] = values
        if values is None:
            self._added.pop(key, None)
        elif key not in self._before:
            self._added.setdefault(key)

    def write(self) -> None:
        """What changed."""
        self.moved = [key for key, values in self._now.items() if _standing(values) != _standing(self._before.get(key))]
        gone = [self._ids[key] for key in self._before if self._now[key] is None]
        if gone:
            self._db.execute("DELETE FROM samples WHERE id = ANY (%s)", (gone,))
        changed = {
            key: values for key in self._before if (values := self._now[key]) is not None and values != self._before[key]
        }
        if changed:
            self._db.execute(_UPDATE, ([self._ids[key] for key in changed], *_columns(changed.values())))
        added = {key: values for key in self._added if (values := self._now[key]) is not None}
        if added:
            found = self._db.execute(_INSERT, _columns(added.values()))
            self._ids.update({SampleKey(namespace, sample_id): number for namespace, sample_id, number in found})
        retagged = [key for key, values in changed.items() if _tagging(values) != _tagging(self._before[key])]
        if retagged:
            self._db.execute("DELETE FROM tags WHERE sample = ANY (%s)", ([self._ids[key] for key in retagged],))
        tags = []
        for key in (*retagged, *added):
            text, created = _tagging(changed.get(key) or added[key])
            tags += [(kept(name), kept(value), created, self._ids[key]) for name, value in json.loads(text).items()]
        if tags:
            self._db.execute(_TAGS, [list(column) for column in zip(*tags, strict=True)])


def _tagging(values: _Values) -> tuple[str, int]:
    """All that the rows of `tags` are made of."""
    return values[_AT["tags"]], values[_AT["created_unix_ns"]]


def _standing(values: _Values | None) -> tuple[str, int] | None:
    """What somebody who waits for the sample wants to hear of."""
    return None if values is None else (values[_AT["state"]], values[_AT["created_unix_ns"]])


def _columns(rows: Iterable[_Values]) -> list[list[Any]]:
    columns = [list(column) for column in zip(*rows, strict=True)]
    for place in _TEXTS:
        columns[place] = [kept(text) for text in columns[place]]
    return columns
