"""The catalogue in PostgreSQL: each operation is a function over locked rows, run in a transaction of the thread that writes.

The rows of an operation stay locked until its change is committed, so what it looked at stays so, for all servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from slotstream.store.catalogue.holds import Holds, ReadHold
from slotstream.store.catalogue.postgres import leases, listing, questions
from slotstream.store.catalogue.postgres.database import Database, Work
from slotstream.store.catalogue.queries import Candidate, ListQuery, Queue, Standing, Usage
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.wire.errors import SampleNotFound, StoreFull

_NS = 1_000_000_000


class PostgresCatalogue(Database):
    """A `Catalogue` at a URL. Thread safe. Raises StoreFull, IoError and InternalFault unless it says more.

    Where a commit's connection was lost, and nobody can say for 20 seconds what became of it, it raises VerdictUnknown.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError, and IoError where the database does not answer."""
        super().__init__(url)
        self._holds = Holds()

    # Samples on their way, and what became of them.

    def begin(self, record: SampleRecord) -> Future[bool]:
        def operation(work: Work) -> bool:
            before = work.rows.get(record.key)
            if before is not None and before.state is not State.FAILED:
                return False
            work.rows.put(replace(record, metadata={}).slim())  # The upload itself knows all, and the commit writes it.
            return True

        return self._submit(operation, [record.key], urgent=False)

    def commit(self, record: SampleRecord) -> Future[None]:
        return self._submit(lambda work: work.rows.put(record), [record.key], is_commit=True)

    def adopt(self, record: SampleRecord) -> Future[None]:
        return self._submit(lambda work: work.rows.put(record), [record.key])

    def fail(self, record: SampleRecord, code: str, message: str) -> Future[bool]:
        def operation(work: Work) -> bool:
            before = work.rows.get(record.key)
            if before is not None and before.state not in (State.ARRIVING, State.FAILED):
                return False
            base = before if before is not None and before.state is State.ARRIVING else record
            work.rows.put(base.failed(code, message))
            return True

        return self._submit(operation, [record.key])

    def forget(self, key: SampleKey) -> Future[bool]:
        def operation(work: Work) -> bool:
            before = work.rows.get(key)
            if before is None or before.state is not State.ARRIVING:
                return False
            work.rows.drop(key)
            leases.release(work.db, [key])
            return True

        return self._submit(operation, [key])

    def put_damaged(self, record: SampleRecord, message: str) -> Future[None]:
        return self._submit(lambda work: work.rows.put(record.failed("DAMAGED", message)), [record.key])

    def put_deleting(self, record: SampleRecord) -> Future[None]:
        return self._submit(lambda work: work.rows.put(replace(record, state=State.DELETING)), [record.key])

    # Deletion.

    def mark_deleting(self, record: SampleRecord) -> int:
        key = record.key

        def mark(work: Work) -> int:
            row = work.rows.get(key)
            if row is None or row.created_unix_ns != record.created_unix_ns:
                raise SampleNotFound(f"there is no sample {key} that was opened then")
            # Who gives a lease has the row locked, so none can come between this look and the mark.
            until = leases.leased_until(work.db, [key], work.now).get(key, 0)
            if not until:
                work.rows.change(key, state=str(State.DELETING))
            return until

        return self._submit(mark, [key]).result()

    def mark_unused(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        keys = [candidate.key for candidate in candidates]

        def mark(work: Work) -> list[Candidate]:
            leased = leases.leased_until(work.db, keys, work.now)
            marked = []
            for candidate in candidates:
                record = work.rows.get(candidate.key)
                if record is None or not candidate.is_of(record):
                    continue
                if self._holds.has(candidate.key) or candidate.key in leased:
                    continue
                work.rows.change(candidate.key, state=str(State.DELETING))
                marked.append(candidate)
            return marked

        return self._submit(mark, keys).result()

    def drop_deleting(self, keys: Sequence[SampleKey]) -> None:
        def drop(work: Work) -> None:
            gone = [key for key in keys if (row := work.rows.find(key)) is not None and row["state"] == State.DELETING]
            for key in gone:
                work.rows.drop(key)
            leases.release(work.db, gone)

        self._submit(drop, keys).result()

    def candidates(self, queue: Queue, namespace: str, after: tuple[int, int], limit: int) -> list[Candidate]:
        return self._ask(lambda db: questions.candidates(db, queue, namespace, after, limit))

    def committed_until(self, namespace: str, until_unix_ns: int) -> int:
        return self._ask(lambda db: questions.committed_until(db, namespace, until_unix_ns))

    def usage(self, namespace: str) -> Usage:
        return self._ask(lambda db: questions.usage(db, namespace))

    def usages(self, after: str, limit: int) -> list[Usage]:
        return self._ask(lambda db: questions.usages(db, after, limit))

    # Readers.

    def hold_read(self, key: SampleKey) -> ReadHold:
        return self._holds.hold(key)

    def is_held(self, key: SampleKey) -> bool:
        return self._holds.has(key)

    def count_reads(self, reads: Sequence[tuple[SampleKey, int]]) -> Future[None]:
        def count(work: Work) -> None:
            for key, committed_unix_ns in reads:
                row = work.rows.find(key)
                if row is not None and (row["state"], row["committed_unix_ns"]) == (State.COMMITTED, committed_unix_ns):
                    work.rows.change(key, reads=row["reads"] + 1)

        return self._submit(count, [key for key, _ in reads])

    def ack(self, key: SampleKey) -> bool:
        def note(work: Work) -> bool:
            row = work.rows.find(key)
            if row is None or row["state"] != State.COMMITTED:
                return False
            if not row["acked_unix_ns"]:
                work.rows.change(key, acked_unix_ns=work.now)
            return True

        return self._submit(note, [key]).result()

    def lease(self, key: SampleKey, holder: str, seconds: float, leases_max: int, namespace_max: int) -> int:
        def take(work: Work) -> int:
            self._check_committed(work, key)
            until = work.now + round(seconds * _NS)
            leases.forget(work.db, work.now)
            if not leases.give(work.db, key, holder, until, leases_max, namespace_max):
                # Not how many: that would tell of other namespaces.
                most = f"{leases_max}, and {namespace_max} of a namespace"
                raise StoreFull(f"no more leases are given: this server allows {most}")
            return until

        return self._submit(take, [key], gives_leases=True).result()

    def end_leases(self, key: SampleKey, holder: str | None) -> None:
        def end(work: Work) -> None:
            self._check_committed(work, key)
            leases.release(work.db, [key], holder)

        self._submit(end, [key]).result()

    @staticmethod
    def _check_committed(work: Work, key: SampleKey) -> None:
        row = work.rows.get(key)
        if row is None or row.state is not State.COMMITTED:
            raise SampleNotFound(f"there is no committed sample {key}")

    def shorten_leases(self, until_unix_ns: int) -> None:
        self._submit(lambda work: leases.shorten(work.db, until_unix_ns), gives_leases=True).result()

    def standing(self, key: SampleKey) -> Standing:
        return self._ask(lambda db: questions.standing(db, key))

    # Rows.

    def get(self, key: SampleKey) -> SampleRecord | None:
        return self._ask(lambda db: questions.get(db, key))

    def get_settled(self, key: SampleKey) -> SampleRecord | None:
        return self._submit(lambda work: work.rows.get(key), [key]).result()

    def list_page(self, query: ListQuery) -> tuple[list[SampleRecord], str]:
        self._written()  # Who lists sees what was opened before.
        return self._ask(lambda db: listing.list_page(db, query))

    def scan_page(self, after: int, limit: int, namespace: str = "") -> list[tuple[int, SampleRecord]]:
        return self._ask(lambda db: questions.scan_page(db, after, limit, namespace))

    def unfinished(self) -> list[SampleRecord]:
        return self._ask(questions.unfinished)

    def totals(self) -> dict[State, tuple[int, int]]:
        return self._ask(questions.totals)

    # The rest.

    def get_meta(self, name: str) -> str | None:
        return self._ask(lambda db: questions.get_meta(db, name))

    def set_meta(self, name: str, value: str, *, durable: bool = False) -> None:
        self._submit(lambda work: questions.set_meta(work.db, name, value)).result()

    def now(self) -> int:
        return self._ask(questions.now)
