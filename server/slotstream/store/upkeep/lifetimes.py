"""What stays and what goes: readers, acks and leases, deletions, and the quarantine. `SampleStore.lifetimes` is one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from slotstream.store.catalogue.base import Questions
from slotstream.store.catalogue.holds import ReadHold
from slotstream.store.catalogue.queries import Candidate, Queue, Standing, Usage
from slotstream.store.disk.files import store_error
from slotstream.store.parts import StoreParts
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.store.upkeep import verifying
from slotstream.store.upkeep.clock_watch import ClockWatch
from slotstream.store.upkeep.deleting import Deleter
from slotstream.store.upkeep.quarantine import Quarantine
from slotstream.store.upkeep.verifying import Verdict
from slotstream.wire.errors import BadParams, IoError, SampleNotFound, UnsupportedFormat
from slotstream.wire.names import LEASE_S_MAX, check_holder

_log = logging.getLogger(__name__)
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
        self._deleter = Deleter(parts)
        self.quarantined = 0  # Samples taken out of service by this process.
        self._counting = threading.Lock()  # Guards it.

    # Readers.

    def hold_read(self, key: SampleKey) -> ReadHold:
        """Until the hold ends the sample is not deleted but by name. Taken before its file is looked for."""
        return self._catalogue.hold_read(key)

    def count_reads(self, reads: Sequence[tuple[SampleKey, int]]) -> Future[None]:
        """Every row of the samples, each committed then, was read. Done when it is counted; a crash may lose the last."""
        return self._catalogue.count_reads(reads)

    # Acks and leases.

    def ack(self, key: SampleKey) -> None:
        """Note that a reader is done with the sample. Raises SampleNotFound unless it is committed."""
        if not self._catalogue.ack(key):
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
        return self._catalogue.lease(key, holder, seconds, most, most_there)

    def end_leases(self, key: SampleKey, holder: str | None) -> None:
        """Give back the lease of `holder` on a sample; None: everybody's. Raises SampleNotFound and BadParams."""
        if holder is not None:
            check_holder(holder)
        self._catalogue.end_leases(key, holder)

    def accept_clock(self) -> None:
        """The clock is right. A lease that lasts longer than one may was given while it ran ahead: it ends when one may."""
        self.watch.accept()
        self._catalogue.shorten_leases(self.clock.now() + round(LEASE_S_MAX * _NS))

    def standing(self, key: SampleKey) -> Standing:
        """Reads, ack and lease of a sample."""
        return self._catalogue.standing(key)

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

    def scrub(self, record: SampleRecord, on_read: Callable[[int], None]) -> Verdict | None:
        """As `verify`, of what nobody asked for."""
        return self.verify(record, on_read)

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
        verdict = self._look(record)
        if verdict.damage == verifying.IO_ERROR:
            raise IoError(f"whether {record.key} is stored and sound cannot be seen now: {verdict.message}")
        if verdict.damage == verifying.UNSUPPORTED:
            raise UnsupportedFormat(f"whether {record.key} is sound cannot be seen: {verdict.message}")
        if verdict.is_damage:
            self._put_aside(record, verdict)
        return verdict.is_damage

    def _look(self, record: SampleRecord, on_read: Callable[[int], None] = lambda _: None) -> Verdict:
        return verifying.verify_record(self._files, self._data_dir, record, on_read)

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
        with self._counting:
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
        return self._catalogue.candidates(queue, namespace, after, limit)

    def committed_until(self, namespace: str, until_unix_ns: int) -> int:
        """How many samples were committed by then."""
        return self._catalogue.committed_until(namespace, until_unix_ns)

    def usage(self, namespace: str) -> Usage:
        return self._catalogue.usage(namespace)

    def usages(self, after: str = "", limit: int = 1000) -> list[Usage]:
        """One page of namespaces, in the order of their names."""
        return self._catalogue.usages(after, limit)

    def every_usage(self) -> Iterator[Usage]:
        after = ""
        while page := self.usages(after):
            yield from page
            after = page[-1].namespace

    @property
    def questions(self) -> Questions:
        """What a look ahead asks, which changes nothing."""
        return self._catalogue

    def records_after(self, row: int, limit: int) -> list[tuple[int, SampleRecord]]:
        """Rows of the catalogue behind row number `row`, in the order they were first seen."""
        return self._catalogue.scan_page(row, limit)

    def remembered(self, name: str) -> str | None:
        """What `remember` was told last, in this process or an earlier one."""
        return self._catalogue.get_meta(name)

    def remember(self, name: str, value: str, *, durable: bool = False) -> None:
        """`durable`: a loss of power does not forget it."""
        self._catalogue.set_meta(name, value, durable=durable)
