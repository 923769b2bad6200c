"""The samples of a data directory, copied into a bucket and its catalogue: beside a running server, and as often as you like.

Each file's bytes are checked against its hashes first. Each part is sent with a checksum that the store compares. The header of
the object, with the hashes of all rows, is read back before the row is written. Names, tags, metadata, times, reads and acks
stay as they are. The directory is only read.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from slotstream.store.blobs.base import Blobs
from slotstream.store.catalogue.attempts import LIFE_S, SharedCatalogue
from slotstream.store.catalogue.base import Questions, scan
from slotstream.store.catalogue.queries import Standing
from slotstream.store.cluster.keeping import BEAT_S
from slotstream.store.cluster.reading import BlobFiles, object_key
from slotstream.store.disk.clock import boot_ns
from slotstream.store.disk.files import Files
from slotstream.store.records import SampleRecord, State
from slotstream.store.sample.file import sample_file_at
from slotstream.store.upkeep.verifying import verify_record
from slotstream.wire.errors import Damaged, Interrupted, IoError, SlotStreamError

_log = logging.getLogger(__name__)
_PAGE = 64
_THREADS = 4
_COPIED, _SAME = "copied", "same"
Progress = Callable[["Copied"], None]


@dataclass
class Copied:
    """What became of the committed samples of a directory."""

    copied: int = 0
    nbytes: int = 0  # Of those.
    same: int = 0  # Were there already.
    gone: int = 0  # Were deleted meanwhile.
    left: list[tuple[str, str]] = field(default_factory=list)  # Which did not go, and why.


class Copy:
    """From one directory into one pair. Raises what the pair raises, where it is away; what is copied by then stays."""

    def __init__(self, source: Questions, data_dir: Path, catalogue: SharedCatalogue, blobs: Blobs) -> None:
        """`source`: the directory's catalogue; it is asked by one thread."""
        self._source, self._data_dir = source, Path(data_dir).absolute()
        self._catalogue, self._blobs, self._objects = catalogue, blobs, BlobFiles(blobs)
        self._files = Files()
        self._files.confine(self._data_dir)
        self._good_until: dict[str, int] = {}  # Attempt -> until when it is surely open, by the clock that is never set.
        self._lock = threading.Lock()  # Guards it.
        self._over = threading.Event()

    def run(self, namespace: str = "", progress: Progress = lambda copied: None) -> Copied:
        """All committed samples (of one namespace). `progress` is told now and then."""
        copied = Copied()
        renewing = threading.Thread(target=self._renew_forever, name="attempts", daemon=True)
        renewing.start()
        try:
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="copy") as threads:
                rows = (record for record in scan(self._source, namespace) if record.state is State.COMMITTED)
                while page := list(islice(rows, _PAGE)):
                    standings = [self._source.standing(record.key) for record in page]
                    for record, done in zip(page, threads.map(self._one, page, standings), strict=True):
                        self._count(copied, record, done)
                        progress(copied)
        finally:
            self._over.set()
            renewing.join()
        return copied

    def _count(self, copied: Copied, record: SampleRecord, done: str) -> None:
        if done == _COPIED:
            copied.copied += 1
            copied.nbytes += record.file_bytes
        elif done == _SAME:
            copied.same += 1
        elif self._source.get(record.key) != record:
            copied.gone += 1
        else:
            copied.left.append((str(record.key), done))

    def _one(self, record: SampleRecord, standing: Standing) -> str:
        """What became of it: `_COPIED`, `_SAME`, or why it did not go. Raises IoError where an engine is away."""
        done = _SAME if self._is_there(record) else self._send(record)
        if done in (_COPIED, _SAME) and (standing.reads or standing.acked_unix_ns):
            self._catalogue.keep_standing(record, standing.reads, standing.acked_unix_ns).result()
        return done

    def _is_there(self, record: SampleRecord) -> bool:
        there = self._catalogue.get(record.key)
        return there is not None and there.state is State.COMMITTED and there.header_xxh3 == record.header_xxh3

    def _send(self, record: SampleRecord) -> str:
        there = self._catalogue.get(record.key)
        if there is not None and there.state is State.COMMITTED:
            return "another sample has its id there"
        verdict = verify_record(self._files, self._data_dir, record)
        if verdict.damage:
            return f"{verdict.damage}: {verdict.message}"
        attempt = secrets.token_hex(8)
        with self._lock:
            self._good_until[attempt] = boot_ns() + round(LIFE_S * 1e9)
        try:
            return self._attempt(replace(record, attempt=attempt))
        finally:
            with self._lock:
                self._good_until.pop(attempt, None)

    def _attempt(self, record: SampleRecord) -> str:
        self._catalogue.begin(replace(record, state=State.ARRIVING, committed_unix_ns=0, file_bytes=0, header_xxh3="")).result()
        is_committed = False
        try:
            fd = self._files.open_read(record.key.path(self._data_dir))
            try:
                self._put(record, fd)
            finally:
                self._files.close(fd)
            in_the_way = self._catalogue.commit(record).result()
            is_committed = in_the_way is None
            return _COPIED if is_committed else "another sample has its id there"
        except OSError as error:
            return f"its file cannot be read: {error.strerror or error}"
        except Damaged as error:
            return str(error)
        finally:
            if not is_committed:
                self._give_up(record)

    def _put(self, record: SampleRecord, fd: int) -> None:
        def read(at: int, nbytes: int) -> bytes:
            data = self._files.pread(fd, nbytes, at)
            if len(data) < nbytes:
                raise Damaged("its file became shorter while it was sent")
            return data

        name = object_key(record.key, record.attempt)
        self._blobs.put(name, record.file_bytes, read, lambda: self._check_open(record.attempt)).finish(record.file_bytes)
        stored = sample_file_at(self._objects, Path(name))
        if (stored.key, stored.header_xxh3) != (record.key, record.header_xxh3):
            raise IoError(f"the object of {record.key} is not what was sent")

    def _give_up(self, record: SampleRecord) -> None:
        """The leader removes what was sent. It is not told as failed: it lies where it was."""
        with suppress(SlotStreamError):
            self._catalogue.end(record.attempt).result()
            self._catalogue.forget(record.key).result()

    # Attempts.

    def _check_open(self, attempt: str) -> None:
        with self._lock:
            good_until = self._good_until.get(attempt, 0)
        if boot_ns() >= good_until:
            raise Interrupted("the catalogue was away for so long that the sample's attempt may have expired")

    def _renew_forever(self) -> None:
        while not self._over.wait(BEAT_S):
            at = boot_ns()
            with self._lock:
                names = list(self._good_until)
            if not names:
                continue
            try:
                still = self._catalogue.renew(names).result()
            except SlotStreamError as error:
                _log.warning("attempts are renewed later: %s", error)
                continue
            with self._lock:
                for name in names:
                    if name in self._good_until:
                        self._good_until[name] = at + round(LIFE_S * 1e9) if name in still else 0
