"""A catalogue of several servers in memory: a model of `SharedCatalogue`, without a database and without a disk.

Each operation is a function over the tables, done at once and alone: what a transaction is.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from slotstream.store.catalogue import page_token
from slotstream.store.catalogue.attempts import EXPIRED_S, LIFE_S, REMOVED_AFTER_S, Attempt, Generation, SharedCatalogue
from slotstream.store.catalogue.holds import Holds, ReadHold
from slotstream.store.catalogue.of_request import id_ranges, is_of_request
from slotstream.store.catalogue.queries import Candidate, ListQuery, Queue, Standing, Usage
from slotstream.store.records import SampleKey, SampleRecord, State, compact_json, kept_model
from slotstream.wire.errors import Interrupted, SampleNotFound, StoreFull

_T = TypeVar("_T")
_NS = 1_000_000_000
_PAGE_KEY = bytes(page_token.KEY_BYTES)


@dataclass
class Row:
    """Of one sample."""

    number: int
    record: SampleRecord
    reads: int = 0
    acked: int = 0


@dataclass
class Begun:
    """One attempt."""

    key: SampleKey
    begun: int
    due: int
    ended: bool = False


class Tables:
    """What all that open the catalogue share. `clock`: Unix nanoseconds."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.rows: dict[SampleKey, Row] = {}
        self.attempts: dict[str, Begun] = {}
        self.holds: dict[str, int] = {}
        self.leases: dict[tuple[SampleKey, str], int] = {}
        self.meta: dict[str, str] = {}
        self.failures: dict[str, tuple[float, int]] = {}  # Peer -> how many it may still leave, and when that was so.
        self.name, self.generation = "memory", 0
        self.numbers = itertools.count(1)
        self.term = 0
        self.leader: object = None
        self.told: list[Callable[[SampleKey | None], None]] = []
        self.lock = threading.RLock()  # Of each operation. Nobody waits while it is held.

    # What operations are made of. Each is called with the lock held.

    def put(self, record: SampleRecord) -> None:
        row = self.rows.get(record.key)
        self.rows[record.key] = Row(row.number if row is not None else next(self.numbers), record)

    def drop(self, key: SampleKey) -> None:
        row = self.rows.pop(key)
        if row.record.attempt:
            self.leave(key, row.record.attempt)
            for attempt in self.attempts.values():
                if attempt.key == key and not attempt.ended:
                    self.end(attempt)
        self.release(key)

    def leave(self, key: SampleKey, attempt: str) -> None:
        now = self.clock()
        self.attempts.setdefault(attempt, Begun(key, now, now + round(REMOVED_AFTER_S * _NS), ended=True))

    def end(self, attempt: Begun) -> None:
        attempt.ended, attempt.due = True, self.clock() + round(REMOVED_AFTER_S * _NS)

    def is_open(self, key: SampleKey) -> bool:
        return any(attempt.key == key and not attempt.ended for attempt in self.attempts.values())

    def open_attempt(self, name: str) -> Begun | None:
        found = self.attempts.get(name)
        return None if found is None or found.ended else found

    def mark(self, row: Row) -> None:
        """It is deleted."""
        if row.record.attempt:
            self.drop(row.record.key)
        else:
            row.record = replace(row.record, state=State.DELETING)

    def leased_until(self, key: SampleKey) -> int:
        now = self.clock()
        return max((until for (leased, _), until in self.leases.items() if leased == key and until > now), default=0)

    def release(self, key: SampleKey, holder: str | None = None) -> None:
        for one in [one for one in self.leases if one[0] == key and holder in (None, one[1])]:
            del self.leases[one]

    def state(self, key: SampleKey) -> State | None:
        row = self.rows.get(key)
        return None if row is None else row.record.state


