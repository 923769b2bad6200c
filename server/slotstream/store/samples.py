"""The store: a directory of sample files and their catalogue, with one owner at a time."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

from slotstream.common.throttle import Throttle
from slotstream.store.catalogue.holds import ReadHold
from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.directory.recovery import open_recovered, whole_files
from slotstream.store.disk.clock import Clock, boot_ns
from slotstream.store.disk.directory import CATALOGUE_NAME, LOCK_NAME, DurableDirectories, OpenedDirectory
from slotstream.store.disk.files import DIR_MODE, Files, store_error
from slotstream.store.failure_shares import FailureShares
from slotstream.store.parts import StoreParts
from slotstream.store.publishing import Publisher
from slotstream.store.records import Failure, SampleKey, SampleRecord, SampleSpec, State
from slotstream.store.refusals import Refusals
from slotstream.store.sample.reading import SampleReader, unreadable
from slotstream.store.sample.remote import RemoteUpload
from slotstream.store.sample.upload import OpenSample, Upload
from slotstream.store.shared_state import SharedState
from slotstream.store.upkeep import verifying
from slotstream.store.upkeep.lifetimes import Lifetimes
from slotstream.store.upkeep.restoring import Restored, Restorer
from slotstream.store.upkeep.verifying import Verdict
from slotstream.wire.errors import (
    ConfigError,
    Damaged,
    Interrupted,
    IoError,
    SampleFailed,
    SampleNotFound,
    SlotStreamError,
    StillArriving,
    StoreFull,
    UnsupportedFormat,
    VerdictUnknown,
)

_log = logging.getLogger(__name__)
_unrecorded = Throttle(every_s=60.0)  # Failures, by why the catalogue did not take them.
_Open = TypeVar("_Open", Upload, RemoteUpload)
FREE_BYTES_MIN = 4 << 20
_FREE_BYTES_TO_START = 1 << 20  # The catalogue writes before it can be read.
_REFUSED_MAX = 1024
_SETTLE_S = 2.0
_DESCRIPTORS_SPARE = 512  # Left for connections, readers and the catalogue.


@dataclass(frozen=True, slots=True)
class Held:
    """A sample that is read next: retention leaves it alone until `hold` ends. `record`: its row, if it was committed then."""

    key: SampleKey
    record: SampleRecord | None
    hold: ReadHold


@dataclass(frozen=True, slots=True)
class WholeFile:
    """All bytes of a committed sample's file, of which nothing was checked but how many they are."""

    record: SampleRecord
    raw: bytes


