"""What stays and what goes: readers, acks and leases, deletions, and the quarantine. `SampleStore.lifetimes` is one."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from slotstream.store.catalogue.queries import Candidate, Queue, Standing, Usage
from slotstream.store.catalogue.sqlite import retention_sql
from slotstream.store.catalogue.sqlite.sql import get as get_record
from slotstream.store.disk.files import store_error
from slotstream.store.parts import StoreParts
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.store.upkeep import verifying
from slotstream.store.upkeep.clock_watch import ClockWatch
from slotstream.store.upkeep.deleting import Deleter
from slotstream.store.upkeep.quarantine import Quarantine
from slotstream.store.upkeep.verifying import Verdict
from slotstream.wire.errors import BadParams, IoError, SampleNotFound, SlotStreamError, StoreFull, UnsupportedFormat
from slotstream.wire.names import LEASE_S_MAX, check_holder

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
LEASES_MAX = 10_000
_NS = 1_000_000_000


class Lifetimes:
    """Thread safe; methods block for the disk. Raises StoreFull, IoError, InternalFault and StoreGone unless it says more."""

    def __init__(self, parts: StoreParts) -> None:
        self.clock = parts.clock
        self._files, self._data_dir, self._opened = parts.files, parts.data_dir, parts.opened
        self._catalogue, self._id_lock = parts.catalogue, parts.id_lock
        self.watch = ClockWatch(parts.clock, self.remembered, self.remember)
        self._quarantine = Quarantine(parts.files, parts.data_dir, parts.opened)
        self._deleter = Deleter(parts, self.is_read)
        self.quarantined = 0  # Samples taken out of service by this process.
        self._readers: Counter[SampleKey] = Counter()
        self._readers_lock = threading.Lock()

    # Readers.

    def begin_read(self, key: SampleKey) -> None:
        """From here to `end_read` the sample is not deleted but by name. Called before its file is looked for."""
        with self._readers_lock:
            self._readers[key] += 1

    def end_read(self, key: SampleKey) -> None:
        with self._readers_lock:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]

    def is_read(self, key: SampleKey) -> bool:
        """Whether somebody has the sample open."""
        with self._readers_lock:
            return key in self._readers

    def count_read(self, key: SampleKey, committed_unix_ns: int) -> Future[None]:
        """Every row of the sample committed then was read. Done when it is counted; a crash may lose the last counts."""
        return self._catalogue.submit(lambda db: retention_sql.count_read(db, key, committed_unix_ns))

    def count_reads(self, reads: Sequence[tuple[SampleKey, int]]) -> Future[None]:
        """Likewise of many samples, each with when it was committed."""

        def count(db: sqlite3.Connection) -> None:
            for key, committed_unix_ns in reads:
                retention_sql.count_read(db, key, committed_unix_ns)

        return self._catalogue.submit(count)

    # Acks and leases.

    def ack(self, key: SampleKey) -> None:
        """Note that a reader is done with the sample. Raises SampleNotFound unless it is committed."""
        now = self.clock.now()
        if not self._catalogue.submit(lambda db: retention_sql.ack(db, key, now)).result():
            raise SampleNotFound(f"there is no committed sample {key}")

    def lease(
        self, key: SampleKey, holder: str, seconds: float, leases_max: int | None = None, namespace_max: int | None = None
    ) -> int:
        """Keep a committed sample for `holder` for so long from now, at most LEASE_S_MAX; the Unix ns when that ends.

        A holder's next lease takes the place of its last; 0 seconds give it back. Leases survive restarts, but not the loss
        of the catalogue. Raises SampleNotFound, BadParams and, when `leases_max` leases are held (by default LEASES_MAX), or
        `namespace_max` in the sample's namespace (by default as many), StoreFull.
        """
        most = LEASES_MAX if leases_max is None else leases_max
        most_there = most if namespace_max is None else namespace_max
        check_holder(holder)
        if not 0 <= seconds <= LEASE_S_MAX:
            raise BadParams(f"a lease lasts 0 to {LEASE_S_MAX:.0f} seconds")
        if seconds == 0:
            self.end_leases(key, holder)
            return 0

        def take(db: sqlite3.Connection) -> int | SlotStreamError:
            """When the lease ends; or why there is none, which raised in here would undo what shares the transaction."""
            # Not from before: a clock that is right again may meanwhile have given out leases that end before that moment.
            now = self.clock.now()
            until = now + round(seconds * _NS)
            record = get_record(db, key.namespace, key.sample_id)
            if record is None or record.state is not State.COMMITTED:
                return SampleNotFound(f"there is no committed sample {key}")
            retention_sql.forget_leases(db, now)
            if not retention_sql.lease(db, key, holder, until, most, most_there):
                # Not how many: that would tell of other namespaces.
                return StoreFull(f"no more leases are given: this server allows {most}, and {most_there} of a namespace")
            return until

        return self._leased(take)

    def end_leases(self, key: SampleKey, holder: str | None) -> None:
        """Give back the lease of `holder` on a sample; None: everybody's. Raises SampleNotFound and BadParams."""
        if holder is not None:
            check_holder(holder)

        def end(db: sqlite3.Connection) -> int | SlotStreamError:
            record = get_record(db, key.namespace, key.sample_id)
            if record is None or record.state is not State.COMMITTED:
                return SampleNotFound(f"there is no committed sample {key}")
            retention_sql.release(db, key, holder)
            return 0

        self._leased(end)

    def _leased(self, change: Callable[[sqlite3.Connection], int | SlotStreamError]) -> int:
        ends = self._catalogue.submit(change).result()
        if isinstance(ends, SlotStreamError):
            raise ends
        return ends

    def accept_clock(self) -> None:
        """The clock is right. A lease that lasts longer than one may was given while it ran ahead: it ends when one may."""
        self.watch.accept()
        until = self.clock.now() + round(LEASE_S_MAX * _NS)
        self._catalogue.submit(lambda db: retention_sql.shorten_leases(db, until)).result()

    def standing(self, key: SampleKey) -> Standing:
        """Reads, ack and lease of a sample."""
        return self._catalogue.ask(lambda db: retention_sql.standing(db, key, self.clock.now()))

    # Deletions. Each looks first whether the directory is still the one that was opened.

    def delete(self, record: SampleRecord) -> None:
        """Remove a sample by name, its id's lock held. Raises Leased, however few seconds the lease lasts."""
        self._opened.check()
        self._deleter.delete(record)

    def delete_unused(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Remove those that nobody reads, holds a lease on, or has replaced; which they were."""
        self._opened.check()
        return self._deleter.delete_unused(candidates)

    def finish_deletions(self) -> None:
        """Try again what the disk refused earlier."""
        stuck = [record.key for record in self._catalogue.unfinished() if record.state is State.DELETING]
        if stuck:
            self._opened.check()
            self._deleter.finish(stuck)

    # Damage.

    def verify(self, record: SampleRecord, on_read: Callable[[int], None]) -> Verdict | None:
        """Check every byte of a committed sample; None when it is gone meanwhile. `on_read`: told of bytes as they are read."""
        self._opened.check()
        return verifying.verify_current(self._files, self._data_dir, self._catalogue, record, on_read)

    def quarantine(self, verdict: Verdict) -> str | None:
        """Take a damaged sample out of service: its file moves to the quarantine and its row says FAILED (DAMAGED).

        What became of the file, in words; None when nothing was done: the sample changed meanwhile, or the disk did not say.
        """
        record = verdict.record
        if not verdict.is_damage or record is None:
            return None
        with self._id_lock(record.key):
            return self._put_aside(record, verdict) if self._catalogue.get(record.key) == record else None

    def put_aside_if_rotten(self, record: SampleRecord) -> bool:
        """Check every byte of what is stored as `record`, its id's lock held; True when it was damaged, and is out of the way.

        Raises IoError when the disk does not say, and UnsupportedFormat when this version cannot.
        """
        verdict = verifying.verify_record(self._files, self._data_dir, record)
        if verdict.damage == verifying.IO_ERROR:
            raise IoError(f"whether {record.key} is stored and sound cannot be seen now: {verdict.message}")
        if verdict.damage == verifying.UNSUPPORTED:
            raise UnsupportedFormat(f"whether {record.key} is sound cannot be seen: {verdict.message}")
        if verdict.is_damage:
            self._put_aside(record, verdict)
        return verdict.is_damage

    def _put_aside(self, record: SampleRecord, verdict: Verdict) -> str:
        self._opened.check()
        try:
            done = f"moved to {self._quarantine.take(record)}"
        except FileNotFoundError:
            done = "gone"
        except OSError as error:
            raise store_error(error, f"moving {record.key} to the quarantine") from error
        message = f"file {done}; {verdict.damage}: {verdict.message}"  # Where it is comes first: a row keeps little.
        self._catalogue.put_damaged(record, message).result()
        with self._readers_lock:
            self.quarantined += 1
        fields = {"event": "damaged", "code": verdict.damage, "namespace": record.namespace, "sample_id": record.sample_id}
        _log.error("sample %s is damaged: %s", record.key, message, extra=fields)
        return done

    def quarantine_totals(self) -> tuple[int, int]:
        """Files in the quarantine, and their bytes."""
        try:
            return self._quarantine.totals()
        except OSError as error:
            raise store_error(error, "looking at the quarantine") from error

    # Looking: what a sweep asks (`sweeping.Stock`).

    def now(self) -> int:
        """The wall clock, in Unix ns."""
        return self.clock.now()

    def doubt(self) -> str:
        """Why the clock is in doubt; "" where it is not. For the thread that sweeps."""
        return self.watch.look()

    def candidates(self, queue: Queue, namespace: str, after: tuple[int, int], limit: int) -> list[Candidate]:
        return self._catalogue.ask(lambda db: retention_sql.candidates(db, queue, namespace, after, limit))

    def committed_until(self, namespace: str, until_unix_ns: int) -> int:
        """How many samples were committed by then."""
        return self._catalogue.ask(lambda db: retention_sql.committed_until(db, namespace, until_unix_ns))

    def usage(self, namespace: str) -> Usage:
        return self._catalogue.ask(lambda db: retention_sql.usage(db, namespace))

    def usages(self, after: str = "", limit: int = 1000) -> list[Usage]:
        """One page of namespaces, in the order of their names."""
        return self._catalogue.ask(lambda db: retention_sql.usages(db, after, limit))

    def every_usage(self) -> Iterator[Usage]:
        after = ""
        while page := self.usages(after):
            yield from page
            after = page[-1].namespace

    def ask(self, question: Callable[[sqlite3.Connection], _T]) -> _T:
        """The answer of a query that changes nothing."""
        return self._catalogue.ask(question)

    def records_after(self, row: int, limit: int) -> list[tuple[int, SampleRecord]]:
        """Rows of the catalogue behind row number `row`, in the order they were first seen."""
        return self._catalogue.scan_page(row, limit)

    def remembered(self, name: str) -> str | None:
        """What `remember` was told last, in this process or an earlier one."""
        return self._catalogue.ask(lambda db: retention_sql.get_meta(db, name))

    def remember(self, name: str, value: str, *, durable: bool = False) -> None:
        """`durable`: a loss of power does not forget it."""
        self._catalogue.submit(lambda db: retention_sql.set_meta(db, name, value), durable=durable).result()
