"""Questions to a catalogue in memory: what changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from slotstream.store.catalogue import page_token
from slotstream.store.catalogue.attempts import EXPIRED_S, LATE_S, Attempt, Generation
from slotstream.store.catalogue.of_request import id_ranges, is_of_request
from slotstream.store.catalogue.queries import Candidate, ListQuery, Queue, Standing, Usage
from slotstream.store.records import SampleKey, SampleRecord, State, compact_json, kept_model
from slotstream.store.shared_state import AttemptCounts
from slotstream.wire.errors import Interrupted
from support.memory_tables import Row, Tables

_T = TypeVar("_T")
_NS = 1_000_000_000
_PAGE_KEY = bytes(page_token.KEY_BYTES)


class MemoryQuestions:
    """Of one server. They go through `_ask`, which a model of a network may override."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._closed = False

    def _ask(self, question: Callable[[], _T]) -> _T:
        if self._closed:
            raise Interrupted("the catalogue is closed")
        with self._tables.lock:
            return question()

    def candidates(self, queue: Queue, namespace: str, after: tuple[int, int], limit: int) -> list[Candidate]:
        def question() -> list[Candidate]:
            rows = [row for key, row in self._tables.rows.items() if key.namespace == namespace]
            found = [one for row in rows if (one := _candidate(queue, row)) is not None and one.position > after]
            return sorted(found, key=lambda one: one.position)[:limit]

        return self._ask(question)

    def committed_until(self, namespace: str, until_unix_ns: int) -> int:
        def is_one(row: Row) -> bool:
            record = row.record
            return (record.namespace, record.state) == (
                namespace,
                State.COMMITTED,
            ) and record.committed_unix_ns <= until_unix_ns

        return self._ask(lambda: sum(map(is_one, self._tables.rows.values())))

    def usage(self, namespace: str) -> Usage:
        def question() -> Usage:
            records = [row.record for key, row in self._tables.rows.items() if key.namespace == namespace]
            stored = [record for record in records if record.state is State.COMMITTED]
            failed = sum(record.state is State.FAILED for record in records)
            return Usage(namespace, len(stored), sum(record.file_bytes for record in stored), failed)

        return self._ask(question)

    def usages(self, after: str, limit: int) -> list[Usage]:
        names = self._ask(lambda: sorted({key.namespace for key in self._tables.rows if key.namespace > after}))
        found = [usage for name in names if (usage := self.usage(name)).samples or usage.failed]
        return found[:limit]

    def standing(self, key: SampleKey) -> Standing:
        def question() -> Standing:
            row, until = self._tables.rows.get(key), self._tables.leased_until(key)
            return Standing(leased_until_unix_ns=until) if row is None else Standing(row.reads, row.acked, until)

        return self._ask(question)

    def get(self, key: SampleKey) -> SampleRecord | None:
        def question() -> SampleRecord | None:
            row = self._tables.rows.get(key)
            return None if row is None else row.record

        return self._ask(question)

    def list_page(self, query: ListQuery) -> tuple[list[SampleRecord], str]:
        before = page_token.unseal(_PAGE_KEY, query.page_token, query.fingerprint()) if query.page_token else None

        def question() -> list[Row]:
            rows = [row for row in self._tables.rows.values() if _is_asked_for(query, row.record)]
            if query.request_id:
                exact = [row for row in rows if row.record.sample_id == query.request_id]
                rows = exact or [row for row in rows if _is_of_request(query.request_id, row.record)]
            rows = [row for row in rows if before is None or _position(row) < before]
            return sorted(rows, key=_position, reverse=True)[: query.page_size + 1]

        rows = self._ask(question)
        page = rows[: query.page_size]
        token = page_token.seal(_PAGE_KEY, *_position(page[-1]), query.fingerprint()) if len(rows) > len(page) else ""
        return [row.record for row in page], token

    def scan_page(self, after: int, limit: int, namespace: str = "") -> list[tuple[int, SampleRecord]]:
        def question() -> list[tuple[int, SampleRecord]]:
            rows = [(row.number, row.record) for row in self._tables.rows.values() if row.number > after]
            return sorted((row for row in rows if namespace in ("", row[1].namespace)), key=lambda row: row[0])[:limit]

        return self._ask(question)

    def unfinished(self) -> list[SampleRecord]:
        states = (State.ARRIVING, State.DELETING)
        return self._ask(lambda: [row.record for row in self._tables.rows.values() if row.record.state in states])

    def totals(self) -> dict[State, tuple[int, int]]:
        def question() -> dict[State, tuple[int, int]]:
            found = dict.fromkeys(State, (0, 0))
            for row in self._tables.rows.values():
                samples, nbytes = found[row.record.state]
                found[row.record.state] = (samples + 1, nbytes + row.record.file_bytes)
            return found

        return self._ask(question)

    def ended_attempts(self, limit: int) -> list[Attempt]:
        def question() -> list[Attempt]:
            tables, now = self._tables, self._tables.clock()
            due = [
                (one.due, name, one)
                for name, one in tables.attempts.items()
                if one.due <= (now if one.ended else now - round(EXPIRED_S * _NS)) and tables.holds.get(name, 0) <= now
            ]
            return [Attempt(one.key, name, one.ended) for _, name, one in sorted(due, key=lambda due: due[:2])[:limit]]

        return self._ask(question)

    def count_attempts(self) -> AttemptCounts:
        def question() -> AttemptCounts:
            now, found = self._tables.clock(), self._tables.attempts
            due = [name for name, one in found.items() if one.due <= now - round(LATE_S * _NS)]
            ended = sum(one.ended for one in found.values())
            return AttemptCounts(len(found) - ended, ended, sum(self._tables.holds.get(name, 0) <= now for name in due))

        return self._ask(question)

    def oldest_attempt(self) -> int:
        return self._ask(lambda: min((one.begun for one in self._tables.attempts.values() if not one.ended), default=0))

    def known_attempts(self, attempts: Sequence[str], keys: Sequence[SampleKey]) -> set[str]:
        def is_known(name: str, key: SampleKey) -> bool:
            row = self._tables.rows.get(key)
            return name in self._tables.attempts or (row is not None and row.record.attempt == name)

        return self._ask(lambda: {name for name, key in zip(attempts, keys, strict=True) if is_known(name, key)})

    def open_attempts(self) -> dict[str, tuple[SampleKey, int]]:
        return self._ask(lambda: {name: (a.key, a.due) for name, a in self._tables.attempts.items() if not a.ended})

    def generation(self) -> Generation:
        return self._ask(lambda: self._tables.generation)

    def get_meta(self, name: str) -> str | None:
        return self._ask(lambda: self._tables.meta.get(name))


