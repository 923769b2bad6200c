"""A catalogue of several servers in memory: a model of `SharedCatalogue`, without a database and without a disk.

Each operation is a function over the tables, done at once and alone: what a transaction is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from slotstream.store.catalogue import page_token
from slotstream.store.catalogue.attempts import LIFE_S, REMOVED_AFTER_S, SharedCatalogue
from slotstream.store.catalogue.holds import Holds, ReadHold
from slotstream.store.catalogue.queries import Candidate
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.wire.errors import Interrupted, SampleNotFound, StoreFull
from support.memory_questions import MemoryQuestions
from support.memory_tables import Begun, Tables

_T = TypeVar("_T")
_NS = 1_000_000_000
_PAGE_KEY = bytes(page_token.KEY_BYTES)


class MemoryCatalogue(MemoryQuestions, SharedCatalogue):
    """One server's. Changes go through `_do`, and questions through `_ask`, which a model of a network may override."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self._reading = Holds()
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

    # Rows.

    def get_many(self, keys: Sequence[SampleKey]) -> list[SampleRecord | None]:
        def question() -> list[SampleRecord | None]:
            rows = [self._tables.rows.get(key) for key in keys]
            return [None if row is None else row.record for row in rows]

        return self._ask(question)

    def get_settled(self, key: SampleKey) -> SampleRecord | None:
        def operation() -> SampleRecord | None:
            row = self._tables.rows.get(key)
            return None if row is None else row.record

        return self._do(operation).result()

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

    def fail_abandoned(self, key: SampleKey) -> Future[bool]:
        def operation() -> bool:
            row = self._tables.rows.get(key)
            if row is None or row.record.state is not State.ARRIVING or self._tables.is_open(key):
                return False
            self._tables.put(row.record.failed(Interrupted.code, "the server stopped while the sample was arriving"))
            return True

        return self._do(operation, key)

    def take_failures(self, peer: str, wanted: int, most: int, per_s: float) -> int:
        def operation() -> int:
            now = self._tables.clock()
            left, at = self._tables.shares.get(peer, (float(most), now))
            left = min(float(most), left + max(0, now - at) / _NS * per_s)
            taken = min(wanted, int(left))
            self._tables.shares[peer] = (left - taken, max(now, at))
            return taken

        return self._do(operation).result()

    # A catalogue that is older than the bucket.

    def set_generation(self, number: int, term: int = 0) -> bool:
        def operation() -> bool:
            if not self._leads(term) or number <= self._tables.generation.number:
                return False
            self._tables.generation = replace(self._tables.generation, number=number)
            return True

        return self._do(operation).result()

    def take_over(self, record: SampleRecord, over: str | None) -> Future[bool]:
        def operation() -> bool:
            row = self._tables.rows.get(record.key)
            if (row.record.attempt if row is not None and row.record.state is State.COMMITTED else None) != over:
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
        def keep() -> None:
            row = self._tables.rows.get(record.key)
            if row is not None and (row.record.state, row.record.header_xxh3) == (State.COMMITTED, record.header_xxh3):
                row.reads, row.acked = max(row.reads, reads), row.acked or acked_unix_ns

        return self._do(keep)

    def drop_lost(self, record: SampleRecord) -> Future[bool]:
        def operation() -> bool:
            row = self._tables.rows.get(record.key)
            if row is None or row.record.state is not State.COMMITTED or row.record.attempt != record.attempt:
                return False
            del self._tables.rows[record.key]
            self._tables.release(record.key)
            return True

        return self._do(operation, record.key)

    # The rest.

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
