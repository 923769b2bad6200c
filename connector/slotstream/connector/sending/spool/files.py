"""The spool on disk: a directory an owner, a file a sample, made of the wire's own messages.

    SPOOL_DIR/<32 hex: owner>/lock                                 held (flock) for as long as the owner lives
                             /<serial>~<namespace>~<sample id>.spool
                             /<serial>~<namespace>~<sample id>.columns    with columns beside the default pair

A file is a sequence of records, `<u32 length of head><u32 length of data><u64 xxh3 of head>` little-endian, head, data. The
head is an IngestRequest without its `data`: OpenSample first, then ChunkHeaders, each followed by its rows, whose hash it
holds; at the end a CommitSample or an AbortSample. A sample with neither was never finished. Nothing is synced: files
survive the death of the process, not that of the host.

An earlier version would send a sample without the columns that it does not know. It looks at names that end in `.spool` alone,
and so leaves that sample to a later one. A file whose name ends in something else is left alone here too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from slotstream.v1 import ingest_pb2
from slotstream.wire.hashing import xxh3
from slotstream.wire.names import CHUNK_BYTES_MAX, MESSAGE_BYTES_MAX

DIR_MODE, FILE_MODE = 0o700, 0o600
LOCK_NAME = "lock"
SUFFIX, COLUMNS_SUFFIX = ".spool", ".columns"
_RECORD = struct.Struct("<IIQ")
_OWNER = re.compile(r"[0-9a-f]{32}")
# Neither a namespace nor a sample id can hold a "~": whatever is in the file, its name says whose it is.
_FILE = re.compile(r"\d{1,19}~([A-Za-z0-9][A-Za-z0-9._-]{0,63})~([A-Za-z0-9][A-Za-z0-9._-]{0,127})(\.spool|\.columns)")
_CREATE_TRIES = 8
# What is at a path, and not how the disk does. After any other error a later look may find what was written.
_FACTS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk's data lie in its file: `nbytes` at `offset`, with xxh3-64 `digest`."""

    offset: int
    nbytes: int
    digest: int


@dataclass(slots=True, eq=False)
class OwnedDir:
    """A directory whose lock this process holds. `files` are those of its samples that still count."""

    path: Path
    lock_fd: int
    files: int = 0

    def give_up(self) -> None:
        """Remove the directory, unless something is left in it, and release its lock."""
        with suppress(OSError):
            if not any(entry.name != LOCK_NAME for entry in self.path.iterdir()):
                (self.path / LOCK_NAME).unlink()
                self.path.rmdir()
        os.close(self.lock_fd)


@dataclass(slots=True, eq=False)
class SpoolFile:
    """One sample's file. `nbytes`: length of its whole records. `broken`: it takes no more."""

    serial: int
    namespace: str
    sample_id: str
    directory: OwnedDir | None = None  # None until something was written.
    suffix: str = SUFFIX
    nbytes: int = 0
    broken: bool = False
    dropped: bool = False

    @property
    def path(self) -> Path:
        assert self.directory is not None
        return self.directory.path / f"{self.serial:010d}~{self.namespace}~{self.sample_id}{self.suffix}"


@dataclass(slots=True)
class SpooledSample:
    """What a file says. `damaged`: it ends in something that was never written so; a record cut short is no damage."""

    opened: ingest_pb2.OpenSample | None = None
    chunks: list[tuple[ingest_pb2.ChunkHeader, Place]] = field(default_factory=list)
    commit: ingest_pb2.CommitSample | None = None
    abort: ingest_pb2.AbortSample | None = None
    damaged: bool = False


def create_dir(base: Path) -> OwnedDir:
    """A new directory of our own in `base`, which is made if missing. Raises OSError."""
    base.mkdir(DIR_MODE, parents=True, exist_ok=True)
    for _ in range(_CREATE_TRIES):
        path = base / uuid.uuid4().hex
        path.mkdir(DIR_MODE)
        try:
            if (owned := _lock(path, create=True)) is not None:
                return owned
        except FileNotFoundError:
            pass  # Somebody who looked for what the dead left took it for empty before it had its lock.
    raise OSError(errno.EAGAIN, "others keep removing what is made here", str(base))


def adopt_dirs(
    base: Path, skipped: Callable[[Path, OSError], object] = lambda path, error: None
) -> Iterator[tuple[OwnedDir, list[SpoolFile]]]:
    """Directories in `base` whose owners are dead, now ours, with their files, oldest first.

    `skipped` is told of one that cannot be taken over now. Raises OSError where `base` cannot be looked through.
    """
    with os.scandir(base) as entries:
        names = sorted(e.name for e in entries if _OWNER.fullmatch(e.name))
    for name in names:
        path = base / name
        try:
            adopted = _adopted(path)
        except OSError as error:
            skipped(path, error)
            continue
        if adopted is not None:
            yield adopted


