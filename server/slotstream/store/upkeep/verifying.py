"""Is what is stored still what was committed? Checks of one sample, and of a whole store.

MISSING        the catalogue has a committed sample and there is no file
TRUNCATED      the file is shorter than it was committed
UNREADABLE     the file cannot be read, is longer than it should be, or its header is not that of the sample
HASH_MISMATCH  the header, the rows or the token ids are not the bytes that were committed
FOREIGN        a file that the catalogue does not know
IO_ERROR       no damage: the disk did not give the file, and nothing is known about its bytes
UNSUPPORTED_FORMAT  no damage: the file has columns or elements that this version does not know, and nobody touches it

Damage is what two looks at the disk found alike. Reads that fail are tried again. Files in the quarantine belong to no sample
and are not looked at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from slotstream.common.logtext import path_text
from slotstream.store.catalogue.base import Questions, scan
from slotstream.store.disk.directory import CATALOGUE_NAME, LOCK_NAME
from slotstream.store.disk.files import Files, store_error
from slotstream.store.disk.retrying import is_fact, retried
from slotstream.store.records import PARTIAL_SUFFIX, SampleKey, SampleRecord, State
from slotstream.store.sample.file import sample_file_at
from slotstream.store.sample.reading import SampleReader
from slotstream.store.upkeep.quarantine import QUARANTINE_NAME
from slotstream.wire.errors import (
    BadNamespace,
    BadSampleId,
    Damaged,
    IoError,
    SlotStreamError,
    StoreFull,
    UnsupportedFormat,
)
from slotstream.wire.layout import FILE_SUFFIX

_log = logging.getLogger(__name__)
FOREIGN = "FOREIGN"
IO_ERROR = "IO_ERROR"
UNSUPPORTED = UnsupportedFormat.code
_SETTLE_S = 5.0  # How long a running server may take from a file's rename to its catalogue row.
_SETTLE_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with one sample, or with one file (then `sample_id` is its path below the namespace). "" is sound."""

    namespace: str
    sample_id: str
    damage: str = ""
    message: str = ""
    bytes_checked: int = 0
    record: SampleRecord | None = None  # Of the sample that was checked; None of a file.

    @property
    def is_damage(self) -> bool:
        """Whether bytes were read and are wrong, or are not there. False where the disk, or this version, could not say."""
        return self.damage not in ("", IO_ERROR, UNSUPPORTED)


def verify_record(
    files: Files,
    data_dir: Path,
    record: SampleRecord,
    on_read: Callable[[int], None] = lambda _: None,
    path: Path | None = None,
) -> Verdict:
    """Reads the whole file of a committed sample (at `path`, if it is elsewhere) and checks every hash.

    `on_read` is told of the bytes of each read. What is not sound is looked at a second time, on the disk itself.
    """
    path = path or record.key.path(data_dir)
    first = _look(files, path, record, on_read)
    if first.damage in ("", UNSUPPORTED):
        return first
    with suppress(OSError):
        files.drop_cached(path)
    second = _look(files, path, record, lambda _: None)
    if first.damage != second.damage:
        _log.warning("%s was looked at twice: %r, then %r", path_text(path), first.message, second.message)
    if not second.damage or (first.damage, first.message) == (second.damage, second.message):
        return second
    return replace(second, damage=IO_ERROR, message=f"two looks at the file differ: {first.message}; {second.message}")


def _look(files: Files, path: Path, record: SampleRecord, on_read: Callable[[int], None]) -> Verdict:
    def found(damage: str, message: str) -> Verdict:
        return Verdict(record.namespace, record.sample_id, damage, message, record=record)

    try:
        size = retried(lambda: files.path_size(path))
        if size is None:
            return found("MISSING", "the file is gone")
        if size < record.file_bytes:
            return found("TRUNCATED", f"the file is {size} bytes long; it was committed with {record.file_bytes}")
        if size > record.file_bytes:
            return found("UNREADABLE", f"the file is {size} bytes long; it was committed with {record.file_bytes}")
        file = sample_file_at(files, path, record.header_xxh3)
        if file.key == record.key and file.header_xxh3 != record.header_xxh3:
            return found("HASH_MISMATCH", "the file's header is not the one that was committed")
        with SampleReader(files, path, record) as reader:
            try:
                for group in range(len(reader.file.hashes)):
                    on_read(len(reader.read_group(group)))
                for name in reader.file.column_xxh3:
                    reader.column(name, 0, 0)
            except Damaged as error:
                return found("HASH_MISMATCH", str(error))
    except FileNotFoundError:
        return found("MISSING", "the file is gone")
    except OSError as error:
        return found("UNREADABLE" if is_fact(error) else IO_ERROR, str(store_error(error, "reading the file")))
    except (IoError, StoreFull) as error:
        return found(IO_ERROR, str(error))
    except UnsupportedFormat as error:
        return found(UNSUPPORTED, str(error))
    except SlotStreamError as error:
        return found("UNREADABLE", str(error))
    return Verdict(record.namespace, record.sample_id, bytes_checked=record.file_bytes, record=record)


