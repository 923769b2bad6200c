"""The catalogue in SQLite: each operation is one function of the database, run in a transaction of the thread that writes.

Nothing else writes, so what an operation looks at stays so until its change is committed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from slotstream.store.catalogue.holds import Holds, ReadHold
from slotstream.store.catalogue.queries import Candidate, ListQuery, Queue, Standing, Usage
from slotstream.store.catalogue.sqlite import retention_sql, sql
from slotstream.store.catalogue.sqlite.database import Database
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.wire.errors import SampleNotFound, SlotStreamError, StoreFull

_NAMES_PAGE = 2048
_T = TypeVar("_T")
_NS = 1_000_000_000
_TERM = 1  # Of the one process that has the directory: it leads as long as it has the catalogue open.
_TERMS = (0, _TERM)


class SqliteCatalogue(Database):
    """A `Catalogue`. Thread safe. Raises StoreFull, IoError and InternalFault unless it says more."""

    def __init__(self, path: Path, now: Callable[[], int] = time.time_ns) -> None:
        """Open or create the database. `now`: the wall clock, Unix nanoseconds. Raises CatalogueCorrupt and ConfigError."""
        super().__init__(path)
        self.now = now
        self._holds = Holds()
        self._told: list[Callable[[SampleKey | None], None]] = []

    # Samples on their way, and what became of them.

    def begin(self, record: SampleRecord) -> Future[bool]:
        def operation(db: sqlite3.Connection) -> bool:
            before = sql.get(db, record.namespace, record.sample_id)
            if before is not None and before.state is not State.FAILED:
                return False
            sql.put(db, replace(record, metadata={}).slim())  # The upload itself knows all, and the commit writes it.
            return True

        return self._telling(self.submit(operation, urgent=False), record.key)

    def commit(self, record: SampleRecord) -> Future[SampleRecord | None]:
        return self._telling(self.submit(lambda db: sql.put(db, record)), record.key)

    def adopt(self, record: SampleRecord) -> Future[None]:
        return self._telling(self.submit(lambda db: sql.put(db, record)), record.key)

    def fail(self, record: SampleRecord, code: str, message: str) -> Future[bool]:
        def operation(db: sqlite3.Connection) -> bool:
            before = sql.get(db, record.namespace, record.sample_id)
            if before is not None and before.state not in (State.ARRIVING, State.FAILED):
                return False
            base = before if before is not None and before.state is State.ARRIVING else record
            sql.put(db, base.failed(code, message))
            return True

        return self._telling(self.submit(operation), record.key)

    def forget(self, key: SampleKey) -> Future[bool]:
        def operation(db: sqlite3.Connection) -> bool:
            before = sql.get(db, key.namespace, key.sample_id)
            if before is None or before.state is not State.ARRIVING:
                return False
            retention_sql.mark_deleting(db, key)
            retention_sql.drop_deleting(db, [key])
            return True

        return self._telling(self.submit(operation), key)

    def put_damaged(self, record: SampleRecord, message: str) -> Future[None]:
        failed = record.failed("DAMAGED", message)
        return self._telling(self.submit(lambda db: sql.put(db, failed), durable=True), record.key)

    def put_deleting(self, record: SampleRecord) -> Future[None]:
        deleting = replace(record, state=State.DELETING)
        return self._telling(self.submit(lambda db: sql.put(db, deleting), durable=True), record.key)

    # Deletion.

    def mark_deleting(self, record: SampleRecord) -> int:
        key = record.key

        def mark(db: sqlite3.Connection) -> int | SlotStreamError:
            row = sql.get(db, key.namespace, key.sample_id)
            if row is None or row.created_unix_ns != record.created_unix_ns:
                return SampleNotFound(f"there is no sample {key} that was opened then")
            # Leases are given out by this thread too, so none can come between this look and the mark.
            until = retention_sql.leased_until(db, key, self.now())
            if not until:
                retention_sql.mark_deleting(db, key)
            return until

        return self._answer(mark, key, durable=True)

    def mark_unused(self, candidates: Sequence[Candidate], term: int = 0) -> list[Candidate]:
        if term not in _TERMS:
            return []
        now = self.now()

        def mark(db: sqlite3.Connection) -> list[Candidate]:
            marked = []
            for candidate in candidates:
                record = sql.get(db, candidate.key.namespace, candidate.key.sample_id)
                if record is None or not candidate.is_of(record):
                    continue
                if self._holds.has(candidate.key) or retention_sql.leased_until(db, candidate.key, now):
                    continue
                retention_sql.mark_deleting(db, candidate.key)
                marked.append(candidate)
            return marked

        return self._telling(self.submit(mark, durable=True), *(candidate.key for candidate in candidates)).result()

    def drop_deleting(self, keys: Sequence[SampleKey], term: int = 0) -> None:
        if term in _TERMS:
            self._telling(self.submit(lambda db: retention_sql.drop_deleting(db, keys)), *keys).result()

    def candidates(self, queue: Queue, namespace: str, after: tuple[int, int], limit: int) -> list[Candidate]:
        return self.ask(lambda db: retention_sql.candidates(db, queue, namespace, after, limit))

    def committed_until(self, namespace: str, until_unix_ns: int) -> int:
        return self.ask(lambda db: retention_sql.committed_until(db, namespace, until_unix_ns))

    def usage(self, namespace: str) -> Usage:
        return self.ask(lambda db: retention_sql.usage(db, namespace))

    def usages(self, after: str, limit: int) -> list[Usage]:
        return self.ask(lambda db: retention_sql.usages(db, after, limit))

    # Readers.

    def hold_read(self, key: SampleKey) -> ReadHold:
        return self._holds.hold(key)

    def is_held(self, key: SampleKey) -> bool:
        return self._holds.has(key)

    def count_reads(self, reads: Sequence[tuple[SampleKey, int]]) -> Future[None]:
        def count(db: sqlite3.Connection) -> None:
            for key, committed_unix_ns in reads:
                retention_sql.count_read(db, key, committed_unix_ns)

        return self.submit(count)

    def ack(self, key: SampleKey) -> bool:
        now = self.now()
        return self.submit(lambda db: retention_sql.ack(db, key, now)).result()

    def lease(self, key: SampleKey, holder: str, seconds: float, leases_max: int, namespace_max: int) -> int:
        def take(db: sqlite3.Connection) -> int | SlotStreamError:
            """When the lease ends; or why there is none, which raised in here would undo what shares the transaction."""
            # Not from before: a clock that is right again may meanwhile have given out leases that end before that moment.
            now = self.now()
            until = now + round(seconds * _NS)
            record = sql.get(db, key.namespace, key.sample_id)
            if record is None or record.state is not State.COMMITTED:
                return _not_committed(key)
            retention_sql.forget_leases(db, now)
            if not retention_sql.lease(db, key, holder, until, leases_max, namespace_max):
                # Not how many: that would tell of other namespaces.
                most = f"{leases_max}, and {namespace_max} of a namespace"
                return StoreFull(f"no more leases are given: this server allows {most}")
            return until

        return self._answer(take)

    def end_leases(self, key: SampleKey, holder: str | None) -> None:
        def end(db: sqlite3.Connection) -> int | SlotStreamError:
            record = sql.get(db, key.namespace, key.sample_id)
            if record is None or record.state is not State.COMMITTED:
                return _not_committed(key)
            retention_sql.release(db, key, holder)
            return 0

        self._answer(end)

    def _answer(
        self, change: Callable[[sqlite3.Connection], int | SlotStreamError], *told: SampleKey, durable: bool = False
    ) -> int:
        """What `change` returns. Raises an expected failure that it returns."""
        answer = self._telling(self.submit(change, durable=durable), *told).result()
        if isinstance(answer, SlotStreamError):
            raise answer
        return answer

    def shorten_leases(self, until_unix_ns: int, term: int = 0) -> None:
        if term in _TERMS:
            self.submit(lambda db: retention_sql.shorten_leases(db, until_unix_ns)).result()

    def standing(self, key: SampleKey) -> Standing:
        return self.ask(lambda db: retention_sql.standing(db, key, self.now()))

    # Rows.

    def get(self, key: SampleKey) -> SampleRecord | None:
        return self.ask(lambda db: sql.get(db, key.namespace, key.sample_id))

    def get_many(self, keys: Sequence[SampleKey]) -> list[SampleRecord | None]:
        return self.ask(lambda db: [sql.get(db, key.namespace, key.sample_id) for key in keys])

    def get_settled(self, key: SampleKey) -> SampleRecord | None:
        return self.submit(lambda db: sql.get(db, key.namespace, key.sample_id)).result()

    def list_page(self, query: ListQuery) -> tuple[list[SampleRecord], str]:
        self.written()  # Who lists sees what was opened before.
        return self.ask(lambda db: sql.list_page(db, query))

    def scan_page(self, after: int, limit: int, namespace: str = "") -> list[tuple[int, SampleRecord]]:
        return self.ask(lambda db: sql.scan(db, after, limit, namespace))

    def committed_names(self, *, check: bool) -> Iterator[list[tuple[str, str]]]:
        """(namespace, sample_id) of every committed row, page by page, as `scan` goes. `check`: the checksums of all rows."""
        after = 0
        while page := self.ask(lambda db, after=after: sql.names(db, after, _NAMES_PAGE, check=check)):  # type: ignore[misc]
            after = page[-1][0]
            yield [(namespace, sample_id) for _, namespace, sample_id, state in page if state == "committed"]

    def unfinished(self) -> list[SampleRecord]:
        return self.ask(sql.unfinished)

    def totals(self) -> dict[State, tuple[int, int]]:
        return self.ask(sql.totals)

    def latest_stamp(self) -> int:
        """The latest time that any row was created or committed at, Unix nanoseconds; 0 when there is none."""
        return self.ask(retention_sql.latest_stamp)

    # Several servers, of which here is one.

    def lead(self) -> int:
        return _TERM

    def watch(self, told: Callable[[SampleKey | None], None]) -> None:
        self._told.append(told)

    def _telling(self, future: Future[_T], *keys: SampleKey) -> Future[_T]:
        """Once it is done, who watches is told of these samples."""
        if self._told:
            future.add_done_callback(lambda done: self._tell(done, keys))
        return future

    def _tell(self, done: Future[_T], keys: Sequence[SampleKey]) -> None:
        if done.exception() is None:
            for told in self._told:
                for key in keys:
                    told(key)

    # What has to survive a restart, by name.

    def get_meta(self, name: str) -> str | None:
        return self.ask(lambda db: retention_sql.get_meta(db, name))

    def set_meta(self, name: str, value: str, *, durable: bool = False) -> None:
        self.submit(lambda db: retention_sql.set_meta(db, name, value), durable=durable).result()


def _not_committed(key: SampleKey) -> SampleNotFound:
    return SampleNotFound(f"there is no committed sample {key}")
