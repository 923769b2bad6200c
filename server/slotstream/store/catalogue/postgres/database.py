"""The database of a catalogue in PostgreSQL: one thread writes, several read, each over a connection of its own.

A transaction of the thread that writes is a batch of operations: their rows are locked together, each operation looks at them
and says what becomes of them, and what changed is written. One that met another transaction is done again.

A connection that is lost at COMMIT leaves it open whether the transaction is committed: it may be, and a second later. So each
thread that writes numbers its transactions in a row of its own, within them. Done again, a transaction changes that row first:
it waits for the one before it, if that still goes on, and finds its number there if it is committed.
"""

from __future__ import annotations

import logging
import queue
import random
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg

from slotstream.store.catalogue.batches import BatchWriter
from slotstream.store.catalogue.postgres.address import Address
from slotstream.store.catalogue.postgres.connecting import check_server, connect
from slotstream.store.catalogue.postgres.failures import failure, is_lost, is_met, one_line
from slotstream.store.catalogue.postgres.leading import Leading, term_of
from slotstream.store.catalogue.postgres.migrating import check_schema
from slotstream.store.catalogue.postgres.notices import Listener, Notices
from slotstream.store.catalogue.postgres.rows import Rows
from slotstream.store.catalogue.postgres.watching import Watch
from slotstream.store.records import SampleKey
from slotstream.wire.errors import InternalFault, Interrupted, IoError, SlotStreamError, VerdictUnknown

_log = logging.getLogger(__name__)
_READERS = 4
_VERDICT_S = 20.0  # How long it is tried to find out whether a transaction is committed.
_WRITE_S = 20.0  # For one go of a transaction.
_READ_S = 45.0  # The database itself ends a query before.
_PAUSE_S = 0.2  # Between two tries to connect.
_FRESH_TRIES = 2  # A connection that was lost while nobody used it shows only then.
_FRESH_S = 5.0  # And at once.
_MEETINGS_S = 20.0  # How long a transaction that meets others is done again.
_FOLD_EVERY = 256  # Batches.
_FOLD_MAX = 20_000  # Rows in one go.

_T = TypeVar("_T")
# A row of its own for each thread that writes; none comes back where its transaction of that number is committed.
_NUMBER = (
    "INSERT INTO writers AS w VALUES (%s, %s, now()) ON CONFLICT (writer) DO UPDATE "
    "SET batch = excluded.batch, written_at = excluded.written_at WHERE w.batch < excluded.batch RETURNING now_unix_ns()"
)
_FOLD = (
    "WITH taken AS (DELETE FROM deltas WHERE id = ANY (ARRAY("
    f"SELECT id FROM deltas ORDER BY id LIMIT {_FOLD_MAX} FOR UPDATE SKIP LOCKED)) RETURNING namespace, state, samples, bytes) "
    "INSERT INTO deltas (namespace, state, samples, bytes) SELECT namespace, state, sum(samples), sum(bytes) FROM taken "
    "GROUP BY namespace, state HAVING sum(samples) <> 0 OR sum(bytes) <> 0"
)
_FORGET_WRITERS = "DELETE FROM writers WHERE written_at < now() - interval '1 day' AND writer <> %s"
_GIVING_LEASES = "SELECT pg_advisory_xact_lock(hashtext('slotstream leases'))"


@dataclass(slots=True)
class Work:
    """What an operation works with, within its transaction."""

    rows: Rows
    db: psycopg.Connection
    now: int  # The catalogue's clock, from before the rows were locked.
    term: int  # The last leader's, where an operation asks for it: no other begins before the transaction is over.

    def leads(self, term: int) -> bool:
        """Whether an operation of this term may go on; 0: it is not done as leader."""
        return term in (0, self.term)


@dataclass(frozen=True, slots=True)
class Operation:
    """`run` may be done again, so it acts on nothing but its `Work`. What it raises is its answer, and undoes its rows."""

    run: Callable[[Work], Any]
    keys: tuple[SampleKey, ...]  # Of the rows that it asks for.
    gives_leases: bool = False
    term: int = 0  # Of the leader that asks; 0: it is not done as leader.
    is_commit: bool = False  # Where nobody can say what became of it, VerdictUnknown is the answer, and not IoError.


_Entry = tuple[Operation, "Future[Any]", bool]
_Outcome = tuple[Any, Exception | None]


