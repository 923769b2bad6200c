"""What stays and what goes, where samples are objects: a deletion is one transaction, and the object goes a minute later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from slotstream.store.blobs.base import Blobs
from slotstream.store.catalogue.attempts import SharedCatalogue
from slotstream.store.catalogue.queries import Candidate
from slotstream.store.cluster.generation import Generations
from slotstream.store.cluster.reading import BlobFiles, object_path
from slotstream.store.parts import StoreParts
from slotstream.store.records import SampleRecord, State
from slotstream.store.upkeep import verifying
from slotstream.store.upkeep.lifetimes import Lifetimes
from slotstream.store.upkeep.verifying import Verdict
from slotstream.wire.errors import Leased

_log = logging.getLogger(__name__)
_HEAD_BYTES = 1 << 16  # What a question counts for, beside bytes that are read.


class ObjectLifetimes(Lifetimes):
    """As `Lifetimes`. `parts`: those of the scratch directory."""

    def __init__(
        self, parts: StoreParts, catalogue: SharedCatalogue, blobs: Blobs, objects: BlobFiles, generations: Generations
    ) -> None:
        super().__init__(parts)
        self._generations = generations
        self._shared, self._blobs, self._objects = catalogue, blobs, objects

    def delete(self, record: SampleRecord) -> None:
        self._generations.check()
        if until := self._shared.mark_deleting(record):
            seconds = (until - self._shared.now()) / 1e9
            raise Leased(f"{record.key} is leased to a reader for another {seconds:.0f} seconds")
        self._shared.drop_deleting([record.key])  # One that failed has no object, and its row is there still.

    def delete_unused(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        term = self._shared.lead()
        if not term or self._generations.is_behind:
            return []
        marked = self._shared.mark_unused(candidates, term)
        self._shared.drop_deleting([candidate.key for candidate in marked], term)
        return marked

    def finish_deletions(self) -> None:
        term = self._shared.lead()
        if not term or self._generations.is_behind:
            return
        stuck = [record.key for record in self._shared.unfinished() if record.state is State.DELETING]
        if stuck:
            self._shared.drop_deleting(stuck, term)

    def accept_clock(self) -> None:
        """The clock is the database's; leases last no longer than one may by it."""
        self.watch.accept()

    # Damage. A damaged object stays where it is until its row goes, or another sample takes its place.

    def verify(self, record: SampleRecord, on_read: Callable[[int], None]) -> Verdict | None:
        while True:
            verdict = self._look(record, on_read)
            if not verdict.damage:
                return verdict
            current = self._shared.get(record.key)
            if current is None or current.state is not State.COMMITTED:
                return None
            if current == record:
                return verdict
            record = current

    def scrub(self, record: SampleRecord, on_read: Callable[[int], None]) -> Verdict | None:
        """By what the store says of the object: it keeps checksums itself. The bytes are read where that looks wrong."""
        on_read(_HEAD_BYTES)
        stored = self._blobs.checksum(object_path(record).as_posix())
        if stored is not None and stored.nbytes == record.file_bytes:
            return Verdict(record.namespace, record.sample_id, record=record)
        return self.verify(record, on_read)

    def _look(self, record: SampleRecord, on_read: Callable[[int], None] = lambda _: None) -> Verdict:
        return verifying.verify_record(self._objects, self._data_dir, record, on_read, object_path(record))

    def _put_aside(self, record: SampleRecord, verdict: Verdict) -> str:
        message = f"{object_path(record)} stays where it is; {verdict.damage}: {verdict.message}"
        self._shared.put_damaged(record, message).result()
        with self._counting:
            self.quarantined += 1
        fields = {"event": "damaged", "code": verdict.damage, "namespace": record.namespace, "sample_id": record.sample_id}
        _log.error("sample %s is damaged: %s", record.key, message, extra=fields)
        return "left where it is"

    def quarantine_totals(self) -> tuple[int, int]:
        return 0, 0
