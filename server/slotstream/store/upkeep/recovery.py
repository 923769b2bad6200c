"""What opening a data directory does about what the last server left there.

    found                                               outcome
    --------------------------------------------------  ----------------------------------------------------------------
    partial file                                        removed; its sample FAILED (INTERRUPTED) unless it is committed
    row ARRIVING, no partial, no file                   FAILED (INTERRUPTED)
    whole file, no row or a row ARRIVING or FAILED      COMMITTED, from the file itself (renamed, its row was lost)
    row COMMITTED, whole file                           as it was
    row COMMITTED, no file                              FAILED (DAMAGED), saying so if the quarantine has the file
    row COMMITTED, file of another size or header       as it was: every read of it is refused as DAMAGED
    row DELETING, its file or no file                   file and row removed
    row DELETING, another whole file of that sample     COMMITTED, from the file (deleted, sent again, its row was lost)
    file that is not a sample, or not of its path       left alone; `slotstream verify` calls it FOREIGN
    catalogue missing                                   rebuilt from the files (failed samples are forgotten)
    catalogue corrupt                                   moved aside as catalog.sqlite.corrupt-<ns>, rebuilt, logged

Rows that a power cut took from the catalogue are among these cases: the file is there and its row is not. A deletion's row is
durable before its file goes, so what was deleted does not come back as DAMAGED. After a clean shutdown nothing can be missing,
so only partials and rows that are neither COMMITTED nor FAILED are looked for.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path

from slotstream.store.catalogue.catalogue import FILE_NAME, Catalogue, CatalogueCorrupt, CatalogueDamaged
from slotstream.store.catalogue.retention_sql import latest_stamp
from slotstream.store.disk.clock import Clock
from slotstream.store.disk.files import Files
from slotstream.store.records import PARTIAL_SUFFIX, SampleKey, SampleRecord, State
from slotstream.store.sample.file import sample_file_at
from slotstream.store.upkeep.quarantine import holds
from slotstream.store.upkeep.verifying import key_of_path, tree_files
from slotstream.wire.errors import BadNamespace, BadSampleId, ConfigError, Damaged, Interrupted

_log = logging.getLogger(__name__)
_BATCH = 256
_INTERRUPTED = "the server stopped while the sample was arriving"


@dataclass(slots=True)
class Recovered:
    """How often each case was met."""

    partials: int = 0
    interrupted: int = 0
    adopted: int = 0
    missing: int = 0
    deletions: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self))


def open_recovered(files: Files, data_dir: Path) -> tuple[Catalogue, Clock, Recovered]:
    """The directory's catalogue, with every case above worked through, and a clock that goes on from its stamps.

    Raises ConfigError, OSError and SlotStreamError.
    """
    catalogue = open_catalogue(data_dir)
    try:
        try:
            return _recovered(files, data_dir, catalogue)
        except CatalogueDamaged as error:  # Sound to SQLite as far as it looked, or to SQLite and not to us.
            catalogue.close(clean=False)
            catalogue = _begin_anew(data_dir / FILE_NAME, error)
            return _recovered(files, data_dir, catalogue)
    except BaseException:
        catalogue.close(clean=False)
        raise


def _recovered(files: Files, data_dir: Path, catalogue: Catalogue) -> tuple[Catalogue, Clock, Recovered]:
    done = recover(files, data_dir, catalogue)
    return catalogue, Clock(catalogue.ask(latest_stamp)), done


def open_catalogue(data_dir: Path) -> Catalogue:
    """The directory's catalogue; a corrupt one is moved aside and begun anew. Raises ConfigError and OSError."""
    path = data_dir / FILE_NAME
    for part in ("", "-wal", "-shm"):  # SQLite would follow it, and write wherever it leads.
        if path.with_name(path.name + part).is_symlink():
            raise ConfigError(f"{path}{part} is a symbolic link: put the file itself there")
    if not path.exists():
        _set_aside(path, "")  # The log of a lost database would be replayed into the new one.
    try:
        return Catalogue(path)
    except CatalogueCorrupt as error:
        return _begin_anew(path, error)


def _begin_anew(path: Path, error: Exception) -> Catalogue:
    suffix = f".corrupt-{time.time_ns()}"
    _log.error("the catalogue %s is corrupt (%s): moving it aside as %s and rebuilding it", path, error, path.name + suffix)
    _set_aside(path, suffix)
    return Catalogue(path)


