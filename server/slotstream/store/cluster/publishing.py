"""The step that makes a sample a committed one: once its object is whole, one transaction puts a row in place of its attempt.

Of several that send the same id at once one is committed, and the others find it: a duplicate, once its bytes were read, or
other content under an id that is taken. No lock is held meanwhile: the transaction decides.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from slotstream.store.catalogue.attempts import SharedCatalogue
from slotstream.store.cluster.lifetimes import ObjectLifetimes
from slotstream.store.cluster.reading import BlobFiles, object_path
from slotstream.store.cluster.uploads import ObjectUpload
from slotstream.store.parts import StoreParts
from slotstream.store.publishing import Publisher
from slotstream.store.records import SampleRecord, State
from slotstream.store.sample.file import sample_file_at
from slotstream.store.sample.reading import unreadable
from slotstream.store.sample.upload import Draft, OpenSample, VerdictUnknown
from slotstream.wire.errors import AlreadyExists, Damaged, IoError, SlotStreamError, UnsupportedFormat

_log = logging.getLogger(__name__)
_SKEW_NS = 10**9  # By how much the clocks of two servers may differ, which both follow the database's.


class ObjectPublisher(Publisher):
    """Publishes the samples of one server. Thread safe."""

    def __init__(self, parts: StoreParts, catalogue: SharedCatalogue, objects: BlobFiles, lifetimes: ObjectLifetimes) -> None:
        super().__init__(parts, lifetimes.put_aside_if_rotten)
        self._shared, self._objects = catalogue, objects

    def settled(self, limit_s: float) -> int:
        """Of all servers: a sample takes its stamp while its attempt is open."""
        until = super().settled(limit_s) - _SKEW_NS
        oldest = self._shared.oldest_attempt()
        return min(until, oldest - _SKEW_NS) if oldest else until

    def publish(self, upload: OpenSample, draft: Draft) -> bool:
        """Make the upload's object a committed sample. True when the same content is stored already."""
        assert isinstance(upload, ObjectUpload), "the store makes no other"
        with self._under_way():
            sealed: SampleRecord | None = None
            while True:
                there = self._shared.get(upload.spec.key)
                if there is not None and there.state is State.COMMITTED and self._is_same(upload, draft, there):
                    return True
                is_sent = sealed is not None
                sealed = sealed or replace(upload.seal(draft), attempt=upload.attempt)
                self._opened.check()
                if self._is_committed(upload, sealed, is_sent):
                    return False

    def _is_committed(self, upload: ObjectUpload, sealed: SampleRecord, is_sent: bool) -> bool:
        """Sends what was not sent. False where another sample came first.

        A failure is told only if it stays one: the attempt is ended, and no leader makes a sample of what is in the bucket.
        """
        try:
            if not is_sent:
                upload.finish(sealed)
            in_the_way = self._shared.commit(sealed).result()
        except SlotStreamError as error:
            try:
                if self._shared.end(upload.attempt).result() or self._is_decided_otherwise(sealed):
                    raise
            except SlotStreamError as second:
                if second is error:
                    raise
                raise VerdictUnknown(f"the catalogue went away at a commit: {second}") from error
            in_the_way = None  # The leader took this server for dead, and committed what it had sent.
        upload.is_stored = in_the_way is None
        return upload.is_stored

    def _is_decided_otherwise(self, sealed: SampleRecord) -> bool:
        row = self._shared.get(sealed.key)
        return row is None or row.state is not State.COMMITTED or row.attempt != sealed.attempt

    def _is_same(self, upload: ObjectUpload, draft: Draft, there: SampleRecord) -> bool:
        """Whether what is committed has this content, and is sound. False: it was damaged, and is out of the way now.

        Raises AlreadyExists, UnsupportedFormat, Damaged and IoError.
        """
        key = there.key
        try:
            stored = sample_file_at(self._objects, object_path(there), there.header_xxh3)
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"what is stored under {key} cannot be compared, and stays: {error}") from error
        except (FileNotFoundError, Damaged):
            stored = None
        except OSError as error:
            raise unreadable(error) from error
        if stored is None or stored.key != key or stored.header_xxh3 != there.header_xxh3:
            current = self._shared.get(key)
            if current != there or self._put_aside_if_rotten(there):
                return False  # Deleted meanwhile, or damaged.
            raise IoError(f"what is stored under {key} cannot be compared now")
        if upload.content_hashed_by(draft.content, stored.hash_rows) != stored.content:
            raise AlreadyExists(f"{key} is stored with other content")
        return not self._put_aside_if_rotten(there)
