"""Samples whose rows another process of this server writes: what the owner of the catalogue knows of them.

The process that takes an ingest stream creates, fills, syncs and removes the partial file itself. The owner registers the
sample, and publishes it: one id, sent by any peer, is published by one process.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from slotstream.store.disk.files import Files, store_error
from slotstream.store.records import PARTIAL_SUFFIX, Failure, SampleRecord, SampleSpec
from slotstream.store.sample.file import Content, read_sample_file, rehash
from slotstream.store.sample.upload import Draft, OpenSample
from slotstream.wire.errors import InternalFault, Interrupted, SlotStreamError


class RemoteUpload:
    """In the owner of the catalogue, what an `Upload` is for a sample that this process writes itself."""

    def __init__(
        self,
        spec: SampleSpec,
        data_dir: Path,
        files: Files,
        free_bytes_min: int,
        publish: Callable[[OpenSample, Draft], bool],
        ended: Callable[[OpenSample, Failure | None], None],
        stamp: Callable[[], int],
    ) -> None:
        """Creates nothing: the other process does, under `partial`, and keeps `free_bytes_min` free. As `Upload` otherwise."""
        self.spec = spec
        self.peer = ""
        self.created_unix_ns = stamp()
        self.partial = spec.key.directory(data_dir) / f"{spec.sample_id}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
        self._files = files
        self._publish = publish
        self._ended = ended
        self._lock = threading.Lock()
        self._finished = False
        self._sealed: SampleRecord | None = None

    def commit(self, sealed: SampleRecord, content: Content) -> bool:
        """Make the partial, whole and synced, the committed sample. True when the same content was stored before.

        On any error the sample is failed. Raises AlreadyExists, Damaged, UnsupportedFormat and IoError (what is stored under
        the id already), StoreFull, Interrupted and InternalFault; and VerdictUnknown.
        """
        self._finish()
        self._sealed = sealed
        try:
            duplicate = self._publish(self, Draft(content, {}, sealed.metadata))
        except OSError as error:
            raise self._fail(store_error(error, "committing the sample")) from error
        except SlotStreamError as error:
            raise self._fail(error) from error
        except BaseException:
            self._fail(InternalFault("the server failed while it committed the sample"))
            raise
        self._ended(self, None)
        return duplicate

    def seal(self, draft: Draft) -> SampleRecord:
        """The file is sealed already: what its writer said of it."""
        assert self._sealed is not None, "commit sets it"
        return self._sealed

    def content_hashed_by(self, content: Content, hash_rows: int) -> Content:
        """`content` with its rows hashed again in groups of `hash_rows`, from the file. Raises OSError and Damaged."""
        if hash_rows == content.hash_rows:
            return content  # Without a look at the file.
        fd = self._files.open_read(self.partial)
        try:
            at = read_sample_file(self._files, fd).header.header_bytes
            row_bytes = self.spec.row_bytes

            def read_rows(start: int, stop: int) -> bytes:
                return self._files.pread(fd, (stop - start) * row_bytes, at + start * row_bytes)

            return rehash(content, hash_rows, read_rows)
        finally:
            self._files.close(fd)

    def abort(self, failure: Failure) -> bool:
        """Fail the sample. False when it ended before, or is being committed."""
        try:
            self._finish()
        except Interrupted:
            return False
        self._discard()
        self._ended(self, failure)
        return True

    def _finish(self) -> None:
        with self._lock:
            if self._finished:
                raise Interrupted("the sample is not open any more")
            self._finished = True

    def _fail(self, error: SlotStreamError) -> SlotStreamError:
        self._discard()
        self._ended(self, Failure.of(error))
        return error

    def _discard(self) -> None:
        """The writer removes its file itself; where it died, or was too late, this does."""
        try:
            self._files.unlink(self.partial)
        except OSError:
            return  # The next start sweeps it.
