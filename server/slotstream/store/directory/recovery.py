"""What opening a data directory does about what the last server left there.

    found                                               outcome
    --------------------------------------------------  ----------------------------------------------------------------
    partial file                                        removed; its sample FAILED (INTERRUPTED) unless it is committed
    row ARRIVING, no partial, no file                   FAILED (INTERRUPTED)
    whole file, no row or a row ARRIVING or FAILED      COMMITTED, from the file itself (renamed, its row was lost)
    row COMMITTED, whole file                           as it was
    row COMMITTED, no file                              FAILED (DAMAGED), saying so if the quarantine has the file
    row COMMITTED, file of another size or header       as it was: every read of it is refused as DAMAGED
    the same, after a log that was cut, file later      COMMITTED, from the file (deleted, sent again, both rows were lost)
    row DELETING, its file or no file                   file and row removed
    row DELETING, another whole file of that sample     COMMITTED, from the file (deleted, sent again, its row was lost)
    file that is not a sample, or not of its path       left alone; `slotstream verify` calls it FOREIGN
    file of a format that this version does not know    as a whole file of a sample: listed and deleted as one; reads of it are
                                                        refused as UNSUPPORTED_FORMAT, and nothing takes its place
    catalogue missing                                   rebuilt from the files (failed samples are forgotten)
    catalogue corrupt                                   moved aside as catalog.sqlite.corrupt-<ns>, rebuilt, logged: rows whose
                                                        checksums hold are kept, the others come from the files
    catalogue of an earlier day                         moved aside, rebuilt from the files alone, logged

Rows that a power cut took from the catalogue are among these cases: the file is there and its row is not. A deletion's row is
durable before its file goes, so what was deleted does not come back as DAMAGED. A clean shutdown seals the catalogue: if not a
bit of it changed since, nothing can be missing, so only partials and rows that are neither COMMITTED nor FAILED are looked for.
Any other start compares the names in each directory with those of its rows (`comparing`), and works through the cases where
they differ. That is everywhere after a log that was cut, and where the catalogue is rebuilt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain, islice, starmap
from pathlib import Path

from slotstream.common.logtext import path_text
from slotstream.common.progress import Progress
from slotstream.store.catalogue.sqlite.catalogue import SqliteCatalogue
from slotstream.store.catalogue.sqlite.damage import CatalogueCorrupt, CatalogueDamaged, CatalogueOld
from slotstream.store.catalogue.sqlite.salvage import PARTS, set_aside
from slotstream.store.catalogue.sqlite.seal import SUFFIX
from slotstream.store.directory.comparing import NameSums, place_of
from slotstream.store.disk.directory import CATALOGUE_NAME
from slotstream.store.disk.files import Files
from slotstream.store.records import PARTIAL_SUFFIX, SampleKey, SampleRecord, State
from slotstream.store.sample.file import sample_file_at, unsupported_record_at
from slotstream.store.upkeep.deleting import remove_durably
from slotstream.store.upkeep.quarantine import holds
from slotstream.store.upkeep.verifying import key_of_path, names_in, tree_files, tree_names
from slotstream.wire.errors import BadNamespace, BadSampleId, ConfigError, Damaged, Interrupted, UnsupportedFormat

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


def open_recovered(files: Files, data_dir: Path, now: Callable[[], int]) -> tuple[SqliteCatalogue, int, Recovered]:
    """The directory's catalogue, with every case above worked through, and the latest of its stamps (Unix nanoseconds).

    `now`: the wall clock that the catalogue goes by, Unix nanoseconds.
    Raises ConfigError, OSError and SlotStreamError.
    """
    catalogue = open_catalogue(data_dir, now)
    try:
        try:
            return _recovered(files, data_dir, catalogue)
        except CatalogueDamaged as error:  # Sound to SQLite as far as it looked, or to SQLite and not to us.
            catalogue.close(clean=False)
            catalogue = _begin_anew(data_dir / CATALOGUE_NAME, error, now)
            return _recovered(files, data_dir, catalogue)
    except BaseException:
        catalogue.close(clean=False)
        raise


def _recovered(files: Files, data_dir: Path, catalogue: SqliteCatalogue) -> tuple[SqliteCatalogue, int, Recovered]:
    done = recover(files, data_dir, catalogue)
    return catalogue, catalogue.latest_stamp(), done


def open_catalogue(data_dir: Path, now: Callable[[], int]) -> SqliteCatalogue:
    """The directory's catalogue; a new one where it is damaged or old, which is moved aside. Raises ConfigError and OSError."""
    path = data_dir / CATALOGUE_NAME
    for part in (*PARTS, SUFFIX):  # SQLite would follow it, and write wherever it leads.
        if path.with_name(path.name + part).is_symlink():
            raise ConfigError(f"{path}{part} is a symbolic link: put the file itself there")
    if not path.exists():
        for part in PARTS:  # The log of a lost database would be replayed into the new one.
            path.with_name(path.name + part).unlink(missing_ok=True)
    for look in range(2):  # A failing disk can look like damage, once.
        try:
            return SqliteCatalogue(path, now)
        except CatalogueCorrupt as error:
            if look or isinstance(error, CatalogueOld):
                return _begin_anew(path, error, now)
    raise AssertionError("the second look returns")


