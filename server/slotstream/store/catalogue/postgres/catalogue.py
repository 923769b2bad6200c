"""The catalogue in PostgreSQL: each operation is a function over locked rows, run in a transaction of the thread that writes.

The rows of an operation stay locked until its change is committed, so what it looked at stays so, for all servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from slotstream.store.catalogue.attempts import Attempt, Generation
from slotstream.store.catalogue.holds import Holds, ReadHold
from slotstream.store.catalogue.postgres import attempts, failure_shares, leases, listing, questions
from slotstream.store.catalogue.postgres.database import Database, Work
from slotstream.store.catalogue.queries import Candidate, ListQuery, Queue, Standing, Usage
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.store.shared_state import AttemptCounts
from slotstream.wire.errors import Interrupted, SampleNotFound, StoreFull

_NS = 1_000_000_000


class PostgresCatalogue(Database):
    """A `SharedCatalogue` at a URL. Thread safe. Raises StoreFull, IoError and InternalFault unless it says more.

    Where a commit's connection was lost, and nobody can say for 20 seconds what became of it, it raises VerdictUnknown.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError, and IoError where the database does not answer."""
        super().__init__(url)
        self._holds = Holds()

    # Samples on their way, and what became of them.

    def begin(self, record: SampleRecord) -> Future[bool]:
        def operation(work: Work) -> bool:
            if record.attempt:
                attempts.begin(work.db, record.key, record.attempt, work.now)
            before = work.rows.get(record.key)
            if before is not None and before.state is not State.FAILED:
                return False
            # The upload itself knows all, and the commit writes it. What failed as damaged still has its object.
            slim = replace(record, metadata={}, attempt=before.attempt if before is not None else "").slim()
            work.rows.put(slim)
            return True

        # Nothing of an object is sent before its attempt is known.
        return self._submit(operation, [record.key], urgent=bool(record.attempt))

    def commit(self, record: SampleRecord) -> Future[SampleRecord | None]:
        def operation(work: Work) -> SampleRecord | None:
            before = work.rows.get(record.key) if record.attempt else None
            if before is not None and before.state is State.COMMITTED:
                return None if before.attempt == record.attempt else before
            if record.attempt and not attempts.take(work.db, record.attempt):
                raise Interrupted("this server was away for so long that the sample's attempt was ended")
            if before is not None and before.attempt:
                attempts.leave(work.db, record.key, before.attempt, work.now)
            work.rows.put(record)
            return None

        return self._submit(operation, [record.key], is_commit=True)

    def adopt(self, record: SampleRecord) -> Future[None]:
        return self._submit(lambda work: work.rows.put(record), [record.key])

    def fail(self, record: SampleRecord, code: str, message: str) -> Future[bool]:
        def operation(work: Work) -> bool:
            before = work.rows.get(record.key)
            if before is not None and before.state not in (State.ARRIVING, State.FAILED):
                return False
            if attempts.is_open(work.db, record.key):
                return False  # Another server is sending it.
            base = before if before is not None and before.state is State.ARRIVING else record
            work.rows.put(base.failed(code, message))
            return True

        return self._submit(operation, [record.key])

    def forget(self, key: SampleKey) -> Future[bool]:
        def operation(work: Work) -> bool:
            before = work.rows.get(key)
            if before is None or before.state is not State.ARRIVING or attempts.is_open(work.db, key):
                return False
            _drop(work, key, before.attempt)
            return True

        return self._submit(operation, [key])

    def put_damaged(self, record: SampleRecord, message: str) -> Future[None]:
        def put(work: Work) -> None:
            before = work.rows.find(record.key) if record.attempt else None
            if record.attempt and (before is None or before["attempt"] != record.attempt):
                return  # Deleted or replaced meanwhile.
            work.rows.put(record.failed("DAMAGED", message))

        return self._submit(put, [record.key])

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
                _mark(work, row)
            return until

        return self._submit(mark, [key]).result()

    def mark_unused(self, candidates: Sequence[Candidate], term: int = 0) -> list[Candidate]:
        keys = [candidate.key for candidate in candidates]

        def mark(work: Work) -> list[Candidate]:
            marked: list[Candidate] = []
            if not work.leads(term):
                return marked
            leased = leases.leased_until(work.db, keys, work.now)
            for candidate in candidates:
                record = work.rows.get(candidate.key)
                if record is None or not candidate.is_of(record):
                    continue
                if self._holds.has(candidate.key) or candidate.key in leased:
                    continue
                _mark(work, record)
                marked.append(candidate)
            return marked

        return self._submit(mark, keys, term=term).result()

    def drop_deleting(self, keys: Sequence[SampleKey], term: int = 0) -> None:
        def drop(work: Work) -> None:
            if not work.leads(term):
                return
            gone = [key for key in keys if (row := work.rows.find(key)) is not None and row["state"] == State.DELETING]
            for key in gone:
                work.rows.drop(key)
            leases.release(work.db, gone)

        self._submit(drop, keys, term=term).result()

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

    def shorten_leases(self, until_unix_ns: int, term: int = 0) -> None:
        def shorten(work: Work) -> None:
            if work.leads(term):
                leases.shorten(work.db, until_unix_ns)

        self._submit(shorten, gives_leases=True, term=term).result()

    def standing(self, key: SampleKey) -> Standing:
        return self._ask(lambda db: questions.standing(db, key))

    # Rows.

    def get(self, key: SampleKey) -> SampleRecord | None:
        return self._ask(lambda db: questions.get(db, key))

    def get_many(self, keys: Sequence[SampleKey]) -> list[SampleRecord | None]:
        return self._ask(lambda db: questions.get_many(db, keys))

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

    # Attempts: `SharedCatalogue`.

    def end(self, attempt: str) -> Future[bool]:
        return self._submit(lambda work: attempts.end(work.db, attempt, work.now))

    def forget_attempts(self, names: Sequence[str]) -> Future[None]:
        return self._submit(lambda work: attempts.forget(work.db, names, work.now))

    def renew(self, names: Sequence[str]) -> Future[set[str]]:
        return self._submit(lambda work: attempts.renew(work.db, names, work.now))

    def hold_attempts(self, names: Sequence[str]) -> Future[None]:
        return self._submit(lambda work: attempts.hold(work.db, names, work.now))

    def fail_abandoned(self, key: SampleKey) -> Future[bool]:
        def operation(work: Work) -> bool:
            before = work.rows.get(key)
            if before is None or before.state is not State.ARRIVING or attempts.is_open(work.db, key):
                return False
            work.rows.put(before.failed(Interrupted.code, "the server stopped while the sample was arriving"))
            return True

        return self._submit(operation, [key])

    def ended_attempts(self, limit: int) -> list[Attempt]:
        return self._ask(lambda db: attempts.due(db, limit))

    def count_attempts(self) -> AttemptCounts:
        return self._ask(attempts.count)

    def oldest_attempt(self) -> int:
        return self._ask(attempts.oldest)

    def known_attempts(self, names: Sequence[str], keys: Sequence[SampleKey]) -> set[str]:
        return self._ask(lambda db: attempts.known(db, names, keys))

    def take_failures(self, peer: str, wanted: int, most: int, per_s: float) -> int:
        def operation(work: Work) -> int:
            return failure_shares.take(work.db, peer, wanted, most, per_s, work.now)

        return self._submit(operation).result()

    # A catalogue that is older than the bucket.

    def generation(self) -> Generation:
        return self._ask(questions.generation)

    def set_generation(self, number: int, term: int = 0) -> bool:
        def operation(work: Work) -> bool:
            return work.leads(term) and questions.set_generation(work.db, number)

        return self._submit(operation, term=term).result()

    def open_attempts(self) -> dict[str, tuple[SampleKey, int]]:
        return self._ask(attempts.all_open)

    def take_over(self, record: SampleRecord, over: str | None) -> Future[bool]:
        def operation(work: Work) -> bool:
            before = work.rows.get(record.key)
            committed = before.attempt if before is not None and before.state is State.COMMITTED else None
            if committed != over:
                return False
            attempts.let_go(work.db, [record.attempt])
            work.rows.put(record)
            return True

        return self._submit(operation, [record.key])

    def let_go(self, names: Sequence[str]) -> Future[None]:
        return self._submit(lambda work: attempts.let_go(work.db, names))

    def keep_standing(self, record: SampleRecord, reads: int, acked_unix_ns: int) -> Future[None]:
        def keep(work: Work) -> None:
            row = work.rows.find(record.key)
            if row is None or (row["state"], row["header_xxh3"]) != (State.COMMITTED, record.header_xxh3):
                return
            kept = {"reads": max(row["reads"], reads), "acked_unix_ns": row["acked_unix_ns"] or acked_unix_ns}
            if any(row[name] != value for name, value in kept.items()):
                work.rows.change(record.key, **kept)

        return self._submit(keep, [record.key])

    def drop_lost(self, record: SampleRecord) -> Future[bool]:
        def operation(work: Work) -> bool:
            before = work.rows.get(record.key)
            if before is None or before.state is not State.COMMITTED or before.attempt != record.attempt:
                return False
            work.rows.drop(record.key)
            leases.release(work.db, [record.key])
            return True

        return self._submit(operation, [record.key])

    # The rest.

    def get_meta(self, name: str) -> str | None:
        return self._ask(lambda db: questions.get_meta(db, name))

    def set_meta(self, name: str, value: str, *, durable: bool = False) -> None:
        self._submit(lambda work: questions.set_meta(work.db, name, value)).result()

    def now(self) -> int:
        return self._ask(questions.now)


def _mark(work: Work, record: SampleRecord) -> None:
    """It is deleted. Of an object nothing but the object has to go, and later: its row goes now."""
    if record.attempt:
        _drop(work, record.key, record.attempt)
    else:
        work.rows.change(record.key, state=str(State.DELETING))


def _drop(work: Work, key: SampleKey, attempt: str) -> None:
    if attempt:
        attempts.leave(work.db, key, attempt, work.now)
        attempts.end_all(work.db, key, work.now)
    work.rows.drop(key)
    leases.release(work.db, [key])