def _adopted(path: Path) -> tuple[OwnedDir, list[SpoolFile]] | None:
    """One of them; None where its owner lives, or it is none of ours. Raises OSError."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return None
    try:
        owned = _lock(path, create=False)
    except FileNotFoundError:
        with suppress(OSError):
            path.rmdir()  # Without a lock: its owner died, or is about to make one, and then begins again elsewhere.
        return None
    if owned is None:
        return None
    try:
        return owned, _files_in(owned)
    except BaseException:
        os.close(owned.lock_fd)  # For the next one who looks.
        raise


def _files_in(owned: OwnedDir) -> list[SpoolFile]:
    files = []
    for entry in sorted(owned.path.iterdir()):
        if (match := _FILE.fullmatch(entry.name)) and entry.is_file() and not entry.is_symlink():
            serial = int(entry.name.partition("~")[0])
            nbytes = entry.stat().st_size
            files.append(SpoolFile(serial, match[1], match[2], owned, suffix=match[3], nbytes=nbytes, broken=True))
    owned.files = len(files)
    return files


def _lock(path: Path, *, create: bool) -> OwnedDir | None:
    """The directory, locked; None when somebody else holds it. Raises OSError; FileNotFoundError when it has no lock file."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    fd = os.open(path / LOCK_NAME, flags, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found, ours = (path / LOCK_NAME).lstat(), os.fstat(fd)
        if (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino):
            raise FileNotFoundError(errno.ENOENT, "removed while it was opened", str(path))
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return OwnedDir(path, fd)


def append(file: SpoolFile, request: ingest_pb2.IngestRequest, data: memoryview | None) -> int:
    """Write one record; the offset of its data. Raises OSError; the file is then as it was, or `broken`."""
    head = request.SerializeToString()
    nbytes = 0 if data is None else data.nbytes
    parts: list[bytes | memoryview] = [_RECORD.pack(len(head), nbytes, xxh3(head)), head]
    if data is not None:
        parts.append(data)
    size = record_bytes(len(head), nbytes)
    fd = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            if os.pwritev(fd, parts, file.nbytes) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.path))
        except OSError:
            file.broken = True
            os.ftruncate(fd, file.nbytes)
            file.broken = False
            raise
    finally:
        os.close(fd)
    file.nbytes += size
    return file.nbytes - nbytes


def record_bytes(head: int, data: int) -> int:
    """Length of a record with a head and data of these lengths."""
    return _RECORD.size + head + data


def may_pass(error: OSError) -> bool:
    """Whether what could not be read may be read later."""
    return error.errno not in _FACTS


def read_data(file: SpoolFile, place: Place, into: memoryview) -> bool:
    """Read a chunk's data (`place.nbytes` of them); whether they are what was written. Raises OSError."""
    fd = _open_read(file)
    try:
        return os.preadv(fd, [into], place.offset) == place.nbytes and xxh3(into) == place.digest
    finally:
        os.close(fd)


def read_index(file: SpoolFile) -> SpooledSample:
    """What a file holds, without reading its rows. Raises OSError."""
    fd = _open_read(file)
    try:
        return _index(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _open_read(file: SpoolFile) -> int:
    return os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _index(fd: int, size: int) -> SpooledSample:
    found, at = SpooledSample(), 0
    while at + _RECORD.size <= size:
        head_bytes, data_bytes, digest = _RECORD.unpack(_read(fd, _RECORD.size, at))
        after = at + record_bytes(head_bytes, data_bytes)
        if head_bytes > MESSAGE_BYTES_MAX or data_bytes > CHUNK_BYTES_MAX:
            found.damaged = True
            return found
        if after > size:  # Cut short by the death of its writer.
            return found
        head = _read(fd, head_bytes, at + _RECORD.size)
        if xxh3(head) != digest or not _take(found, head, Place(after - data_bytes, data_bytes, 0)):
            found.damaged = True
            return found
        at = after
    return found


def _read(fd: int, nbytes: int, at: int) -> bytes:
    """So many bytes, which the file has. Raises OSError."""
    data = os.pread(fd, nbytes, at)
    if len(data) < nbytes:
        raise OSError(errno.EIO, "a read gave less than the file has")
    return data


def _take(found: SpooledSample, head: bytes, place: Place) -> bool:
    """Add a record to what was found; False when it does not belong there."""
    try:
        request = ingest_pb2.IngestRequest.FromString(head)
    except DecodeError:
        return False
    kind = request.WhichOneof("kind")
    if kind == "open":
        if found.opened is not None:
            return False
        found.opened = request.open
    elif found.opened is None or found.commit is not None or found.abort is not None:
        return False
    elif kind == "chunk":
        if request.chunk.rows < 1 or place.nbytes < 1 or place.nbytes % request.chunk.rows:
            return False
        found.chunks.append((request.chunk, Place(place.offset, place.nbytes, request.chunk.xxh3)))
    elif kind == "commit":
        found.commit = request.commit
    elif kind == "abort":
        found.abort = request.abort
    else:
        return False
    return True