class SampleStore:
    """Samples on one disk. Thread safe; methods block for the disk. Made by `open`.

    Invariant: an upload is in `_uploads` from before its ARRIVING row until after its last row. See also `publishing`.
    """

    def __init__(
        self,
        parts: StoreParts,
        lock_fd: int,
        uploads_max: int,
        lifetimes: Lifetimes | None = None,
        publisher: Publisher | None = None,
        failure_shares: FailureShares | None = None,
    ) -> None:
        """`lifetimes`, `publisher` and `failure_shares`: where samples are not files."""
        self._parts = parts
        self.data_dir = parts.data_dir
        self._files, self._opened, self._catalogue = parts.files, parts.opened, parts.catalogue
        self._id_lock, self._free_bytes_min = parts.id_lock, parts.free_bytes_min
        self._lock_fd = lock_fd
        self._uploads_max = uploads_max
        self._uploads: dict[SampleKey, list[OpenSample]] = {}
        self._failing: dict[SampleKey, SampleRecord] = {}  # Ended, and their rows are queued.
        # While the disk was full, or would not remove what is left of them: known as long as this runs.
        self._refused: OrderedDict[SampleKey, SampleRecord] = OrderedDict()
        self._opening = 0
        self._uploads_lock = threading.Lock()
        self.lifetimes = lifetimes or Lifetimes(parts)
        self._directories = DurableDirectories(parts.files)
        self._failure_shares = failure_shares or FailureShares()
        self.refusals = Refusals()
        self._publisher = publisher or Publisher(parts, self.lifetimes.put_aside_if_rotten)
        self._unrecorded = False  # A failure could not be recorded: the next start has to look.

    @classmethod
    def open(
        cls,
        data_dir: Path | str,
        *,
        free_bytes_min: int = FREE_BYTES_MIN,
        files: Files | None = None,
        uploads_max: int | None = None,
        wall: Callable[[], int] = time.time_ns,
        elapsed: Callable[[], int] = boot_ns,
    ) -> Self:
        """Own the directory (created if missing), recover it, and be ready.

        `free_bytes_min`: bytes of disk that uploads leave free. `uploads_max`: samples that may be arriving at a time;
        by default what the limit of open files allows. `wall`: Unix nanoseconds; `elapsed`: of a clock that is never set.
        Raises ConfigError, in one sentence, when that cannot be.
        """
        files = files or Files()
        directory = Path(data_dir).absolute()
        limit = descriptors_allow() if uploads_max is None else uploads_max
        lock_fd = -1
        catalogue = None
        try:
            directory.mkdir(DIR_MODE, parents=True, exist_ok=True)
            files.confine(directory)
            lock_fd = _lock(files, directory)
            if (free := files.free_bytes(directory)) < free_bytes_min:
                full = f"the disk of {directory} is full: less than the {free_bytes_min} bytes of --free-bytes-min are free"
                if free < _FREE_BYTES_TO_START or not (directory / CATALOGUE_NAME).exists():
                    raise ConfigError(full)
                # What is there can still be read and deleted, which is also how room is made.
                _log.warning("%s; samples are refused until there are more", full)
            clock = Clock(0, wall, elapsed)
            catalogue, latest, recovered = open_recovered(files, directory, clock.now)
            clock.heard(latest)
            looked = "partials only" if catalogue.was_shut_down_cleanly else "all names"
            opened = OpenedDirectory(files, directory, lock_fd)
            store = cls(StoreParts(directory, files, opened, catalogue, clock, free_bytes_min), lock_fd, limit)
            catalogue.find_lost = store._lost_samples
        except (OSError, SlotStreamError, ConfigError) as error:
            if catalogue is not None:
                catalogue.close(clean=False)
            if lock_fd >= 0:
                files.close(lock_fd)
            if isinstance(error, ConfigError):
                raise
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise ConfigError(f"cannot use {directory} as the data directory: {reason}") from error
        _log.info("opened %s; looked at %s and recovered: %s", directory, looked, recovered)
        return store

    def close(self) -> None:
        """Fail what is still arriving and give the directory back."""
        with self._uploads_lock:
            uploads = [upload for same in self._uploads.values() for upload in same]
        for upload in uploads:
            with suppress(VerdictUnknown):  # Nobody waits for it any more.
                upload.abort(Failure.of(Interrupted("the server stopped while the sample was arriving")))
        self._end()
        self.lifetimes.watch.close()
        self._catalogue.close(clean=not (self._unrecorded or self._publisher.left_a_file))
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            self._files.close(fd)

    def _end(self) -> None:
        """What has to be done before the catalogue is closed."""

    # Writing.

    def open_upload(self, spec: SampleSpec, peer: str = "") -> Upload:
        """Begin a sample of `peer`. Raises as `open_remote` does, and TooLarge; it is then recorded as failed."""
        return self._open(spec, Upload, peer)

    def open_remote(self, spec: SampleSpec, peer: str = "") -> RemoteUpload:
        """Begin a sample that another process will write. Raises StoreFull, StoreGone, IoError, InternalFault, recorded too."""
        return self._open(spec, RemoteUpload, peer)

    def _open(self, spec: SampleSpec, make: Callable[..., _Open], peer: str) -> _Open:
        with self._uploads_lock:
            self._opening += 1
            count = self._opening + sum(map(len, self._uploads.values()))
        try:
            self._opened.check()
            if count > self._uploads_max:
                raise StoreFull(f"{self._uploads_max} samples are arriving already, as many as this server allows")
            self._directories.make(spec.key.directory(self.data_dir))
            stamp = self.lifetimes.clock.stamp
            upload = make(spec, self.data_dir, self._files, self._free_bytes_min, self._publisher.publish, self._ended, stamp)
            upload.peer = peer
            with self._uploads_lock:
                # Queued under the lock: rows of one id are written in the order in which its uploads came and went.
                self._uploads.setdefault(spec.key, []).append(upload)
                self._begin(upload, SampleRecord.arriving(spec, upload.created_unix_ns))
            return upload
        except SlotStreamError as error:
            refused = SampleRecord.refused(spec.key, spec.model, self.lifetimes.clock.stamp())
            self.record_failed(refused, Failure.of(error), peer)
            raise
        finally:
            with self._uploads_lock:
                self._opening -= 1

    def _begin(self, upload: OpenSample, record: SampleRecord) -> None:
        self._catalogue.begin(record)

    def record_failed(self, record: SampleRecord, failure: Failure, peer: str = "") -> None:
        """Let readers of the id know why there is no sample of `peer`.

        Does nothing while another upload of the id is arriving, and past the peer's share. Where the disk is full, nothing is
        written.
        """
        self.refusals.note(record.key, failure)
        if not self._failure_shares.take(peer):
            return
        if self.is_full:
            self._remember(record.failed(failure.code, failure.message))
            return
        with self._uploads_lock:
            if record.key in self._uploads:
                return
            failed, written = self._put_failed(record, failure)
        self._wait_failed(failed, written)

    def _ended(self, upload: OpenSample, failure: Failure | None) -> None:
        """An upload's last word. At every moment `_uploads`, `_failing` or the catalogue knows the sample."""
        key = upload.spec.key
        may_stay = True
        if failure is not None:
            self.refusals.note(key, failure)
            may_stay = self._failure_shares.take(upload.peer)
        with self._uploads_lock:
            same = self._uploads[key]
            same.remove(upload)
            if failure is None:
                self._refused.pop(key, None)
            if same:
                return
            del self._uploads[key]
            if failure is None:
                return
            if not may_stay:
                self._catalogue.forget(key)
                return
            failed, written = self._put_failed(SampleRecord.arriving(upload.spec, upload.created_unix_ns), failure)
        self._wait_failed(failed, written)

    def _put_failed(self, record: SampleRecord, failure: Failure) -> tuple[SampleRecord, Future[bool]]:
        """Queue the row of a failed sample. `_uploads_lock` is held."""
        failed = record.failed(failure.code, failure.message)
        self._failing[record.key] = failed
        return failed, self._catalogue.fail(record, failure.code, failure.message)

    def _wait_failed(self, failed: SampleRecord, written: Future[bool]) -> None:
        try:
            if not written.result():
                row = self._catalogue.get(failed.key)
                if row is not None and row.state is State.DELETING:  # It stands for a file that the disk would not remove.
                    self._remember(failed)
        except SlotStreamError as error:
            self._not_recorded(failed, error)
        finally:
            with self._uploads_lock:
                if self._failing.get(failed.key) is failed:
                    del self._failing[failed.key]

    def _not_recorded(self, failed: SampleRecord, error: SlotStreamError) -> None:
        """The catalogue did not take a failure. `stat` shows an arriving row without an upload as failed, and so does the
        next start: its sender may hear of it all the same."""
        self._unrecorded = True
        if (more := _unrecorded.more(error.code)) is not None:
            _log.warning("the failure of sample %s cannot be recorded: %s%s", failed.key, error, more)

    def _remember(self, failed: SampleRecord) -> None:
        """Of a sample that has no row: until this server ends, or a thousand more have come."""
        with self._uploads_lock:
            self._refused[failed.key] = failed
            while len(self._refused) > _REFUSED_MAX:
                self._refused.popitem(last=False)

    def _lost_samples(self, known: Callable[[SampleKey], SampleRecord | None]) -> Iterator[SampleRecord]:
        """Samples whose rows a rebuild of the catalogue lost. One that is being committed gets its row from its commit."""
        found = whole_files(self._files, self.data_dir, known)
        return (record for record in found if not self.is_arriving(record.key))

    def delete(self, key: SampleKey, created_unix_ns: int = 0) -> None:
        """Deletes a committed or failed sample. Open reads continue. Retention waits for readers, this does not.

        `created_unix_ns`: only the one that was opened then; 0: the one that has the id.
        Raises SampleNotFound, StillArriving, Leased, StoreFull, StoreGone, IoError and InternalFault.
        """
        with self._id_lock(key):
            record = self._catalogue.get(key)
            if (record is None or record.state is not State.COMMITTED) and self.is_arriving(key):
                raise StillArriving(f"{key} is still arriving")
            with self._uploads_lock:
                refused = self._refused.get(key)
                known = record or refused
                if known is None or created_unix_ns not in (0, known.created_unix_ns):
                    raise SampleNotFound(f"there is no sample {key}" + (" that was opened then" if known else ""))
                self._refused.pop(key, None)
            if record is not None:
                self.lifetimes.delete(record)

    # Reading.

    def is_arriving(self, key: SampleKey) -> bool:
        """Whether an upload of `key` is open in this process."""
        with self._uploads_lock:
            return key in self._uploads

    def _live_record(self, key: SampleKey) -> SampleRecord | None:
        """Of a sample that is arriving, or that failed a moment ago."""
        with self._uploads_lock:
            same = self._uploads.get(key)
            return SampleRecord.arriving(same[0].spec, same[0].created_unix_ns) if same else self._failing.get(key)

    def stat(self, key: SampleKey) -> SampleRecord | None:
        """What is known about a sample, the uploads of this process included; None when there is none."""
        live = self._live_record(key)
        record = self._catalogue.get(key)
        if record is not None and record.state is State.COMMITTED:
            return record
        if live is not None:
            return live
        if record is not None and record.state is State.ARRIVING:
            record = self._settle(key)
        if record is None or record.state is State.DELETING:
            with self._uploads_lock:
                return self._refused.get(key)
        return record

    def _settle(self, key: SampleKey) -> SampleRecord | None:
        """The row of a sample that was arriving a moment ago, once all that was asked of the catalogue so far is written."""
        live = self._live_record(key)
        if live is not None:
            return live
        record = self._catalogue.get_settled(key)
        if record is None or record.state is not State.ARRIVING:
            return record
        # Its failure could not be recorded (a full disk), or another upload of it has just begun.
        lost = replace(record, state=State.FAILED, error_code=Interrupted.code, error_message="the upload was interrupted")
        return self._live_record(key) or lost

    def list_page(self, query: ListQuery) -> tuple[list[SampleRecord], str]:
        """One page, newest first, and the next page's token ("" on the last). Raises BadPage, IoError and InternalFault."""
        records, token = self._catalogue.list_page(query)
        shown = (self.stat(r.key) if r.state is State.ARRIVING else r for r in records)
        return [r for r in shown if r is not None and r.state is not State.DELETING], token

    def settled(self) -> int:
        """A moment (Unix ns) up to which nothing commits any more. Waits for commits that are under way, two seconds at most.

        Samples that another process writes get their time there: while some are open, the moment is before they were opened.
        """
        until = self._publisher.settled(_SETTLE_S)
        with self._uploads_lock:
            still_open = [upload for same in self._uploads.values() for upload in same]
        return min([until, *(upload.created_unix_ns - 1 for upload in still_open if isinstance(upload, RemoteUpload))])

    def reader(self, key: SampleKey) -> SampleReader:
        """Open a committed sample; while it is open, retention leaves it alone.

        Raises SampleNotFound, SampleFailed, StillArriving, Damaged, UnsupportedFormat, StoreFull, StoreGone, IoError
        and InternalFault.
        """
        opened = self.open_held(self.hold([key])[0], lambda _: False)
        assert isinstance(opened, SampleReader), "no file is wanted"
        return opened

    def hold(self, keys: Sequence[SampleKey]) -> list[Held]:
        """Samples that are read next, one question for all. Each has to be given to `open_held`, or its hold be ended."""
        holds = [self.lifetimes.hold_read(key) for key in keys]  # Before looking: a deletion that has not begun by then waits.
        try:
            found = self._catalogue.get_many(keys)
        except SlotStreamError:
            found = [None] * len(keys)  # The one that it is about says so once it is opened.
        except BaseException:
            for hold in holds:
                hold.end()
            raise
        committed = [record if record is not None and record.state is State.COMMITTED else None for record in found]
        return list(map(Held, keys, committed, holds))

    def open_held(self, held: Held, wants_file: Callable[[SampleRecord], bool]) -> SampleReader | WholeFile:
        """As `reader`; of a sample that `wants_file` says yes to, all bytes of its file, where these can be had."""
        try:
            record = held.record or readable(held.key, self.stat(held.key))
            if wants_file(record) and (raw := self._file_of(record)) is not None:
                held.hold.end()
                return WholeFile(record, raw)
            return self._reader(held.key, record, held.hold.end)
        except BaseException:
            held.hold.end()
            raise

    def _reader(self, key: SampleKey, record: SampleRecord | None, closed: Callable[[], None]) -> SampleReader:
        while True:
            record = readable(key, record)
            try:
                return SampleReader(self._files, key.path(self.data_dir), record, closed)
            except FileNotFoundError:
                self._opened.check()
                error: SlotStreamError = Damaged(f"the file of {key} is gone")
            except OSError as failure:
                raise unreadable(failure) from failure
            except (Damaged, UnsupportedFormat) as failure:
                error = failure
            # Unless it was deleted, or replaced, between the look at the catalogue and the look at the disk.
            current = self.stat(key)
            if current == record:
                raise error
            record = current

    def _file_of(self, record: SampleRecord) -> bytes | None:
        """None where a reader says why, or reads what is there now."""
        try:
            fd = self._files.open_read(record.key.path(self.data_dir))
            try:
                if self._files.size(fd) != record.file_bytes:
                    return None
                raw = self._files.pread(fd, record.file_bytes, 0)
            finally:
                self._files.close(fd)
        except OSError:
            return None
        return raw if len(raw) == record.file_bytes else None

    def verify(self, key: SampleKey) -> Verdict:
        """Check every byte of a committed sample. Raises SampleNotFound, SampleFailed, StillArriving, InternalFault."""
        record = readable(key, self.stat(key))
        verdict = self.lifetimes.verify(record, lambda _: None)
        if verdict is None:
            raise SampleNotFound(f"there is no sample {key}")
        return verdict

    def verify_all(self, namespace: str = "") -> Iterator[Verdict]:
        """A verdict for every committed sample, then one for every foreign file.

        Raises IoError, InternalFault and StoreGone.
        """
        self._opened.check()
        yield from verifying.verify_samples(self._files, self.data_dir, self._catalogue, namespace)
        try:
            yield from verifying.foreign_files(self._files, self.data_dir, self._catalogue, namespace, self.is_arriving)
        except OSError as error:
            raise IoError(str(store_error(error, "looking for foreign files"))) from error

    def restore(self, namespace: str = "", sample_id: str = "") -> Iterator[Restored]:
        """Put what verifies again back from the quarantine, by file. Raises StoreFull, StoreGone, IoError and InternalFault."""
        return Restorer(self._parts).restore(namespace, sample_id)

    # Looking at the whole.

    @property
    def leads(self) -> bool:
        """Whether this server applies the rules and scrubs: of several that share a catalogue one does. Raises IoError."""
        return self._catalogue.lead() > 0

    @property
    def is_behind(self) -> bool:
        """Whether the catalogue is older than what is stored, and so nothing is deleted. Here each start compares both."""
        return False

    def shared_state(self) -> SharedState | None:
        """Of what this server shares with others; None: nothing. Asks nobody."""
        return None

    def watch(self, told: Callable[[SampleKey | None], None]) -> None:
        """`told(key)` whenever another server changed a sample, `told(None)` where that may be any. Here is no other."""

    @property
    def is_full(self) -> bool:
        """Whether less is free than samples must leave: they are refused, and nothing is noted about those that are."""
        try:
            return self._files.free_bytes(self.data_dir) < self._free_bytes_min
        except OSError:
            return False  # Whoever writes will be told more.

    def check_directory(self) -> None:
        """Raises StoreGone when the directory at the path is not the one that was opened any more."""
        self._opened.check()

    @property
    def writer(self) -> threading.Thread:
        """The catalogue's thread: without it nothing is committed."""
        return self._catalogue.writer

    def totals(self) -> dict[State, tuple[int, int]]:
        """State -> (samples, bytes of files)."""
        return self._catalogue.totals()

    def free_bytes(self) -> int:
        """Bytes of disk that may still be written, the reserve included. Raises IoError and InternalFault."""
        try:
            return self._files.free_bytes(self.data_dir)
        except OSError as error:
            raise store_error(error, "asking for free space") from error

    def disk_bytes(self) -> int:
        """The size of the disk. Raises IoError and InternalFault."""
        try:
            return self._files.disk_bytes(self.data_dir)
        except OSError as error:
            raise store_error(error, "asking for the size of the disk") from error


def readable(key: SampleKey, record: SampleRecord | None) -> SampleRecord:
    """`record`, if it is one of a committed sample. Raises SampleNotFound, SampleFailed and StillArriving."""
    if record is None or record.state is State.DELETING:
        raise SampleNotFound(f"there is no sample {key}")
    if record.state is State.FAILED:
        raise SampleFailed(f"{key} failed: {record.error_message}", record.error_code)
    if record.state is State.ARRIVING:
        raise StillArriving(f"{key} is still arriving")
    return record


def _lock(files: Files, directory: Path) -> int:
    try:
        return files.lock(directory / LOCK_NAME)
    except BlockingIOError as error:
        raise ConfigError(f"another server is using {directory}") from error


def descriptors_allow() -> int:
    """How many samples may be arriving: each holds a descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = 1 << 16 if soft == resource.RLIM_INFINITY else soft - _DESCRIPTORS_SPARE
    return max(64, min(allowed, 1 << 16))
