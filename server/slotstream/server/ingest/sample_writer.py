"""One sample's disk work, in the order it was asked for, off the event loop but for what takes no time (see `DiskThreads`).

Samples of a stream run side by side, the chunks of one sample one after another: written in order they are hashed in
order, and nothing has to be read back at the commit. (Linux writes to one file from one thread at a time anyway, and has the
others spin.) Hashes of chunks that came in frames are computed ahead where there are threads for it; NIXL's reader has computed
those of its own. Commits wait for the disk, so they have threads of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from slotstream.server.disk_threads import DiskThreads
from slotstream.server.logs import failure_fields
from slotstream.server.nixl.reader import PoolSlot
from slotstream.store.records import Failure, SampleKey, SampleRecord, SampleSpec
from slotstream.store.sample.upload import Upload, VerdictUnknown
from slotstream.wire.columns import NO_COLUMNS, LateColumns
from slotstream.wire.errors import InternalFault, Interrupted, SlotStreamError
from slotstream.wire.hashing import xxh3

_log = logging.getLogger(__name__)
# What a writer does before it lets another writer have the thread: enough for most samples, which are finished one by one then.
_TURN = 64
_TURN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Open:
    spec: SampleSpec


@dataclass(frozen=True, slots=True)
class Refuse:
    """Fail a sample that was never opened; `record` is what its catalogue row will say, if it can have one."""

    record: SampleRecord | None
    failure: Failure


@dataclass(frozen=True, slots=True)
class Chunk:
    chunk: int
    first_row: int
    rows: int
    data: memoryview
    digest: int
    slot: PoolSlot | None = None  # Where `data` lies, if it was read over NIXL.
    found: int | Future[int] | None = None  # The hash of `data`, where somebody else computes it.


@dataclass(frozen=True, slots=True)
class Commit:
    row_count: int
    token_ids: Sequence[int]
    metadata: Mapping[str, str]
    columns: LateColumns = NO_COLUMNS


@dataclass(frozen=True, slots=True)
class Abort:
    failure: Failure


Item = Open | Refuse | Chunk | Commit | Abort


@dataclass(frozen=True, slots=True)
class Ended:
    """A sample's last word: committed (then `failure` is None) or failed. Not one to tell the peer, unless `is_known`."""

    failure: Failure | None
    is_known: bool = True
    duplicate: bool = False
    open_s: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """An item is done with: its bytes are free. `acked` and `slot` are its chunk's; `ended` is set once a sample."""

    writer: SampleWriter
    nbytes: int = 0
    acked: int | None = None
    slot: PoolSlot | None = None
    opened: bool = False
    ended: Ended | None = None


class IngestStore(Protocol):
    """What writers need of a store; see `SampleStore`. Each call, and those of an `Upload`, may raise VerdictUnknown."""

    def open_upload(self, spec: SampleSpec, peer: str) -> Upload:
        """Begin a sample of `peer`."""

    def record_failed(self, record: SampleRecord, failure: Failure, peer: str) -> None:
        """Let readers of the id know why there is no sample of `peer`."""