def _set_aside(path: Path, suffix: str) -> None:
    for part in ("", "-wal", "-shm"):
        source = path.with_name(path.name + part)
        if not source.exists():
            continue
        if suffix:
            source.rename(path.with_name(path.name + suffix + part))
        else:
            source.unlink()


def recover(files: Files, data_dir: Path, catalogue: Catalogue) -> Recovered:
    """Works through the cases above. Raises OSError, StoreFull and InternalFault."""
    done = Recovered()
    clean = catalogue.was_shut_down_cleanly
    adopting = _Adopting(files, data_dir, catalogue)
    for path in tree_files(files, data_dir):
        if path.name.endswith(PARTIAL_SUFFIX):
            _sweep_partial(files, data_dir, catalogue, path, done)
        elif not clean:
            adopting.look_at(path)
    done.adopted = adopting.finish()
    for record in catalogue.unfinished() if clean else catalogue.scan():
        if record.state is State.DELETING:
            _finish_deletion(files, data_dir, catalogue, record, done)
        elif record.state is State.ARRIVING:
            catalogue.put_failed(record, Interrupted.code, _INTERRUPTED).result()
            done.interrupted += 1
        elif record.state is State.COMMITTED and files.path_size(record.key.path(data_dir)) is None:
            quarantined = holds(files, data_dir, record.key, record.committed_unix_ns)
            where = "in the quarantine" if quarantined else "gone"
            _log.error("sample %s was committed and its file is %s", record.key, where)
            catalogue.put_damaged(record, f"the file of the committed sample is {where}").result()
            done.missing += 1
    return done


def _sweep_partial(files: Files, data_dir: Path, catalogue: Catalogue, path: Path, done: Recovered) -> None:
    key = _key_of_partial(data_dir, path)
    if key is None:
        return  # Not a name that the store gives: somebody else's file.
    created_ns = path.lstat().st_mtime_ns
    files.unlink(path)
    done.partials += 1
    record = SampleRecord(key.namespace, key.sample_id, State.ARRIVING, created_ns)
    catalogue.put_failed(record, Interrupted.code, _INTERRUPTED).result()


def _key_of_partial(data_dir: Path, path: Path) -> SampleKey | None:
    parts = path.relative_to(data_dir).parts
    sample_id, dot, _ = path.name.removesuffix(PARTIAL_SUFFIX).rpartition(".")
    if len(parts) != 3 or not dot:
        return None
    try:
        key = SampleKey.checked(parts[0], sample_id)
    except (BadNamespace, BadSampleId):
        return None
    return key if key.shard == parts[1] else None


class _Adopting:
    """Catalogues whole files whose rows were lost; many at a time, for the day when every row was."""

    def __init__(self, files: Files, data_dir: Path, catalogue: Catalogue) -> None:
        self._files = files
        self._data_dir = data_dir
        self._catalogue = catalogue
        self._synced: Path | None = None
        self._written: list[Future[None]] = []
        self._adopted = 0

    def look_at(self, path: Path) -> None:
        """Adopts the file if it is a sample that is not catalogued as committed; such a row is trusted: reads check it.

        Beside a row that is DELETING, the file may be that of a later upload, whose row a power cut took.
        """
        key = key_of_path(self._data_dir, path)
        if key is None:
            _log.warning("%s is not a file of a sample; it is left alone", path)
            return
        before = self._catalogue.get(key)
        if before is not None and before.state is State.COMMITTED:
            return
        try:
            file = sample_file_at(self._files, path)
            record = file.record()
        except Damaged as error:
            _log.warning("%s is left alone: %s", path, error)
            return
        if file.key != key:
            _log.warning("%s is left alone: it is the file of sample %s", path, file.key)
            return
        if before is not None and before.state is State.DELETING and before.header_xxh3 == file.header_xxh3:
            return
        if self._synced != path.parent:  # The server may have died between the rename and its sync.
            self._files.sync_dir(path.parent)
            self._synced = path.parent
        self._written.append(self._catalogue.put_committed(record))
        self._adopted += 1
        if len(self._written) >= _BATCH:
            self._wait()

    def finish(self) -> int:
        """How many were adopted; their rows are written."""
        self._wait()
        return self._adopted

    def _wait(self) -> None:
        for written in self._written:
            written.result()
        self._written.clear()


def _finish_deletion(files: Files, data_dir: Path, catalogue: Catalogue, record: SampleRecord, done: Recovered) -> None:
    path = record.key.path(data_dir)
    if files.path_size(path) is not None:
        files.unlink(path)
        files.sync_dir(path.parent)
    catalogue.drop_deleting([record.key]).result()
    done.deletions += 1
