"""Deleting samples: the row says DELETING, durably, before the file goes, and goes itself after the file.

So a crash or a power cut at any point leaves either the whole sample or a deletion that the next start finishes; and what
was deleted does not come back as a sample whose file is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from slotstream.store.catalogue.queries import Candidate
from slotstream.store.disk.files import Files, store_error
from slotstream.store.parts import StoreParts
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.wire.errors import InternalFault, IoError, Leased, StoreFull

_log = logging.getLogger(__name__)


class Deleter:
    """Takes samples out of the store. Thread safe."""

    def __init__(self, parts: StoreParts) -> None:
        self._files, self._data_dir = parts.files, parts.data_dir
        self._catalogue, self._id_lock = parts.catalogue, parts.id_lock

    def delete(self, record: SampleRecord) -> None:
        """Remove what `record` says was there, its id's lock held.

        Raises Leased, SampleNotFound (it was replaced meanwhile), StoreFull, IoError and InternalFault.
        """
        key = record.key
        if until := self._catalogue.mark_deleting(record):
            raise Leased(f"{key} is leased to a reader for another {(until - self._catalogue.now()) / 1e9:.0f} seconds")
        path = key.path(self._data_dir)
        try:
            remove_durably(self._files, path)
        except OSError as error:
            raise store_error(error, f"deleting {key}") from error
        self._catalogue.drop_deleting([key])

    def delete_unused(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Remove those that nobody reads, leases, or has replaced; which. Raises StoreFull, IoError and InternalFault."""
        marked = self._catalogue.mark_unused(candidates)
        self.finish([candidate.key for candidate in marked])
        return marked

    def finish(self, keys: Sequence[SampleKey]) -> None:
        """Remove the files and rows of samples that are marked as DELETING. What the disk refuses stays for another time."""
        directories: dict[Path, list[SampleKey]] = {}
        for key in keys:
            with self._id_lock(key):
                record = self._catalogue.get(key)
                if record is None or record.state is not State.DELETING:
                    continue  # The same id was committed again meanwhile: the file is that sample's.
                path = key.path(self._data_dir)
                try:
                    self._files.unlink(path)
                except OSError as error:
                    _log.warning("%s", store_error(error, f"deleting {key}"))
                    continue
            directories.setdefault(path.parent, []).append(key)
        gone: list[SampleKey] = []
        for directory, its in directories.items():
            try:
                if self._files.path_size(directory) is not None:
                    self._files.sync_dir(directory)
                gone += its
            except OSError as error:
                _log.warning("%s", store_error(error, f"deleting samples of {directory}"))
        try:
            self._catalogue.drop_deleting(gone)
        except (StoreFull, IoError, InternalFault) as error:
            _log.warning("the rows of %d deleted samples cannot be removed yet: %s", len(gone), error)


def remove_durably(files: Files, path: Path) -> None:
    """Remove a file. One that is gone already may have gone in an attempt whose sync failed, or never came."""
    with suppress(FileNotFoundError, NotADirectoryError):  # Of its directory; or that is a link, which is not followed.
        files.unlink(path)
        files.sync_dir(path.parent)