class SampleWriter:
    """One sample on its way. `push` belongs to the event loop; `post` is called for every item pushed, from any thread."""

    def __init__(
        self,
        store: IngestStore,
        disk_threads: DiskThreads,
        number: int,
        key: SampleKey | None,
        post: Callable[[Done], None],
        line: Hashable = None,
        peer: str = "",
    ) -> None:
        """`line`: what shares its turns with this sample, as all of one stream do. `peer`: whose failure it may become."""
        self.number = number
        self.key = key  # None when the sample was opened under a name that cannot be.
        self._store = store
        self._disk_threads = disk_threads
        self._post = post
        self._line = line
        self.peer = peer
        self.nbytes = 0  # Of the rows that came.
        self._opened_at = time.monotonic()
        self._items: deque[tuple[Item, int]] = deque()
        self._lock = threading.Lock()  # Guards the items, and who has the turn.
        self._running = False  # A thread has its turn: it alone takes items.
        self._ended = False
        self._abandoned = False
        self._upload: Upload | None = None  # Set once, by the thread whose turn it is.

    @property
    def age_s(self) -> float:
        """Seconds since it was opened."""
        return time.monotonic() - self._opened_at

    def push(self, item: Item, nbytes: int = 0) -> None:
        """Do `item` after those pushed before. `nbytes` of memory are held until its Done."""
        if isinstance(item, Chunk):
            self.nbytes += len(item.data)
        if isinstance(item, Chunk) and item.found is None and self._disk_threads.checks_ahead:
            item = replace(item, found=self._disk_threads.chunks.submit(xxh3, item.data))
        with self._lock:
            self._items.append((item, nbytes))
            if self._running:
                return
            self._running = True
        if isinstance(item, Commit | Refuse):
            self._run()  # Which hands it to a thread of its own, past other samples' chunks.
        elif isinstance(item, Chunk) and self._disk_threads.loop_writes:
            with self._disk_threads.loop.excused():  # A disk that stops here stops the event loop, and no restart helps.
                self._run()
        else:
            self._disk_threads.chunk_lines.submit(self._line, self._run)

    def abandon(self, failure: Failure) -> None:
        """Fail the sample without doing what is still waiting. A commit that has begun is finished."""
        self._abandoned = True
        self.push(Abort(failure))

    def _run(self) -> None:
        bytes_left = _TURN_BYTES
        for _ in range(_TURN):
            if bytes_left <= 0:
                break
            with self._lock:
                if not self._items:
                    self._running = False
                    return
                item, nbytes = self._items.popleft()
            # A refusal waits for its row: many of them side by side share a transaction, and keep nobody's chunks waiting.
            if isinstance(item, Commit | Refuse) and not self._ended:
                self._disk_threads.commit_lines.submit(self._line, partial(self._run_commit, item, nbytes))
                return
            self._guarded(item, nbytes)
            bytes_left -= nbytes
        self._disk_threads.chunk_lines.submit(self._line, self._run)

    def _run_commit(self, item: Commit | Refuse, nbytes: int) -> None:
        self._guarded(item, nbytes)
        with self._lock:
            if not self._items:
                self._running = False
                return
        self._disk_threads.chunk_lines.submit(self._line, self._run)

    def _guarded(self, item: Item, nbytes: int) -> None:
        """Does one item. Any error fails this sample and nothing else."""
        ended: Ended | None = None
        if not self._ended:
            try:
                ended = self._do(item)
            except SlotStreamError as error:
                ended = Ended(Failure.of(error))
            except VerdictUnknown as error:
                ended = Ended(Failure.of(Interrupted(str(error))), is_known=False)
            except Exception as error:
                if (more := self._disk_threads.faults.more(type(error).__name__)) is not None:
                    named = {} if self.key is None else {"namespace": self.key.namespace, "sample_id": self.key.sample_id}
                    fields = failure_fields("fault", InternalFault.code, peer=self.peer, **named)
                    _log.exception("a fault in the server failed sample %s%s", self.key, more, extra=fields)
                failure = Failure.of(InternalFault("the server failed; its log says how"))
                ended = Ended(failure, is_known=self._give_up(failure))
        self._ended = self._ended or ended is not None
        acked, slot = (item.chunk, item.slot) if isinstance(item, Chunk) else (None, None)
        self._post(Done(self, nbytes, acked, slot, isinstance(item, Open) and ended is None, ended))

    def _do(self, item: Item) -> Ended | None:
        match item:
            case Chunk():
                # Nobody waits for an abandoned sample's rows; its abort is in the queue.
                if self._upload is not None and not self._abandoned:
                    self._write(self._upload, item)
                return None
            case Open():
                self._upload = self._store.open_upload(item.spec, self.peer)
                return None
            case Commit():
                return None if self._abandoned or self._upload is None else self._commit(self._upload, item)
            case Refuse():
                if item.record is not None:
                    self._store.record_failed(item.record, item.failure, self.peer)
                return Ended(item.failure)
            case Abort():
                if self._upload is not None:
                    self._upload.abort(item.failure)
                return Ended(item.failure)

    def _write(self, upload: Upload, item: Chunk) -> None:
        begun_at = time.monotonic()
        found = item.found
        if isinstance(found, Future):
            # One that nobody has begun with is computed here: waiting for it might be waiting for this thread.
            found = None if found.cancel() else found.result()
        try:
            upload.write_chunk(item.first_row, item.rows, item.data, item.digest, found)
        finally:
            self._disk_threads.disk_speed.note(time.monotonic() - begun_at)

    def _commit(self, upload: Upload, item: Commit) -> Ended:
        begun_at = time.monotonic()
        duplicate = upload.commit(item.row_count, item.token_ids, item.metadata, item.columns)
        now = time.monotonic()
        return Ended(None, duplicate=duplicate, open_s=now - self._opened_at, commit_s=now - begun_at)

    def _give_up(self, failure: Failure) -> bool:
        """Whether it is sure now that the sample failed."""
        try:
            if self._upload is not None:
                self._upload.abort(failure)
        except VerdictUnknown:
            return False
        except Exception:
            _log.exception("sample %s cannot be given up", self.key)
        return True
