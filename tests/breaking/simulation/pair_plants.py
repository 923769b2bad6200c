"""Faults to plant in what two servers share, or in how they use it: the traps of object stores and databases, and mistakes.

`python tests/breaking/simulation/run.py --store cluster --seeds 1000 --plant NAME` shows how the simulation finds each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from simulation.engines import SimCatalogue
from simulation.plants import _set
from simulation.threads import Future, SimTime
from support import memory_blobs, memory_catalogue, memory_tables
from support.memory_blobs import MemoryBlobs
from support.memory_catalogue import MemoryCatalogue
from support.memory_tables import Begun

from slotstream.server.ingest import stream
from slotstream.store.cluster.keeping import DatabaseTime, Keeper
from slotstream.store.cluster.publishing import ObjectPublisher
from slotstream.store.cluster.reading import object_key
from slotstream.store.cluster.store import ObjectStore
from slotstream.store.cluster.uploads import ObjectUpload
from slotstream.store.records import SampleRecord
from slotstream.wire.errors import InternalFault, IoError

_Plant = Callable[[], None]
PAIR_PLANTS: dict[str, _Plant] = {}


def _pair_plant(name: str) -> Callable[[_Plant], _Plant]:
    def known(plant: _Plant) -> _Plant:
        PAIR_PLANTS[name] = plant
        return plant

    return known


@_pair_plant("a-look-decides-a-lost-commit")
def _() -> None:
    """Where nobody answered a COMMIT, the row is looked for; it is not there yet, and the sample is told to have failed."""

    def look(self: SimCatalogue, before: Any, is_commit: bool) -> None:
        if is_commit and not before.is_committed:
            raise IoError("the catalogue did not take the sample")

    def believes(self: ObjectPublisher, upload: ObjectUpload, sealed: SampleRecord, is_sent: bool) -> bool:
        if not is_sent:
            upload.finish(sealed)
        upload.is_stored = self._shared.commit(sealed).result() is None
        return upload.is_stored

    _set(SimCatalogue, "_not_answered", look)
    _set(ObjectPublisher, "_is_committed", believes)


@_pair_plant("a-failure-ends-nothing")
def _() -> None:
    """A failure is told, and the attempt stays open: the leader makes a sample of its object."""

    def end(self: MemoryCatalogue, attempt: str) -> Future[bool]:
        done: Future[bool] = Future()
        done.set_result(True)
        return done

    _set(MemoryCatalogue, "end", end)


@_pair_plant("a-failure-nobody-recorded")
def _() -> None:
    """A sender hears of a failure that the catalogue could not be told, so no other server knows of it: kills found it."""
    _set(ObjectStore, "_leave_open", lambda self, key, error: None)


@_pair_plant("a-commit-needs-no-attempt")
def _() -> None:
    """A server that was taken for dead commits what the leader has removed."""
    commit = MemoryCatalogue.commit

    def careless(self: MemoryCatalogue, record: SampleRecord) -> Any:
        self._tables.attempts[record.attempt] = Begun(record.key, 0, 1 << 62)
        return commit(self, record)

    _set(MemoryCatalogue, "commit", careless)
    _set(Keeper, "check_open", lambda self, attempt: None)


@_pair_plant("a-commit-replaces")
def _() -> None:
    """Of two that send one id, the second takes the place of the first."""
    get = dict.get

    def commit(self: MemoryCatalogue, record: SampleRecord) -> Any:
        def operation() -> None:
            row = get(self._tables.rows, record.key)
            if row is not None and row.record.attempt:
                self._tables.leave(record.key, row.record.attempt)
            self._tables.attempts.pop(record.attempt, None)
            self._tables.put(record)

        return self._do(operation, record.key, is_commit=True)

    _set(MemoryCatalogue, "commit", commit)


@_pair_plant("row-before-object")
def _() -> None:
    """The row is written first, and the object put after it."""

    def hasty(self: ObjectPublisher, upload: ObjectUpload, sealed: SampleRecord, is_sent: bool) -> bool:
        upload.is_stored = self._shared.commit(sealed).result() is None
        if upload.is_stored:
            upload.finish(sealed)
        return upload.is_stored

    _set(ObjectPublisher, "_is_committed", hasty)


@_pair_plant("any-content-is-a-duplicate")
def _() -> None:
    """What is stored under an id is not compared with what was sent."""
    _set(ObjectPublisher, "_is_same", lambda self, upload, draft, there: True)


@_pair_plant("removed-at-once")
def _() -> None:
    """The object of an attempt that ended goes at once: what was under way to it arrives later."""
    for module in (memory_catalogue, memory_tables):
        _set(module, "REMOVED_AFTER_S", 0.0)


@_pair_plant("repeated-and-sure")
def _() -> None:
    """An upload that was answered in the end counts as one of which nothing is under way: histories found it."""
    finish = ObjectUpload.finish

    def sure(self: ObjectUpload, record: SampleRecord) -> None:
        finish(self, record)
        self.is_sure = True

    _set(ObjectUpload, "finish", sure)


@_pair_plant("sends-when-taken-for-dead")
def _() -> None:
    """A server that stood still goes on sending, though its attempt may have been removed meanwhile."""
    _set(Keeper, "check_open", lambda self, attempt: None)


@_pair_plant("forgotten-before-removed")
def _() -> None:
    """An attempt is forgotten though its object could not be removed."""

    def page(self: Keeper, due: Sequence[Any]) -> tuple[list[str], None]:
        done = []
        for attempt in due:
            with suppress(IoError):
                if attempt.is_ended:
                    done.append(attempt.name)
                    self._blobs.abort(object_key(attempt.key, attempt.name))
                else:
                    self._decide(attempt)
        return done, None

    _set(Keeper, "_sweep_page", page)


@_pair_plant("abort-does-not-look")
def _() -> None:
    """The store says that an upload is aborted, where it was put together meanwhile: the object is not looked for."""

    def abort(self: MemoryBlobs, key: str) -> None:
        if any(upload[0] == key for upload in self._bucket.uploads):
            self._do(lambda: self._end_uploads(key), "abort")
            return
        if self._part_bytes(0) >= 1 << 20:
            self.delete(key)

    _set(MemoryBlobs, "abort", abort)


@_pair_plant("parts-not-counted")
def _() -> None:
    """A part that was not answered counts as sent, and nobody compares the object's size before its row is written."""
    put = memory_blobs._MemoryPut
    send = put._send

    def hopeful(self: Any, number: int, length: int) -> None:
        with suppress(IoError):
            send(self, number, length)

    checksum = MemoryBlobs.checksum

    def finish(self: Any, nbytes: int) -> None:
        self._blobs.checksum = lambda key: type("Any", (), {"nbytes": nbytes})
        try:
            whole(self, nbytes)
        finally:
            self._blobs.checksum = lambda key: checksum(self._blobs, key)

    whole = put.finish
    _set(put, "_send", hopeful)
    _set(put, "finish", finish)


@_pair_plant("an-engine-away-is-internal")
def _() -> None:
    """An object store that is away is told as a fault of the server, which is final to the connector."""
    finish = ObjectUpload.finish

    def told(self: ObjectUpload, record: SampleRecord) -> None:
        try:
            finish(self, record)
        except IoError as error:
            raise InternalFault(str(error)) from error

    _set(ObjectUpload, "finish", told)


@_pair_plant("a-servers-own-clock")
def _() -> None:
    """Samples are stamped by the server's clock, which leaps, and not by the database's."""
    _set(DatabaseTime, "__call__", lambda self: SimTime.time_ns())


@_pair_plant("abandoned-samples-arrive-for-ever")
def _() -> None:
    """The row of a sample whose server died stays as it is."""

    def nothing(self: MemoryCatalogue, key: Any) -> Future[bool]:
        done: Future[bool] = Future()
        done.set_result(False)
        return done

    _set(MemoryCatalogue, "fail_abandoned", nothing)


@_pair_plant("a-long-commit-says-nothing")
def _() -> None:
    """A peer hears nothing while an object store takes its time: it gives the stream up, with all that is on it."""
    _set(stream, "_REASSURE_S", 1e9)