class Database(BatchWriter[Operation]):
    """Runs operations and questions of `PostgresCatalogue`. Thread safe. Raises StoreFull, IoError and InternalFault."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError, and IoError where the database does not answer."""
        super().__init__()
        self._address = Address(url)
        check_server(self._address)
        self._writer_db: psycopg.Connection | None = connect(self._address, writes=True)
        try:
            check_schema(self._writer_db, self._address)
        except BaseException:
            self._writer_db.close()
            raise
        self._watch = Watch()
        self._leading = Leading(self._address, self._watch)
        self._notices, self._moved = Notices(), list[SampleKey]()  # Of the thread that writes.
        self._listeners: list[Listener] = []
        self._readers: queue.LifoQueue[psycopg.Connection | None] = queue.LifoQueue()
        for _ in range(_READERS):
            self._readers.put(None)  # Connected when it is needed; what is connected comes first.
        self._name, self._number = uuid.uuid4(), 0
        self._thread.start()

    def __str__(self) -> str:
        return str(self._address)

    def close(self, *, clean: bool = True) -> None:
        """Write what was asked so far and close. A catalogue here is as clean after a kill."""
        if not self._stop_writing():
            return
        if self._writer_db is not None:
            with suppress(psycopg.Error), self._watch.limit(self._writer_db, _WRITE_S):
                self._writer_db.execute("DELETE FROM writers WHERE writer = %s", (self._name,))
            self._writer_db.close()
        for reader in [self._readers.get() for _ in range(_READERS)]:
            if reader is not None:
                reader.close()
            self._readers.put(None)
        self._leading.close()
        for listener in self._listeners:
            listener.close()
        self._watch.close()

    def lead(self) -> int:
        return self._leading.lead()

    def watch(self, told: Callable[[SampleKey | None], None]) -> None:
        self._listeners.append(Listener(self._address, self._watch, told))

    # Writing.

    def _submit(
        self,
        run: Callable[[Work], _T],
        keys: Iterable[SampleKey] = (),
        *,
        urgent: bool = True,
        gives_leases: bool = False,
        term: int = 0,
        is_commit: bool = False,
    ) -> Future[_T]:
        """Run an operation in the next transaction. The future is done once that is committed."""
        return self._ask_for(Operation(run, tuple(keys), gives_leases, term, is_commit), urgent=urgent)

    def _written(self) -> None:
        """Waits until what lingers is written: what was opened before shows from here on."""
        if self._is_lingering():
            self._submit(lambda work: None).result()

    def _write_batch(self, batch: list[_Entry]) -> bool:
        self._number += 1
        try:
            outcomes = _Try(self, batch).until_known()
        except (psycopg.Error, SlotStreamError, VerdictUnknown) as error:
            if len(batch) > 1 and isinstance(error, psycopg.Error):
                return False
            if isinstance(error, VerdictUnknown):
                self._notices.add(self._moved)  # Others are told that something may have happened.
            for operation, future, _ in batch:
                future.set_exception(self._told(error, operation))
            return True
        except Exception as error:  # A fault of our own: the thread goes on.
            _log.exception("the catalogue could not write")
            self._drop_writer_connection()
            for _, future, _ in batch:
                future.set_exception(InternalFault(f"the catalogue failed: {type(error).__name__}"))
            return True
        for (_, future, _), (result, raised) in zip(batch, outcomes, strict=True):
            if raised is None:
                future.set_result(result)
            else:
                future.set_exception(raised)
        self._notices.add(self._moved)
        self._tell()
        if self._number % _FOLD_EVERY == 0:
            self._fold()
        return True

    def _tell(self) -> None:
        """Other servers, what happened."""
        if not self._notices:
            return
        try:
            db = self._writer_connection()
            with self._watch.limit(db, _WRITE_S):
                self._notices.send(db)
        except (psycopg.Error, IoError) as error:
            _log.info("others are told later what happened: %s", self._address.redacted(one_line(error)))
            self._drop_writer_connection()

    def _told(self, error: Exception, operation: Operation) -> Exception:
        """Of a failed transaction, as its operation is told it."""
        if isinstance(error, psycopg.Error):
            return self._failure(error)
        if isinstance(error, VerdictUnknown) and not operation.is_commit:
            return IoError(str(error))
        return error

    def _failure(self, error: psycopg.Error) -> SlotStreamError:
        told = failure(error)
        return type(told)(self._address.redacted(str(told)))

    def _writer_connection(self) -> psycopg.Connection:
        """Raises IoError."""
        if self._writer_db is None:
            self._writer_db = connect(self._address, writes=True)
        return self._writer_db

    def _drop_writer_connection(self) -> None:
        if self._writer_db is not None:
            with suppress(psycopg.Error):
                self._writer_db.close()
            self._writer_db = None

    def _transact(self, batch: list[_Entry], db: psycopg.Connection) -> list[_Outcome] | None:
        """All of a transaction but its COMMIT. None where a transaction of its number is committed already."""
        db.execute("BEGIN")
        row = db.execute(_NUMBER, (self._name, self._number)).fetchone()
        if row is None:
            return None
        operations = [operation for operation, _, _ in batch]
        if any(operation.gives_leases for operation in operations):
            db.execute(_GIVING_LEASES)
        term = term_of(db, hold=True) if any(operation.term for operation in operations) else 0
        work = Work(Rows(db, (key for operation in operations for key in operation.keys)), db, row[0], term)
        outcomes: list[_Outcome] = []
        for operation in operations:
            work.rows.begin()
            try:
                outcomes.append((operation.run(work), None))
            except psycopg.Error:
                raise
            except Exception as error:
                work.rows.undo()
                outcomes.append((None, error))
        work.rows.write()
        self._moved = work.rows.moved
        return outcomes

    def _fold(self) -> None:
        """One row of many in `deltas`; and the rows of threads that write no more."""
        try:
            db = self._writer_connection()
            with self._watch.limit(db, _WRITE_S):
                db.execute(_FOLD)
                db.execute(_FORGET_WRITERS, (self._name,))
        except (psycopg.Error, IoError) as error:
            _log.info("the totals of the catalogue are folded later: %s", self._address.redacted(one_line(error)))

    # Reading.

    def _ask(self, question: Callable[[psycopg.Connection], _T]) -> _T:
        """The answer of a query that changes nothing."""
        db = self._readers.get()
        try:
            if self._closed:
                raise Interrupted("the catalogue is closed")
            was_open = db is not None and not db.closed
            if db is None or db.closed:
                db = connect(self._address)
            began = time.monotonic()
            try:
                with self._watch.limit(db, _READ_S):
                    return question(db)
            except psycopg.Error as error:
                if is_lost(error, db):
                    db.close()
                if not (was_open and db.closed) or time.monotonic() - began > _FRESH_S:
                    raise self._failure(error) from None
            # It was lost since it was used last, perhaps.
            db = None
            db = connect(self._address)
            try:
                with self._watch.limit(db, _READ_S):
                    return question(db)
            except psycopg.Error as error:
                raise self._failure(error) from None
        finally:
            self._readers.put(None if db is None or db.closed else db)