def _begin_anew(path: Path, error: Exception, now: Callable[[], int]) -> SqliteCatalogue:
    """A catalogue with the sound rows of the one that is there; what is lost, the files tell. An old one's rows are over."""
    aside = set_aside(path)
    is_old = isinstance(error, CatalogueOld)
    what = "an older one" if is_old else "corrupt"
    _log.error("the catalogue %s is %s (%s): moved aside as %s, and rebuilt", path, what, error, aside.name)
    catalogue = SqliteCatalogue(path, now)
    try:
        if not is_old:
            _log.error("of the damaged catalogue %s", catalogue.take_over(aside))
    except BaseException:
        catalogue.close(clean=False)
        raise
    return catalogue


def recover(files: Files, data_dir: Path, catalogue: SqliteCatalogue) -> Recovered:
    """Works through the cases above. Raises OSError, StoreFull, IoError and InternalFault."""
    done = Recovered()
    clean = catalogue.was_shut_down_cleanly
    sums, listed = NameSums(), Progress(_log, "%s files are listed")
    at, place = data_dir, ""
    for directory, name in tree_names(files, data_dir):
        if name.endswith(PARTIAL_SUFFIX):
            _sweep_partial(files, data_dir, catalogue, directory / name, done)
        elif not clean:
            if directory is not at:
                at, place = directory, _place(data_dir, directory)
            sums.add_file(place, name)
            listed.step()
    if not clean:
        _compare(files, data_dir, catalogue, sums, listed.done, done)
    for record in catalogue.unfinished():
        if record.state is State.DELETING:
            _finish_deletion(files, data_dir, catalogue, record, done)
        else:
            catalogue.fail(record, Interrupted.code, _INTERRUPTED).result()
            done.interrupted += 1
    return done


def _compare(files: Files, data_dir: Path, catalogue: SqliteCatalogue, sums: NameSums, count: int, done: Recovered) -> None:
    """Files without rows get them, and committed rows without files are told. Only where the two are not the same ones."""
    if catalogue.log_was_cut:
        _log.warning("the catalogue's log has a damaged or unfinished end: every row is compared with its file")
    checked = Progress(_log, "%s rows of the catalogue are checked")
    for names in catalogue.committed_names(check=True):
        sums.take_rows(names)
        checked.step(len(names))
    places = sums.places(differing=not catalogue.log_was_cut)
    if not places:
        return
    paths = (path for place in sorted(places) for path in _files_of(files, data_dir, place))
    found = whole_files(files, data_dir, catalogue.get, paths, rows_may_be_old=catalogue.log_was_cut, count=count)
    done.adopted = _adopt(catalogue, found)
    for key in starmap(SampleKey, chain.from_iterable(catalogue.committed_names(check=False))):
        if place_of(key) not in places:
            continue
        if files.path_size(key.path(data_dir)) is None and (record := catalogue.get(key)) is not None:
            _tell_missing(files, data_dir, catalogue, record)
            done.missing += 1


def _place(data_dir: Path, directory: Path) -> str:
    return "" if directory == data_dir else str(directory.relative_to(data_dir))


def _files_of(files: Files, data_dir: Path, place: str) -> Iterator[Path]:
    directory = data_dir / place
    return (directory / name for name, is_dir in names_in(files, data_dir, directory) if not is_dir)


