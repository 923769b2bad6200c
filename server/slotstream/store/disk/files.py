"""The disk, through a handful of methods, so that tests can make any of them fail (`Files` is a constructor argument).

Every method raises OSError as the operating system gave it; `store_error` turns those into the store's own errors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from slotstream.store.disk.confined_paths import ConfinedPaths
from slotstream.wire.errors import InternalFault, IoError, SlotStreamError, StoreFull, TooLarge
from slotstream.wire.hashing import Buffer

FILE_MODE = 0o640
DIR_MODE = 0o750
# What an error of the disk means to the sender of the rows. Any other says that the disk fails, which may pass: IoError.
_MEANING: dict[int | None, type[SlotStreamError]] = {
    # Out of space, out of quota, out of file descriptors: all of them pass when something else ends.
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE), StoreFull),
    errno.EFBIG: TooLarge,  # For this file system, or this process: the same rows would meet it again.
    **dict.fromkeys((errno.EBADF, errno.EFAULT), InternalFault),  # No disk says so: it was asked for nonsense.
}
_NO_PREALLOCATION = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})


def store_error(error: OSError, doing: str) -> SlotStreamError:
    """The expected failure that `error` is: StoreFull where space or descriptors ran out, TooLarge for a file past the file
    system's limit, InternalFault for what only a bug of ours explains, else IoError.
    """
    reason = os.strerror(error.errno) if error.errno is not None else str(error)
    return _MEANING.get(error.errno, IoError)(f"{doing} failed: {reason}")


class Files:
    """Disk operations. Paths are absolute; offsets and lengths are bytes. Raises OSError."""

    _paths = ConfinedPaths()

    def confine(self, root: Path) -> None:
        """From now on every path is below `root`, and no symbolic link there is followed."""
        self._paths = ConfinedPaths(root)

    def make_dir(self, path: Path) -> None:
        """Create one directory; an existing one is fine, a link to one is not."""
        with self._paths.at(path) as (name, directory):
            try:
                os.mkdir(name, DIR_MODE, dir_fd=directory)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                    raise

    def lock(self, path: Path) -> int:
        """Open (creating it) and lock `path` for this process; the descriptor holds the lock. BlockingIOError if taken."""
        with self._paths.at(path) as (name, directory):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE, dir_fd=directory)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    def create(self, path: Path) -> int:
        """Open a new file for writing and reading. FileExistsError if there is one."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._paths.at(path) as (name, directory):
            return os.open(name, flags, FILE_MODE, dir_fd=directory)

    def open_read(self, path: Path) -> int:
        """Open a regular file for reading; a symbolic link or a device is refused."""
        # O_NONBLOCK: opening a FIFO that somebody left in the tree must not hang the thread.
        with self._paths.at(path) as (name, directory):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def preallocate(self, fd: int, nbytes: int) -> bool:
        """Give the file `nbytes` on disk now. False where the file system cannot; ENOSPC where it has no room."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno in _NO_PREALLOCATION:
                return False
            raise
        return True

    def pwrite(self, fd: int, data: Buffer, at: int) -> None:
        """Write all of `data` at `at`."""
        written = os.pwrite(fd, data, at)
        if written == len(data):
            return
        # A short write is legal (signals, a nearly full disk): go on until all is written or the error is plain.
        view = memoryview(data)
        while written < len(view):
            wrote = os.pwrite(fd, view[written:], at + written)
            if wrote == 0:
                raise OSError(errno.EIO, "a write wrote nothing")
            written += wrote

    def pread(self, fd: int, nbytes: int, at: int) -> bytes:
        """`nbytes` from `at`; fewer only at the end of the file."""
        data = os.pread(fd, nbytes, at)
        if len(data) == nbytes:
            return data
        parts = [data]
        got = len(data)
        while data and got < nbytes:
            data = os.pread(fd, nbytes - got, at + got)
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def pread_view(self, fd: int, nbytes: int, at: int) -> Buffer:
        """As `pread`; what lies in memory already is not copied. It is good until `close`."""
        return self.pread(fd, nbytes, at)

    def drop_cached(self, path: Path) -> None:
        """The next reads of the file come from the disk, where the operating system can forget what it has in memory."""
        fd = self.open_read(path)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync_data(self, fd: int) -> None:
        """The file's bytes and size are durable after this."""
        os.fdatasync(fd)

    def sync_dir(self, path: Path) -> None:
        """The directory's names are durable after this."""
        with self._paths.at(path) as (name, directory):
            nofollow = 0 if directory is None else os.O_NOFOLLOW
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | nofollow, dir_fd=directory)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        with self._paths.at(source) as (old, from_dir), self._paths.at(target) as (new, to_dir):
            os.rename(old, new, src_dir_fd=from_dir, dst_dir_fd=to_dir)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is gone already is fine."""
        with contextlib.suppress(FileNotFoundError), self._paths.at(path) as (name, directory):
            os.unlink(name, dir_fd=directory)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def path_size(self, path: Path) -> int | None:
        """Bytes of the file at `path`, not following a link; None when there is nothing, or only by way of a link."""
        try:
            with self._paths.at(path) as (name, directory):
                return os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def path_identity(self, path: Path) -> tuple[int, int] | None:
        """Device and inode of what is at `path`, not following a link; None when there is nothing."""
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino

    def identity(self, fd: int) -> tuple[int, int]:
        """Device and inode of an open file."""
        found = os.fstat(fd)
        return found.st_dev, found.st_ino

    def free_bytes(self, path: Path) -> int:
        """Bytes that this process may still write below `path`."""
        space = os.statvfs(path)
        return space.f_bavail * space.f_frsize

    def disk_bytes(self, path: Path) -> int:
        """The size of the disk that `path` is on, of which this process may not use all."""
        space = os.statvfs(path)
        return space.f_blocks * space.f_frsize

    def walk(self, path: Path) -> Iterator[os.DirEntry[str]]:
        """Entries of one directory, in no order; nothing when it is not there, or a link."""
        try:
            with self._paths.at(path) as (name, directory):
                if directory is not None and not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                    return
            # By its path, for the paths of its entries: were it replaced by a link just now, names would be seen, not files.
            with os.scandir(path) as entries:
                yield from entries
        except (FileNotFoundError, NotADirectoryError):
            return