class _Try:
    """One batch, done until it is known what became of it. Everything but the deadline of a verdict raises psycopg.Error."""

    def __init__(self, database: Database, batch: list[_Entry]) -> None:
        self._database, self._batch = database, batch
        self._began = time.monotonic()
        self._outcomes: list[_Outcome] | None = None  # Of a transaction whose COMMIT nobody answered.
        self._lost = 0

    def until_known(self) -> list[_Outcome]:
        """What the operations answered, committed. Raises psycopg.Error, IoError and VerdictUnknown."""
        while True:
            try:
                db = self._database._writer_connection()
            except IoError as error:
                self._wait_or_raise(error)
                continue
            try:
                with self._database._watch.limit(db, _WRITE_S):
                    return self._once(db)
            except psycopg.Error as error:
                if is_met(error) and not db.closed:
                    self._undo(db)
                    self._wait_for_others(error)
                elif is_lost(error, db):
                    self._database._drop_writer_connection()
                    self._lost += 1
                    if self._outcomes is not None or self._lost > _FRESH_TRIES or self._is_late():
                        self._wait_or_raise(self._database._failure(error))
                else:
                    self._undo(db)
                    raise

    def _once(self, db: psycopg.Connection) -> list[_Outcome]:
        outcomes = self._database._transact(self._batch, db)
        if outcomes is None:
            db.execute("ROLLBACK")
            assert self._outcomes is not None, "a number is used for one batch"
            return self._outcomes
        self._outcomes = None  # The one before is not committed, and cannot be any more.
        try:
            db.execute("COMMIT")
        except psycopg.Error as error:
            if is_lost(error, db):
                self._outcomes = outcomes
            raise
        return outcomes

    def _is_late(self) -> bool:
        return time.monotonic() - self._began > _FRESH_S

    def _undo(self, db: psycopg.Connection) -> None:
        try:
            db.execute("ROLLBACK")
        except psycopg.Error:
            self._database._drop_writer_connection()

    def _wait_for_others(self, error: psycopg.Error) -> None:
        """Before a transaction is done again that met others."""
        if time.monotonic() - self._began > (_MEETINGS_S if self._outcomes is None else _VERDICT_S):
            self._wait_or_raise(error)
        time.sleep(random.uniform(0, 0.02))

    def _wait_or_raise(self, error: Exception) -> None:
        """Nothing can be done at the moment. Where nothing was left open, that is the answer at once."""
        if self._outcomes is None:
            raise error
        if time.monotonic() - self._began > _VERDICT_S:
            raise VerdictUnknown("the catalogue went away at a commit, and did not come back in time to tell") from None
        time.sleep(_PAUSE_S)
