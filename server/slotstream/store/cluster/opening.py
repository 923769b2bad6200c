"""How a server opens the bucket, the catalogue and its scratch directory. Wrong ones are one clear sentence."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slotstream.store.blobs.base import Blobs
from slotstream.store.blobs.s3.bucket import S3Blobs
from slotstream.store.catalogue.attempts import SharedCatalogue
from slotstream.store.catalogue.postgres.address import check_command_line as check_command_line
from slotstream.store.catalogue.postgres.catalogue import PostgresCatalogue
from slotstream.store.cluster import scratch as scratch_dir
from slotstream.store.cluster.keeping import DatabaseTime
from slotstream.store.cluster.scratch import ScratchFiles
from slotstream.store.cluster.store import ObjectStore
from slotstream.store.disk.clock import Clock
from slotstream.store.disk.directory import CATALOGUE_NAME, LOCK_NAME, OpenedDirectory
from slotstream.store.disk.files import DIR_MODE, Files
from slotstream.store.parts import StoreParts
from slotstream.store.samples import FREE_BYTES_MIN, descriptors_allow
from slotstream.wire.errors import ConfigError, SlotStreamError

_log = logging.getLogger(__name__)


def open_store(
    store_url: str,
    catalogue_url: str,
    scratch: Path | str,
    *,
    free_bytes_min: int = FREE_BYTES_MIN,
    files: Files | None = None,
    uploads_max: int | None = None,
    blobs: Blobs | None = None,
    catalogue: SharedCatalogue | None = None,
) -> ObjectStore:
    """Lock and empty the scratch directory, check bucket and catalogue, and be ready.

    `free_bytes_min`: bytes of scratch that uploads leave free. `blobs`, `catalogue`: in place of those at the URLs. Raises
    ConfigError, in one sentence, when that cannot be.
    """
    files = files or ScratchFiles()
    directory = Path(scratch).absolute()
    undo: list[Callable[[], object]] = []
    try:
        directory.mkdir(DIR_MODE, parents=True, exist_ok=True)
        if (directory / CATALOGUE_NAME).exists():
            raise ConfigError(f"--scratch: {directory} is the data directory of a server: name another one")
        files.confine(directory)
        try:
            lock_fd = files.lock(directory / LOCK_NAME)
        except BlockingIOError as error:
            raise ConfigError(f"--scratch: another server is using {directory}: each needs its own") from error
        undo.append(lambda: files.close(lock_fd))
        removed = scratch_dir.empty(files, directory)
        if files.free_bytes(directory) < free_bytes_min:
            raise ConfigError(
                f"the disk of {directory} is full: less than the {free_bytes_min} bytes of --free-bytes-min are free"
            )
        opened = OpenedDirectory(files, directory, lock_fd)
        blobs = blobs or S3Blobs(store_url)
        undo.append(blobs.close)
        blobs.check()
        catalogue = catalogue or PostgresCatalogue(catalogue_url)
        undo.append(catalogue.close)
        time_of = DatabaseTime(catalogue.now)
        parts = StoreParts(directory, files, opened, catalogue, Clock(0, time_of), free_bytes_min)
        most = _uploads_max() if uploads_max is None else uploads_max
        store = ObjectStore(parts, lock_fd, most, catalogue, blobs, time_of)
    except (OSError, SlotStreamError, ConfigError) as error:
        for one in reversed(undo):
            one()
        if isinstance(error, OSError):
            raise ConfigError(f"--scratch: cannot use {directory}: {error.strerror or error}") from error
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error
    _log.info("opened %s with the catalogue at %s; removed %d scratch files", blobs, catalogue, removed)
    return store


@contextmanager
def opened_pair(store_url: str, catalogue_url: str) -> Iterator[tuple[Blobs, SharedCatalogue]]:
    """Both, for a command. Raises ConfigError."""
    undo: list[Callable[[], object]] = []
    try:
        try:
            blobs = S3Blobs(store_url)
            undo.append(blobs.close)
            blobs.check()
            catalogue = PostgresCatalogue(catalogue_url)
            undo.append(catalogue.close)
        except SlotStreamError as error:
            raise ConfigError(str(error)) from error
        yield blobs, catalogue
    finally:
        for one in reversed(undo):
            one()


def check(store_url: str, catalogue_url: str) -> None:
    """Whether a server could use both. Raises ConfigError."""
    with opened_pair(store_url, catalogue_url):
        pass


def _uploads_max() -> int:
    """Each has two descriptors: one writes, one sends."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return descriptors_allow() // (1 if soft == resource.RLIM_INFINITY else 2)