def _position(row: Row) -> tuple[int, int]:
    return row.record.created_unix_ns, row.number


def _is_asked_for(query: ListQuery, record: SampleRecord) -> bool:
    return (
        query.namespace in ("", record.namespace)
        and (query.namespaces is None or record.namespace in query.namespaces)
        and (not query.model or record.model in (query.model, kept_model(query.model)))
        and query.state in (None, record.state)
        and query.created_from_unix_ns <= record.created_unix_ns
        and (not query.created_until_unix_ns or record.created_unix_ns < query.created_until_unix_ns)
        and query.tags.items() <= record.tags.items()
    )


def _is_of_request(request_id: str, record: SampleRecord) -> bool:
    return any(
        low <= record.sample_id < high and is_of_request(record.sample_id, compact_json(dict(record.metadata)), low)
        for low, high in id_ranges(request_id)
    )


def _candidate(queue: Queue, row: Row) -> Candidate | None:
    """A row's place in a queue; None where it is not in it."""
    record = row.record
    if queue in (Queue.FAILED, Queue.REFUSED):
        if record.state is not State.FAILED or (queue is Queue.REFUSED and record.dtype):
            return None
        position, stamp = record.created_unix_ns, record.created_unix_ns
    else:
        places = {
            Queue.OLDEST: (True, record.committed_unix_ns),
            Queue.OLDEST_READ: (row.reads > 0 or row.acked > 0, record.committed_unix_ns),
            Queue.READ: (row.reads > 0, row.reads),
            Queue.ACKED: (row.acked > 0, row.acked),
        }
        is_in, position = places[queue]
        stamp = record.committed_unix_ns
        if not is_in or record.state is not State.COMMITTED:
            return None
    return Candidate(record.key, stamp, record.file_bytes, (position, row.number), record.error_code)