def verify_current(
    files: Files, data_dir: Path, catalogue: Questions, record: SampleRecord, on_read: Callable[[int], None] = lambda _: None
) -> Verdict | None:
    """`verify_record`, but None when the sample was deleted or replaced while it was being checked."""
    while True:
        verdict = verify_record(files, data_dir, record, on_read)
        if not verdict.damage:
            return verdict
        current = catalogue.get(record.key)
        if current is None or current.state is not State.COMMITTED:
            return None
        if current == record:
            return verdict
        record = current


def verify_samples(files: Files, data_dir: Path, catalogue: Questions, namespace: str = "") -> Iterator[Verdict]:
    """One verdict a committed sample."""
    for record in scan(catalogue, namespace):
        if record.state is State.COMMITTED and (verdict := verify_current(files, data_dir, catalogue, record)):
            yield verdict


def key_of_path(data_dir: Path, path: Path) -> SampleKey | None:
    """The sample whose committed file belongs at `path`; None for every other path."""
    parts = path.relative_to(data_dir).parts
    if len(parts) != 3 or not parts[2].endswith(FILE_SUFFIX):
        return None
    try:
        key = SampleKey.checked(parts[0], parts[2].removesuffix(FILE_SUFFIX))
    except (BadNamespace, BadSampleId):
        return None
    return key if key.shard == parts[1] else None


def tree_files(files: Files, data_dir: Path, namespace: str = "") -> Iterator[Path]:
    """Every file below the directory (or below one namespace) but the store's own; links are files, not followed."""
    for directory, name in tree_names(files, data_dir, namespace):
        yield directory / name


def tree_names(files: Files, data_dir: Path, namespace: str = "") -> Iterator[tuple[Path, str]]:
    """The directory and the name of each such file, directory by directory."""
    pending = [data_dir / namespace] if namespace else [data_dir]
    while pending:
        directory = pending.pop()
        for name, is_dir in names_in(files, data_dir, directory):
            if is_dir:
                pending.append(directory / name)
            else:
                yield directory, name


def names_in(files: Files, data_dir: Path, directory: Path) -> Iterator[tuple[str, bool]]:
    """What is in one directory but the store's own, each with whether it is a directory."""
    is_root = directory == data_dir
    try:
        for entry in files.walk(directory):
            is_dir = entry.is_dir(follow_symlinks=False)
            if is_root:
                is_index = entry.name == LOCK_NAME or entry.name.startswith(CATALOGUE_NAME)
                if entry.name == QUARANTINE_NAME if is_dir else is_index:
                    continue
            yield entry.name, is_dir
    except PermissionError:
        return  # lost+found of a file system mounted here.


def foreign_files(
    files: Files,
    data_dir: Path,
    catalogue: Questions,
    namespace: str = "",
    arriving: Callable[[SampleKey], bool] = lambda _: False,
) -> Iterator[Verdict]:
    """One verdict a file that no committed sample owns. Partials are not foreign: a server removes them. Nor is a file at a
    sample's place whose format this version does not know.
    """
    for path in tree_files(files, data_dir, namespace):
        if path.name.endswith(PARTIAL_SUFFIX):
            continue
        key = key_of_path(data_dir, path)
        if key is not None and _is_known(files, catalogue, key, path, arriving):
            continue
        if key is not None and (unsupported := _unsupported(files, path)):
            yield Verdict(key.namespace, key.sample_id, UNSUPPORTED, unsupported)
            continue
        parts = path.relative_to(data_dir).parts
        space, name = (parts[0], "/".join(parts[1:])) if len(parts) > 1 else ("", parts[0])
        yield Verdict(space, name, FOREIGN, f"{'/'.join(parts)} is not a file of a committed sample")


def _unsupported(files: Files, path: Path) -> str:
    """What about a file's format this version does not know; "" where that is not it."""
    try:
        sample_file_at(files, path)
    except UnsupportedFormat as error:
        return str(error)
    except (OSError, Damaged):
        pass
    return ""


def _is_known(files: Files, catalogue: Questions, key: SampleKey, path: Path, arriving: Callable[[SampleKey], bool]) -> bool:
    """A file is renamed a moment before its row is written, so one just committed gets time for its row to show."""
    deadline = None
    while True:
        # In this order: an upload that ends between the two has written its row by then.
        on_its_way = arriving(key)
        record = catalogue.get(key)
        if on_its_way or (record is not None and record.state in (State.COMMITTED, State.DELETING)):
            return True
        if deadline is None:
            deadline = _committed_unix_s(files, path, key) + _SETTLE_S
        if not time.time() < deadline <= time.time() + _SETTLE_S:
            return files.path_size(path) is None
        time.sleep(_SETTLE_POLL_S)


def _committed_unix_s(files: Files, path: Path, key: SampleKey) -> float:
    """When the file says it was committed; 0 when it is not the sample that its path names."""
    try:
        file = sample_file_at(files, path)
        return file.record().committed_unix_ns / 1e9 if file.key == key else 0.0
    except (OSError, Damaged, UnsupportedFormat):
        return 0.0
