"""The store of one server of several: samples are objects in a bucket, and rows land in scratch on their way there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from slotstream.store.blobs.base import Blobs
from slotstream.store.catalogue.attempts import SharedCatalogue
from slotstream.store.catalogue.base import scan
from slotstream.store.cluster import scratch
from slotstream.store.cluster.failure_shares import SharedFailureShares
from slotstream.store.cluster.generation import Generations, is_own
from slotstream.store.cluster.keeping import DatabaseTime, Keeper
from slotstream.store.cluster.lifetimes import ObjectLifetimes
from slotstream.store.cluster.publishing import ObjectPublisher
from slotstream.store.cluster.reading import BlobFiles, attempt_of, object_path
from slotstream.store.cluster.uploads import ObjectUpload
from slotstream.store.parts import StoreParts
from slotstream.store.records import Failure, SampleKey, SampleRecord, SampleSpec, State
from slotstream.store.sample.reading import SampleReader, unreadable
from slotstream.store.sample.remote import RemoteUpload
from slotstream.store.sample.upload import OpenSample, Upload
from slotstream.store.samples import SampleStore, readable
from slotstream.store.shared_state import SharedState
from slotstream.store.upkeep.restoring import Restored
from slotstream.store.upkeep.verifying import FOREIGN, Verdict
from slotstream.wire.errors import Damaged, InternalFault, SlotStreamError, UnsupportedFormat, VerdictUnknown

_log = logging.getLogger(__name__)
_SENDERS = 8
_CLEANERS = 2
_PAGE = 500


class ObjectStore(SampleStore):
    """A `SampleStore`. Thread safe; methods block for the network too. Made by `opening.open_store`."""

    def __init__(
        self,
        parts: StoreParts,
        lock_fd: int,
        uploads_max: int,
        catalogue: SharedCatalogue,
        blobs: Blobs,
        clock: DatabaseTime,
    ) -> None:
        """`parts`: those of the scratch directory, with this catalogue."""
        objects, self._whole_objects = BlobFiles(blobs), BlobFiles(blobs, all_of_it=True)
        self._generations = Generations(catalogue, blobs)
        self._generations.look()
        lifetimes = ObjectLifetimes(parts, catalogue, blobs, objects, self._generations)
        publisher = ObjectPublisher(parts, catalogue, objects, lifetimes)
        super().__init__(parts, lock_fd, uploads_max, lifetimes, publisher, SharedFailureShares(catalogue))
        self._shared, self._blobs = catalogue, blobs
        self._senders = ThreadPoolExecutor(_SENDERS, thread_name_prefix="send")
        self._cleaners = ThreadPoolExecutor(_CLEANERS, thread_name_prefix="clean")
        self._keeper = Keeper(catalogue, blobs, objects, clock, self._generations, self._open_attempts, self._scratch_bytes)
        self._keeper.start()

    def _end(self) -> None:
        self._cleaners.shutdown()  # What was aborted is removed, or left to the leader.
        self._senders.shutdown(cancel_futures=True)
        self._keeper.stop()

    def close(self) -> None:
        super().close()
        self._blobs.close()

    # Writing.

    def open_upload(self, spec: SampleSpec, peer: str = "") -> Upload:
        return self._open(spec, self._make_upload, peer)

    def open_remote(self, spec: SampleSpec, peer: str = "") -> RemoteUpload:
        raise InternalFault("one process alone takes samples into an object store")

    def _make_upload(self, *parts: Any) -> ObjectUpload:
        return ObjectUpload(*parts, blobs=self._blobs, threads=self._senders, check_open=self._keeper.check_open)

    def _begin(self, upload: OpenSample, record: SampleRecord) -> None:
        assert isinstance(upload, ObjectUpload), "this store makes no other"
        self._keeper.began(upload.attempt)
        begun = self._shared.begin(replace(record, attempt=upload.attempt))
        begun.add_done_callback(upload.begin_sending)

    def _open_attempts(self) -> list[str]:
        with self._uploads_lock:
            uploads = [upload for same in self._uploads.values() for upload in same]
        # One whose row is not written yet would count as one that was ended.
        return [upload.attempt for upload in uploads if isinstance(upload, ObjectUpload) and upload.begun.done()]

    def _scratch_bytes(self) -> int:
        try:
            return scratch.nbytes(self._files, self.data_dir)
        except OSError:
            return self._keeper.scratch_bytes  # The disk is watched elsewhere.

    def _ended(self, upload: OpenSample, failure: Failure | None) -> None:
        """Raises VerdictUnknown for a failure of which the catalogue could not be told."""
        assert isinstance(upload, ObjectUpload), "this store makes no other"
        # Asked for first: nobody is told of a failure whose attempt may still become a sample.
        ended = None if upload.is_stored else self._shared.end(upload.attempt)
        is_recorded = False
        try:
            super()._ended(upload, failure)
            if failure is not None and ended is not None:
                self._check_ended(upload, ended)
            is_recorded = True
        finally:
            self._keeper.over(upload.attempt)
            self._clear(upload, ended, is_recorded=is_recorded)

    def _check_ended(self, upload: ObjectUpload, ended: Future[bool]) -> None:
        try:
            ended.result()
        except SlotStreamError as error:
            self._leave_open(upload.spec.key, error)

    def _not_recorded(self, failed: SampleRecord, error: SlotStreamError) -> None:
        super()._not_recorded(failed, error)
        self._leave_open(failed.key, error)

    def _leave_open(self, key: SampleKey, error: SlotStreamError) -> None:
        """Another server has only the row to go by, which says arriving, and the leader decides the attempt much later. So
        the sender hears nothing final, and comes again."""
        if error.retryable:
            raise VerdictUnknown(f"the failure of {key} cannot be recorded: {error}") from error

    def _clear(self, upload: ObjectUpload, ended: Future[bool] | None, *, is_recorded: bool) -> None:
        """What is left of an upload that is over, here and in the bucket."""
        if ended is None:
            upload.close_scratch()
            self._discard_scratch(upload)
            return
        with suppress(RuntimeError):  # The store is closed: the leader does it.
            self._cleaners.submit(self._clean, upload, ended.result, is_recorded=is_recorded)

    def _discard_scratch(self, upload: ObjectUpload) -> None:
        try:
            self._files.unlink(upload.partial)
        except OSError as error:
            _log.warning("cannot remove the scratch file %s: %s", upload.partial, error.strerror or error)

    def _clean(self, upload: ObjectUpload, was_ended: Callable[[], bool], *, is_recorded: bool) -> None:
        """Of an attempt that is no sample. What cannot be removed now, the leader removes; so too where the failure is not
        recorded, for with the attempt's row the sample's row may say that it failed."""
        try:
            upload.stop_sending()
            if was_ended() and is_recorded and upload.is_sure and not self._generations.is_behind:
                upload.drop()
                self._shared.forget_attempts([upload.attempt]).result()
        except SlotStreamError as error:
            _log.info("the object of a failed attempt at %s is removed later: %s", upload.spec.key, error)
        except Exception:
            _log.exception("a fault while an attempt at %s was cleaned", upload.spec.key)

    # Reading.

    def is_arriving(self, key: SampleKey) -> bool:
        """Whether an upload of `key` is open in any server."""
        if super().is_arriving(key):
            return True
        row = self._shared.get(key)
        return row is not None and row.state is State.ARRIVING

    def _settle(self, key: SampleKey) -> SampleRecord | None:
        return self._live_record(key) or self._shared.get_settled(key)  # It arrives at another server, perhaps.

    def _reader(self, key: SampleKey, record: SampleRecord | None, closed: Callable[[], None]) -> SampleReader:
        while True:
            record = readable(key, record)
            self._keeper.reads.begin(record.attempt)
            try:
                return SampleReader(
                    self._whole_objects, object_path(record), record, partial(self._read, record.attempt, closed)
                )
            except FileNotFoundError:
                error: SlotStreamError = Damaged(f"the object of {key} is gone")
            except OSError as failure:
                self._keeper.reads.end(record.attempt)
                raise unreadable(failure) from failure
            except (Damaged, UnsupportedFormat) as failure:
                error = failure
            except BaseException:
                self._keeper.reads.end(record.attempt)
                raise
            self._keeper.reads.end(record.attempt)
            current = self.stat(key)
            if current == record:
                raise error
            record = current

    def _read(self, attempt: str, closed: Callable[[], None]) -> None:
        self._keeper.reads.end(attempt)
        closed()

    def verify_all(self, namespace: str = "") -> Iterator[Verdict]:
        for record in scan(self._shared, namespace):
            if record.state is State.COMMITTED and (verdict := self.lifetimes.verify(record, lambda _: None)) is not None:
                yield verdict
        yield from self._foreign(namespace)

    def _foreign(self, namespace: str) -> Iterator[Verdict]:
        """What the bucket has below our prefix that belongs to no sample and no attempt: it is named, and never deleted."""
        found = self._blobs.list(f"{namespace}/" if namespace else "")
        while page := list(islice(found, _PAGE)):
            named = {stored.key: attempt_of(stored.key) for stored in page}
            ours = [one for one in named.values() if one is not None]
            known = self._shared.known_attempts([attempt for _, attempt in ours], [key for key, _ in ours])
            for name, one in named.items():
                if is_own(name):
                    continue
                if one is None or one[1] not in known:
                    space, _, rest = name.partition("/")
                    # It was listed before its row was looked for, so it may have been deleted or committed meanwhile.
                    if self._blobs.checksum(name) is not None:
                        yield Verdict(space, rest, FOREIGN, f"{name} is not an object of a committed sample")

    def restore(self, namespace: str = "", sample_id: str = "") -> Iterator[Restored]:
        """Nothing: there is no quarantine."""
        return iter(())

    # Looking at the whole.

    @property
    def leads(self) -> bool:
        return self._keeper.leads

    @property
    def is_behind(self) -> bool:
        return self._generations.is_behind

    def shared_state(self) -> SharedState:
        keeper = self._keeper
        names = str(self._blobs), str(self._shared)
        return SharedState(*names, keeper.trouble, keeper.leads, keeper.scratch_bytes, keeper.attempts)

    def watch(self, told: Callable[[SampleKey | None], None]) -> None:
        self._shared.watch(told)

    def check_directory(self) -> None:
        """Raises StoreGone where the scratch directory is another one, or an engine is away."""
        super().check_directory()
        self._keeper.check()
