"""Faults to plant in the server, each a mistake that somebody could make. The simulation must find every one of them.

`python tests/breaking/simulation/run.py --seeds 1000 --plant NAME` shows how; `test_simulation.py` beside it does it for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulation.disk import SimFiles
from simulation.threads import Future

from slotstream.server.access.gate import Shares
from slotstream.server.ingest.acks import Acks
from slotstream.server.ingest.open_samples import OpenSamples
from slotstream.server.ingest.sample_writer import SampleWriter
from slotstream.server.samples.service import SamplesService
from slotstream.store.catalogue.sqlite import retention_sql
from slotstream.store.catalogue.sqlite.catalogue import SqliteCatalogue
from slotstream.store.directory import recovery
from slotstream.store.disk.files import Files
from slotstream.store.parts import StoreParts
from slotstream.store.publishing import Publisher
from slotstream.store.records import State
from slotstream.store.sample.upload import Upload
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep import deleting
from slotstream.store.upkeep.deleting import Deleter
from slotstream.store.upkeep.lifetimes import Lifetimes

_Plant = Callable[[], None]
PLANTS: dict[str, _Plant] = {}


def _plant(name: str) -> Callable[[_Plant], _Plant]:
    def known(plant: _Plant) -> _Plant:
        PLANTS[name] = plant
        return plant

    return known


def _set(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, value)


@_plant("rows-not-synced")
def _() -> None:
    """Committed is said before the rows are synced."""
    _set(SimFiles, "sync_data", lambda self, fd: None)


@_plant("name-not-synced")
def _() -> None:
    """Committed is said before the file's name is synced."""
    _set(SimFiles, "sync_dir", lambda self, path: None)


@_plant("row-not-awaited")
def _() -> None:
    """Committed is said before the catalogue's row is written."""
    commit = SqliteCatalogue.commit

    def hasty(self: SqliteCatalogue, record: Any) -> Future[None]:
        commit(self, record)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    _set(SqliteCatalogue, "commit", hasty)


@_plant("any-content-is-a-duplicate")
def _() -> None:
    """What is stored under an id is not compared with what was sent."""
    _set(Publisher, "_is_stored", lambda self, upload, draft, path: path.exists())


@_plant("overwrites")
def _() -> None:
    """What is stored under an id is replaced by what was sent."""
    _set(Publisher, "_is_stored", lambda self, upload, draft, path: False)


@_plant("ids-not-locked")
def _() -> None:
    """Two streams may publish one id at a time, or one publish what another deletes."""
    _set(StoreParts, "id_lock", lambda self, key: nullcontext())


@_plant("failed-commit-leaves-its-file")
def _() -> None:
    """The file of a commit that failed stays under its name, although the sample was told to have failed."""
    _set(Publisher, "_take_back", lambda self, path, record: None)


@_plant("failed-commit-hides-its-file")
def _() -> None:
    """The same where the disk refuses to remove it, or to remember that: as it was before the simulation found it."""

    def take_back(self: Publisher, path: Any, record: Any) -> None:
        try:
            self._files.unlink(path)
        except OSError:
            self.left_a_file = True

    _set(Publisher, "_take_back", take_back)


@_plant("deletion-not-durable")
def _() -> None:
    """A power cut may undo what a deletion noted before the file went."""
    submit = SqliteCatalogue.submit

    def careless(self: SqliteCatalogue, operation: Any, *, urgent: bool = True, durable: bool = False) -> Any:
        return submit(self, operation, urgent=urgent)

    _set(SqliteCatalogue, "submit", careless)


@_plant("deletion-not-synced-again")
def _() -> None:
    """The call that finishes a deletion syncs only what it removed itself: as it was before the simulation found it."""

    def hasty(files: Files, path: Path) -> None:
        if files.path_size(path) is not None:
            files.unlink(path)
            files.sync_dir(path.parent)

    for module in (deleting, recovery):
        _set(module, "remove_durably", hasty)