class MemoryCatalogue(SharedCatalogue):
    """One server's. Changes go through `_do`, and questions through `_ask`, which a model of a network may override."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._reading = Holds()
        self._closed = False
        self._told: list[Callable[[SampleKey | None], None]] = []

    def __str__(self) -> str:
        return "a catalogue in memory"

    def _do(self, run: Callable[[], _T], key: SampleKey | None = None, *, is_commit: bool = False) -> Future[_T]:
        """One operation; `key`: of the sample that it may change. What it raises is its answer."""
        future: Future[_T] = Future()
        if self._closed:
            future.set_exception(Interrupted("the catalogue is closed"))
            return future
        try:
            future.set_result(self._transact(run, key))
        except Exception as error:
            future.set_exception(error)
        return future

    def _transact(self, run: Callable[[], _T], key: SampleKey | None) -> _T:
        with self._tables.lock:
            before = self._standing(key)
            result = run()
            moved = key is not None and self._standing(key) != before
        for told in self._tables.told if moved else ():
            told(key)
        return result

    def _ask(self, question: Callable[[], _T]) -> _T:
        if self._closed:
            raise Interrupted("the catalogue is closed")
        with self._tables.lock:
            return question()

    def _standing(self, key: SampleKey | None) -> Any:
        row = None if key is None else self._tables.rows.get(key)
        return None if row is None else (row.record.state, row.record.created_unix_ns)

    # Samples on their way.

    def begin(self, record: SampleRecord) -> Future[bool]:
        def operation() -> bool:
            tables, now = self._tables, self._tables.clock()
            if record.attempt:
                begun = Begun(record.key, now, now + round(LIFE_S * _NS))
                tables.attempts.setdefault(record.attempt, begun)
            row = tables.rows.get(record.key)
            if row is not None and row.record.state is not State.FAILED:
                return False
            tables.put(replace(record, metadata={}, attempt=row.record.attempt if row is not None else "").slim())
            return True

        return self._do(operation, record.key)

    def commit(self, record: SampleRecord) -> Future[SampleRecord | None]:
        def operation() -> SampleRecord | None:
            tables = self._tables
            row = tables.rows.get(record.key) if record.attempt else None
            if row is not None and row.record.state is State.COMMITTED:
                return None if row.record.attempt == record.attempt else row.record
            if record.attempt:
                if tables.open_attempt(record.attempt) is None:
                    raise Interrupted("this server was away for so long that the sample's attempt was ended")
                del tables.attempts[record.attempt]
            if row is not None and row.record.attempt:
                tables.leave(record.key, row.record.attempt)
            tables.put(record)
            return None

        return self._do(operation, record.key, is_commit=True)

    def adopt(self, record: SampleRecord) -> Future[None]:
        return self._do(lambda: self._tables.put(record), record.key)

    def fail(self, record: SampleRecord, code: str, message: str) -> Future[bool]:
        def operation() -> bool:
            row = self._tables.rows.get(record.key)
            if row is not None and row.record.state not in (State.ARRIVING, State.FAILED):
                return False
            if self._tables.is_open(record.key):
                return False
            base = row.record if row is not None and row.record.state is State.ARRIVING else record
            self._tables.put(base.failed(code, message))
            return True

        return self._do(operation, record.key)

    def forget(self, key: SampleKey) -> Future[bool]:
        def operation() -> bool:
            if self._tables.state(key) is not State.ARRIVING or self._tables.is_open(key):
                return False
            self._tables.drop(key)
            return True

        return self._do(operation, key)

    def put_damaged(self, record: SampleRecord, message: str) -> Future[None]:
        def put() -> None:
            row = self._tables.rows.get(record.key)
            if record.attempt and (row is None or row.record.attempt != record.attempt):
                return
            self._tables.put(record.failed("DAMAGED", message))

        return self._do(put, record.key)

    def put_deleting(self, record: SampleRecord) -> Future[None]:
        return self._do(lambda: self._tables.put(replace(record, state=State.DELETING)), record.key)

    # Deletion.

    def mark_deleting(self, record: SampleRecord) -> int:
        def mark() -> int:
            row = self._tables.rows.get(record.key)
            if row is None or row.record.created_unix_ns != record.created_unix_ns:
                raise SampleNotFound(f"there is no sample {record.key} that was opened then")
            until = self._tables.leased_until(record.key)
            if not until:
                self._tables.mark(row)
            return until

        return self._do(mark, record.key).result()

    def mark_unused(self, candidates: Sequence[Candidate], term: int = 0) -> list[Candidate]:
        return [one for one in candidates if self._do(lambda one=one: self._mark_unused(one, term), one.key).result()]  # type: ignore[misc]

    def _mark_unused(self, candidate: Candidate, term: int) -> bool:
        row = self._tables.rows.get(candidate.key)
        if not self._leads(term) or row is None or not candidate.is_of(row.record):
            return False
        if self._reading.has(candidate.key) or self._tables.leased_until(candidate.key):
            return False
        self._tables.mark(row)
        return True

    def _leads(self, term: int) -> bool:
        return term in (0, self._tables.term)

    def drop_deleting(self, keys: Sequence[SampleKey], term: int = 0) -> None:
        def drop(key: SampleKey) -> None:
            if self._leads(term) and self._tables.state(key) is State.DELETING:
                self._tables.drop(key)

        for key in keys:
            self._do(lambda key=key: drop(key), key).result()  # type: ignore[misc]

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

    # Readers.

    def hold_read(self, key: SampleKey) -> ReadHold:
        return self._reading.hold(key)

    def is_held(self, key: SampleKey) -> bool:
        return self._reading.has(key)

    def count_reads(self, reads: Sequence[tuple[SampleKey, int]]) -> Future[None]:
        def count() -> None:
            for key, stamp in reads:
                row = self._tables.rows.get(key)
                if row is not None and (row.record.state, row.record.committed_unix_ns) == (State.COMMITTED, stamp):
                    row.reads += 1

        return self._do(count)

    def ack(self, key: SampleKey) -> bool:
        def note() -> bool:
            row = self._tables.rows.get(key)
            if row is None or row.record.state is not State.COMMITTED:
                return False
            row.acked = row.acked or self._tables.clock()
            return True

        return self._do(note).result()

    def lease(self, key: SampleKey, holder: str, seconds: float, leases_max: int, namespace_max: int) -> int:
        def take() -> int:
            tables, now = self._tables, self._tables.clock()
            self._check_committed(key)
            tables.leases = {one: until for one, until in tables.leases.items() if until > now}
            if (key, holder) not in tables.leases:
                in_namespace = sum(one.namespace == key.namespace for one, _ in tables.leases)
                if len(tables.leases) >= leases_max or in_namespace >= namespace_max:
                    raise StoreFull(
                        f"no more leases are given: this server allows {leases_max}, and {namespace_max} of a namespace"
                    )
            tables.leases[key, holder] = now + round(seconds * _NS)
            return tables.leases[key, holder]

        return self._do(take).result()

    def end_leases(self, key: SampleKey, holder: str | None) -> None:
        def end() -> None:
            self._check_committed(key)
            self._tables.release(key, holder)

        self._do(end).result()

    def _check_committed(self, key: SampleKey) -> None:
        if self._tables.state(key) is not State.COMMITTED:
            raise SampleNotFound(f"there is no committed sample {key}")

    def shorten_leases(self, until_unix_ns: int, term: int = 0) -> None:
        def shorten() -> None:
            if self._leads(term):
                leases = self._tables.leases
                self._tables.leases = {one: min(until, until_unix_ns) for one, until in leases.items()}

        self._do(shorten).result()

    def standing(self, key: SampleKey) -> Standing:
        def question() -> Standing:
            row, until = self._tables.rows.get(key), self._tables.leased_until(key)
            return Standing(leased_until_unix_ns=until) if row is None else Standing(row.reads, row.acked, until)

        return self._ask(question)

    # Rows.

    def get(self, key: SampleKey) -> SampleRecord | None:
        def question() -> SampleRecord | None:
            row = self._tables.rows.get(key)
            return None if row is None else row.record

        return self._ask(question)

    def get_settled(self, key: SampleKey) -> SampleRecord | None:
        def operation() -> SampleRecord | None:
            row = self._tables.rows.get(key)
            return None if row is None else row.record

        return self._do(operation).result()

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

    # Attempts.

    def end(self, attempt: str) -> Future[bool]:
        def operation() -> bool:
            found = self._tables.open_attempt(attempt)
            if found is not None:
                self._tables.end(found)
            return found is not None

        return self._do(operation)

    def forget_attempts(self, attempts: Sequence[str]) -> Future[None]:
        def operation() -> None:
            tables, now = self._tables, self._tables.clock()
            for name in attempts:
                if (found := tables.attempts.get(name)) is not None and found.ended:
                    del tables.attempts[name]
            tables.holds = {name: until for name, until in tables.holds.items() if until > now}

        return self._do(operation)

    def renew(self, attempts: Sequence[str]) -> Future[set[str]]:
        def operation() -> set[str]:
            found = {name: one for name in attempts if (one := self._tables.open_attempt(name)) is not None}
            for one in found.values():
                one.due = self._tables.clock() + round(LIFE_S * _NS)
            return set(found)

        return self._do(operation)

    def hold_attempts(self, attempts: Sequence[str]) -> Future[None]:
        until = self._tables.clock() + round(REMOVED_AFTER_S * _NS)
        return self._do(lambda: self._tables.holds.update(dict.fromkeys(attempts, until)))

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

    def oldest_attempt(self) -> int:
        return self._ask(lambda: min((one.begun for one in self._tables.attempts.values() if not one.ended), default=0))

    def known_attempts(self, attempts: Sequence[str], keys: Sequence[SampleKey]) -> set[str]:
        def is_known(name: str, key: SampleKey) -> bool:
            row = self._tables.rows.get(key)
            return name in self._tables.attempts or (row is not None and row.record.attempt == name)

        return self._ask(lambda: {name for name, key in zip(attempts, keys, strict=True) if is_known(name, key)})

    def fail_abandoned(self, key: SampleKey) -> Future[bool]:
        def operation() -> bool:
            row = self._tables.rows.get(key)
            if row is None or row.record.state is not State.ARRIVING or self._tables.is_open(key):
                return False
            self._tables.put(row.record.failed(Interrupted.code, "the server stopped while the sample was arriving"))
            return True

        return self._do(operation, key)

    # A catalogue that is older than the bucket, and what is copied from elsewhere.

    def generation(self) -> Generation:
        return self._ask(lambda: Generation(self._tables.name, self._tables.generation))

    def set_generation(self, number: int, term: int = 0) -> bool:
        def operation() -> bool:
            if number <= self._tables.generation or term not in (0, self._tables.term):
                return False
            self._tables.generation = number
            return True

        return self._do(operation).result()

    def open_attempts(self) -> dict[str, tuple[SampleKey, int]]:
        return self._ask(lambda: {n: (one.key, one.due) for n, one in self._tables.attempts.items() if not one.ended})

    def take_over(self, record: SampleRecord, over: str | None) -> Future[bool]:
        def operation() -> bool:
            row = self._tables.rows.get(record.key)
            committed = row.record.attempt if row is not None and row.record.state is State.COMMITTED else None
            if committed != over:
                return False
            self._tables.attempts.pop(record.attempt, None)
            self._tables.put(record)
            return True

        return self._do(operation, record.key)

    def let_go(self, attempts: Sequence[str]) -> Future[None]:
        def operation() -> None:
            for name in attempts:
                self._tables.attempts.pop(name, None)

        return self._do(operation)

    def keep_standing(self, record: SampleRecord, reads: int, acked_unix_ns: int) -> Future[None]:
        def operation() -> None:
            row = self._tables.rows.get(record.key)
            if row is not None and (row.record.state, row.record.header_xxh3) == (State.COMMITTED, record.header_xxh3):
                row.reads, row.acked = max(row.reads, reads), row.acked or acked_unix_ns

        return self._do(operation, record.key)

    def drop_lost(self, record: SampleRecord) -> Future[bool]:
        def operation() -> bool:
            row = self._tables.rows.get(record.key)
            if row is None or (row.record.state, row.record.attempt) != (State.COMMITTED, record.attempt):
                return False
            del self._tables.rows[record.key]
            self._tables.release(record.key)
            return True

        return self._do(operation, record.key)

    def take_failures(self, peer: str, wanted: int, most: int, per_s: float) -> int:
        def operation() -> int:
            now = self._tables.clock()
            remaining, at = self._tables.failures.get(peer, (float(most), now))
            remaining = min(float(most), remaining + max(0, now - at) / _NS * per_s)
            taken = min(wanted, int(remaining))
            self._tables.failures[peer] = (remaining - taken, max(now, at))
            return taken

        return self._do(operation).result()

    # The rest.

    def get_meta(self, name: str) -> str | None:
        return self._ask(lambda: self._tables.meta.get(name))

    def set_meta(self, name: str, value: str, *, durable: bool = False) -> None:
        self._do(lambda: self._tables.meta.__setitem__(name, value)).result()

    def lead(self) -> int:
        def question() -> int:
            if self._tables.leader is None:
                self._tables.leader = self
                self._tables.term += 1
            return self._tables.term if self._tables.leader is self else 0

        return self._ask(question)

    def watch(self, told: Callable[[SampleKey | None], None]) -> None:
        self._told.append(told)
        self._tables.told.append(told)
        told(None)

    def now(self) -> int:
        return self._ask(self._tables.clock)

    @property
    def writer(self) -> threading.Thread:
        return threading.main_thread()

    def close(self, *, clean: bool = True) -> None:
        self._closed = True
        self._tables.told[:] = [told for told in self._tables.told if told not in self._told]
        if self._tables.leader is self:
            self._tables.leader = None


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