def _tell_missing(files: Files, data_dir: Path, catalogue: SqliteCatalogue, record: SampleRecord) -> None:
    quarantined = holds(files, data_dir, record.key, record.committed_unix_ns)
    where = "in the quarantine" if quarantined else "gone"
    _log.error("sample %s was committed and its file is %s", record.key, where)
    catalogue.put_damaged(record, f"the file of the committed sample is {where}").result()


def _sweep_partial(files: Files, data_dir: Path, catalogue: SqliteCatalogue, path: Path, done: Recovered) -> None:
    key = _key_of_partial(data_dir, path)
    if key is None:
        return  # Not a name that the store gives: somebody else's file.
    created_ns = path.lstat().st_mtime_ns
    files.unlink(path)
    done.partials += 1
    record = SampleRecord(key.namespace, key.sample_id, State.ARRIVING, created_ns)
    catalogue.fail(record, Interrupted.code, _INTERRUPTED).result()


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


def whole_files(
    files: Files,
    data_dir: Path,
    known: Callable[[SampleKey], SampleRecord | None],
    paths: Iterable[Path] | None = None,
    *,
    rows_may_be_old: bool = False,
    count: int = 0,
) -> Iterator[SampleRecord]:
    """The records of whole files (of all, or of those at `paths`) whose samples are not catalogued as committed.

    A row that says committed is trusted: reads check it. But if `rows_may_be_old`, a file that was committed later beats it.
    Beside a row that is DELETING, the file may be that of a later upload, whose row a power cut took. The name of a file that
    comes out of here is durable. `count`: how many files there are, for the log.
    """
    synced: Path | None = None
    looked = Progress(_log, "%s files are compared with the catalogue", count)
    for path in tree_files(files, data_dir) if paths is None else paths:
        looked.step()
        if path.name.endswith(PARTIAL_SUFFIX):
            continue
        key = key_of_path(data_dir, path)
        if key is None:
            _log.warning("%s is not a file of a sample; it is left alone", path_text(path))
            continue
        before = known(key)
        committed = before if before is not None and before.state is State.COMMITTED else None
        if committed is not None and not rows_may_be_old:
            continue
        try:
            record = _record_at(files, path)
        except Damaged as error:
            _log.warning("%s is left alone: %s", path_text(path), error)
            continue
        if record.key != key:
            _log.warning("%s is left alone: it is the file of sample %s", path_text(path), record.key)
            continue
        if committed is not None and not _is_older(files, data_dir, committed, record):
            continue
        if before is not None and before.state is State.DELETING and before.header_xxh3 == record.header_xxh3:
            continue
        if synced != path.parent:  # The server may have died between the rename and its sync.
            files.sync_dir(path.parent)
            synced = path.parent
        yield record


def _record_at(files: Files, path: Path) -> SampleRecord:
    """What the file at `path` says of its sample. Raises Damaged and OSError."""
    try:
        return sample_file_at(files, path).record()
    except UnsupportedFormat as error:
        record = unsupported_record_at(files, path)
        _log.warning("sample %s cannot be read by this version (%s): %s; it stays as it is", record.key, error.code, error)
        return record


def _is_older(files: Files, data_dir: Path, row: SampleRecord, found: SampleRecord) -> bool:
    """Whether a row that says committed is that of an earlier sample than the whole file `found` at its place."""
    if row.committed_unix_ns < found.committed_unix_ns:
        return True
    # Stamps of two uploads at a time may be in another order, where the clock is behind them. What was put aside is older.
    return row.header_xxh3 != found.header_xxh3 and holds(files, data_dir, row.key, row.committed_unix_ns)


def _adopt(catalogue: SqliteCatalogue, records: Iterator[SampleRecord]) -> int:
    """Catalogues whole files whose rows were lost; many at a time, for the day when every row was. How many they were."""
    adopted = 0
    while batch := list(islice(records, _BATCH)):
        for written in [catalogue.adopt(record) for record in batch]:
            written.result()
        adopted += len(batch)
    return adopted


def _finish_deletion(files: Files, data_dir: Path, catalogue: SqliteCatalogue, record: SampleRecord, done: Recovered) -> None:
    path = record.key.path(data_dir)
    remove_durably(files, path)
    catalogue.drop_deleting([record.key])
    done.deletions += 1