@_plant("lease-not-looked-at-again")
def _() -> None:
    """A deletion looks for leases before it begins, and not as it begins: as it was before the simulation found it."""
    delete = Lifetimes.delete

    def looks_first(self: Lifetimes, record: Any) -> None:
        if self.standing(record.key).leased_until_unix_ns:
            delete(self, record)  # Which refuses it.
            return
        assert isinstance(self._catalogue, SqliteCatalogue)
        self._catalogue.submit(lambda db: retention_sql.mark_deleting(db, record.key), durable=True).result()
        path = record.key.path(self._data_dir)
        if path.exists():
            self._files.unlink(path)
            self._files.sync_dir(path.parent)
        self._catalogue.drop_deleting([record.key])

    _set(Lifetimes, "delete", looks_first)


@_plant("rules-forget-leases")
def _() -> None:
    """Retention deletes what somebody holds a lease on."""
    delete_unused = Deleter.delete_unused

    def forgetful(self: Deleter, candidates: Sequence[Any]) -> Any:
        leased_until, retention_sql.leased_until = retention_sql.leased_until, lambda db, key, now_unix_ns: 0
        try:
            return delete_unused(self, candidates)
        finally:
            retention_sql.leased_until = leased_until

    _set(Deleter, "delete_unused", forgetful)


@_plant("rules-not-known-again")
def _() -> None:
    """A power cut takes back that rules are known, and they count as changed."""
    remember = Lifetimes.remember
    _set(Lifetimes, "remember", lambda self, name, value, durable=False: remember(self, name, value))


@_plant("files-without-rows-are-lost")
def _() -> None:
    """A start does not look for whole files whose rows a power cut took."""
    _set(recovery, "_adopt", lambda catalogue, records: 0)


@_plant("deletions-not-finished")
def _() -> None:
    """A start takes a sample that was being deleted for a committed one."""

    def undone(files: Any, data_dir: Any, catalogue: SqliteCatalogue, record: Any, done: Any) -> None:
        catalogue.commit(replace(record, state=State.COMMITTED)).result()

    _set(recovery, "_finish_deletion", undone)


@_plant("partials-stay")
def _() -> None:
    """A start leaves the partial files of the last server."""
    _set(recovery, "_sweep_partial", lambda files, data_dir, catalogue, path, done: None)


@_plant("hash-not-checked")
def _() -> None:
    """A chunk is taken that does not match the hash it was sent with."""
    _set(Upload, "_check_chunk", lambda self, first_row, rows, view, digest, found: None)


@_plant("gaps-not-noticed")
def _() -> None:
    """A commit does not look whether all rows came."""
    draft = Upload._draft

    def blind(self: Upload, row_count: int, *others: Any) -> Any:
        self._rows.add(0, row_count)
        return draft(self, row_count, *others)

    _set(Upload, "_draft", blind)


@_plant("chunk-acked-twice")
def _() -> None:
    """A chunk that ends an ack is acked with the next one too."""
    send = Acks.send

    def repeating(self: Acks) -> None:
        last = self._chunks[-1:]
        send(self)
        if len(last) and last[0] % 100 == 3:
            self._chunks.extend(last)

    _set(Acks, "send", repeating)


@_plant("verdict-not-told")
def _() -> None:
    """What a thread did is noticed only when the peer says something more."""
    _set(OpenSamples, "_wake", lambda self: None)


@_plant("abandoned-samples-stay-open")
def _() -> None:
    """When a stream breaks, the samples that were open on it are forgotten."""
    _set(SampleWriter, "abandon", lambda self, failure: None)


@_plant("share-not-given-back")
def _() -> None:
    """Of what a peer may have, one is lost now and then."""
    give_back = Shares.give_back
    _set(Shares, "give_back", lambda self, peer: give_back(self, peer) if self._by_peer[peer] != 2 else None)


@_plant("reader-left-open")
def _() -> None:
    """A reader who hangs up in the middle leaves the file open."""
    end_read = SamplesService._end_read
    _set(SamplesService, "_end_read", lambda self, reader, whole: end_read(self, reader, whole) if whole else None)


@_plant("lock-taken-twice")
def _() -> None:
    """A thread that ends an upload waits for its row with the lock of the uploads held."""
    ended = SampleStore._ended

    def holding(self: SampleStore, upload: Any, failure: Any) -> None:
        if failure is not None and failure.code == "ABORTED":
            with self._uploads_lock:
                self.stat(upload.spec.key)
        ended(self, upload, failure)

    _set(SampleStore, "_ended", holding)
