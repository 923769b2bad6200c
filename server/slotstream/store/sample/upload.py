"""One sample being written: reserved header, rows at their offsets, then sync, rename and sync again.

    open ──▶ write_chunk* ──▶ commit ──▶ committed      any error, or abort ──▶ failed, its bytes removed

Thread safe: chunks may be written from several threads, in any order and more than once.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from slotstream.common.throttle import Throttle
from slotstream.store.disk.directory import LOCK_NAME
from slotstream.store.disk.files import Files, store_error
from slotstream.store.records import (
    PARTIAL_SUFFIX,
    Failure,
    SampleRecord,
    SampleSpec,
    State,
    check_metadata,
)
from slotstream.store.sample.file import (
    Content,
    column_hashes,
    file_metadata,
    final_header,
    pack_late,
    rehash,
    reserve_header,
)
from slotstream.store.sample.ranges import RangeSet
from slotstream.store.sample.row_hash import GroupHasher
from slotstream.wire.columns import NO_COLUMNS, LateColumns
from slotstream.wire.errors import (
    BadChunk,
    BadParams,
    HashMismatch,
    InternalFault,
    Interrupted,
    IoError,
    MissingRows,
    SlotStreamError,
    StoreFull,
    StoreGone,
    TooLarge,
)
from slotstream.wire.errors import VerdictUnknown as VerdictUnknown
from slotstream.wire.hashing import Buffer, to_hex, xxh3
from slotstream.wire.layout import SampleHeader
from slotstream.wire.names import CHUNK_BYTES_MAX

_log = logging.getLogger(__name__)
_warned = Throttle(every_s=60.0)  # By error: a disk that fails says the same of every sample.
_GAPS_SHOWN = 8
_RANGES_MAX = 1 << 14  # Separate ranges of rows that one sample may have while it arrives.


@dataclass(frozen=True, slots=True)
class Draft:
    """What a commit is about to publish: the rows' content, the late columns' bytes and all metadata."""

    content: Content
    late: Mapping[str, bytes]  # Column -> its bytes in the file.
    metadata: Mapping[str, str]


class OpenSample(Protocol):
    """A sample on its way, as the store sees it: an `Upload`, or the `RemoteUpload` of another process."""

    spec: SampleSpec
    created_unix_ns: int
    partial: Path
    peer: str  # Whose it is; "" where nobody said.

    def content_hashed_by(self, content: Content, hash_rows: int) -> Content:
        """`content` with its rows hashed again in groups of `hash_rows`, to compare with a sample laid out otherwise."""

    def seal(self, draft: Draft) -> SampleRecord:
        """The partial is the whole sample, and synced, when this returns."""

    def abort(self, failure: Failure) -> bool:
        """Fail the sample and remove its bytes. False, and nothing is done, when it ended before or is being committed."""


class Upload:
    """A sample on its way. Made by `SampleStore.open_upload`; ends with exactly one of commit or abort.

    The store hands in `publish`, which calls `seal` and makes the partial the committed file, or finds the same content
    there already (True); and `ended`, called once, with None or with why the sample failed.
    """

    def __init__(
        self,
        spec: SampleSpec,
        data_dir: Path,
        files: Files,
        free_bytes_min: int,
        publish: Callable[[OpenSample, Draft], bool],
        ended: Callable[[OpenSample, Failure | None], None],
        stamp: Callable[[], int],
        partial: str = "",
    ) -> None:
        """Creates the partial (named `partial`, if given). `stamp`: the store's clock, Unix ns.

        Raises StoreFull, StoreGone, IoError, TooLarge and InternalFault, leaving no file behind.
        """
        self.spec = spec
        self.peer = ""
        self.created_unix_ns = stamp()
        self.header_bytes, self.hash_rows = reserve_header(spec)
        self._row_bytes = spec.row_bytes
        self._data_dir = data_dir
        self._files = files
        self._free_bytes_min = free_bytes_min
        self._publish = publish
        self._ended = ended
        self._stamp = stamp
        self._lock = threading.Lock()  # Guards everything below.
        self._rows = RangeSet()
        self._hasher = GroupHasher(self._row_bytes, self.hash_rows)
        self._chunks = 0
        self._first_chunk_unix_ns = 0
        self._writing = 0
        self._finished = False
        self._preallocated = False
        self.written: Callable[[int, int], None] | None = None  # Told of rows [start, stop) that the operating system has.
        name = partial or f"{spec.sample_id}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
        self.partial = spec.key.directory(data_dir) / name
        self._fd = -1
        self._create()

    def _create(self) -> None:
        try:
            self._fd = self._files.create(self.partial)
            if self.spec.rows_exact:
                nbytes = self._exact_file_bytes()
                self._check_free(nbytes)
                self._preallocated = self._files.preallocate(self._fd, nbytes)
                self._check_free(0)  # Others may have taken the same room at the same time.
            else:
                self._check_free(0)
        except OSError as error:
            self._discard()
            raise self._failure(error, "creating the sample's file") from error
        except SlotStreamError:
            self._discard()
            raise

    def _exact_file_bytes(self) -> int:
        return SampleHeader(self.spec.row_format, self.spec.rows_max, {}, self.header_bytes).file_bytes

    def _check_free(self, nbytes: int) -> None:
        if self._files.free_bytes(self._data_dir) - nbytes < self._free_bytes_min:
            kept = f"the {self._free_bytes_min} bytes kept free (--free-bytes-min)"
            raise StoreFull(f"{nbytes} bytes more would leave less than {kept}")

    def write_chunk(self, first_row: int, rows: int, data: Buffer, digest: int, found: int | None = None) -> None:
        """Check `data` (rows [first_row, first_row + rows), xxh3-64 `digest`) and hand it to the operating system.

        `found` is the hash of `data`, where the caller has computed it.
        Rows that were written before are not written again: the first to arrive stay. Any error fails the sample.
        Raises BadChunk, TooLarge, HashMismatch, StoreFull, StoreGone, IoError and InternalFault, and Interrupted when it
        ended before.
        """
        view = memoryview(data).cast("B")
        try:
            self._check_chunk(first_row, rows, view, digest, found)
            with self._lock:
                if self._finished:
                    raise Interrupted("the sample is not open any more")
                missing = self._claim(first_row, first_row + rows, view, digest)
            try:
                if not self._preallocated:
                    self._check_free(view.nbytes)
                for start, stop in missing:
                    part = view[(start - first_row) * self._row_bytes : (stop - first_row) * self._row_bytes]
                    self._files.pwrite(self._fd, part, self.header_bytes + start * self._row_bytes)
                    if self.written is not None:
                        self.written(start, stop)
                if not self._preallocated:
                    self._check_free(0)  # Others may have taken the same room at the same time.
            finally:
                self._release()
        except OSError as error:
            failure = self._failure(error, "writing rows")
            self.abort(Failure.of(failure))
            raise failure from error
        except SlotStreamError as error:
            self.abort(Failure.of(error))
            raise

    def _check_chunk(self, first_row: int, rows: int, view: memoryview, digest: int, found: int | None) -> None:
        if rows < 1 or first_row < 0 or first_row + rows > self.spec.rows_max:
            raise BadChunk(f"rows [{first_row}, {first_row + rows}) are not rows of a sample of at most {self.spec.rows_max}")
        if view.nbytes > CHUNK_BYTES_MAX:
            raise TooLarge(f"a chunk of {view.nbytes} bytes is longer than the {CHUNK_BYTES_MAX} allowed")
        if view.nbytes != rows * self._row_bytes:
            raise BadChunk(f"a chunk of {view.nbytes} bytes does not hold {rows} rows of {self._row_bytes} bytes")
        if (xxh3(view) if found is None else found) != digest:
            raise HashMismatch(f"rows [{first_row}, {first_row + rows}) do not match the hash they were sent with")

    def _claim(self, start: int, stop: int, view: memoryview, digest: int) -> list[tuple[int, int]]:
        """Marks the rows of a chunk that are new, feeds their hashes, and counts a writer. Called with the lock held."""
        missing = self._rows.gaps(start, stop)
        for first, last in missing:
            part = view[(first - start) * self._row_bytes : (last - start) * self._row_bytes]
            self._hasher.feed(first, last - first, part, digest if part.nbytes == view.nbytes else xxh3(part))
        self._rows.add(start, stop)
        if len(self._rows) > _RANGES_MAX:
            raise TooLarge(f"the sample's rows arrived in more than {_RANGES_MAX} separate ranges")
        self._first_chunk_unix_ns = self._first_chunk_unix_ns or time.time_ns()
        self._chunks += 1
        self._writing += 1
        return missing

    def _release(self) -> None:
        with self._lock:
            self._writing -= 1
            last = self._finished and self._writing == 0
        if last:
            self._close()

    def commit(
        self,
        row_count: int,
        token_ids: Sequence[int],
        metadata: Mapping[str, str] | None = None,
        columns: LateColumns = NO_COLUMNS,
    ) -> bool:
        """Make the sample durable and readable. True when the same content was stored before.

        Blocks for the disk. Every chunk's write must have returned. On any error the sample is failed and its bytes are
        gone. Raises MissingRows, BadParams, TooLarge, AlreadyExists, Damaged and UnsupportedFormat (what is stored under the
        id already), StoreFull, StoreGone, IoError, Interrupted and InternalFault; and VerdictUnknown.
        """
        with self._lock:
            if self._finished:
                raise Interrupted("the sample is not open any more")
            self._finished = True  # From here on no chunk gets in, and nobody else ends this upload.
        try:
            if self._writing:
                raise InternalFault("a commit overtook its own chunks")
            duplicate = self._publish(self, self._draft(row_count, token_ids, metadata or {}, columns))
        except OSError as error:
            raise self._fail(self._failure(error, "committing the sample")) from error
        except SlotStreamError as error:
            raise self._fail(error) from error
        except BaseException:
            self._fail(InternalFault("the server failed while it committed the sample"))
            raise
        if duplicate:
            self._discard()
        else:
            self._close()
        self._ended(self, None)
        return duplicate

    def _draft(self, row_count: int, token_ids: Sequence[int], metadata: Mapping[str, str], columns: LateColumns) -> Draft:
        if row_count < 1:
            raise BadParams("a sample has at least one row")
        if len(token_ids) != row_count:
            raise BadParams(f"{len(token_ids)} token ids do not fit {row_count} rows")
        columns.check(self.spec.row_format, row_count)
        merged = {**self.spec.metadata, **metadata}
        check_metadata(merged)
        merged |= {"chunks": str(self._chunks), "first_chunk_unix_ns": str(self._first_chunk_unix_ns)}
        if gaps := self._rows.gaps(0, row_count):
            shown = ", ".join(f"[{start}, {stop})" for start, stop in gaps[:_GAPS_SHOWN])
            raise MissingRows(f"rows {shown}{' and more' if len(gaps) > _GAPS_SHOWN else ''} of {row_count} never arrived")
        late = pack_late(token_ids, columns)
        content = Content(
            row_format=self.spec.row_format,
            num_tokens=row_count,
            layer_ids=self.spec.layer_ids,
            hash_rows=self.hash_rows,
            hashes=tuple(self._hasher.finish(row_count, self._read_rows)),
            column_xxh3=column_hashes(late),
        )
        return Draft(content, late, merged)

    def _read_rows(self, start: int, stop: int) -> bytes:
        nbytes = (stop - start) * self._row_bytes
        data = self._files.pread(self._fd, nbytes, self.header_bytes + start * self._row_bytes)
        if len(data) < nbytes:
            raise IoError("rows that were written cannot be read back: the file became shorter")
        return data

    def content_hashed_by(self, content: Content, hash_rows: int) -> Content:
        """`content` with its rows hashed again in groups of `hash_rows`, to compare with a sample laid out otherwise."""
        return rehash(content, hash_rows, self._read_rows)

    def seal(self, draft: Draft) -> SampleRecord:
        """Write what belongs around the rows and sync: the partial is then the whole sample. Raises TooLarge and OSError."""
        times = (self.created_unix_ns, self._stamp())
        header, raw = final_header(self.spec, draft.content, draft.metadata, times, self.header_bytes)
        for name, data in draft.late.items():
            self._files.pwrite(self._fd, data, header.place_of(name).begin)
        self._files.truncate(self._fd, header.file_bytes)
        self._files.pwrite(self._fd, raw, 0)
        self._files.sync_data(self._fd)
        return replace(
            SampleRecord.arriving(self.spec, self.created_unix_ns),
            state=State.COMMITTED,
            num_tokens=header.num_tokens,
            file_bytes=header.file_bytes,
            committed_unix_ns=times[1],
            metadata=file_metadata(draft.metadata, draft.content.row_format, draft.content.column_xxh3),
            header_xxh3=to_hex(xxh3(raw)),
        )

    def abort(self, failure: Failure) -> bool:
        """Fail the sample and remove its bytes. False, and nothing is done, when it ended before or is being committed."""
        with self._lock:
            if self._finished:
                return False
            self._finished = True
        self._discard()
        self._ended(self, failure)
        return True

    def _failure(self, error: OSError, doing: str) -> SlotStreamError:
        """The expected failure that `error` is, also where the whole data directory is gone."""
        failure = store_error(error, doing)
        if not isinstance(failure, IoError):
            return failure
        try:
            is_there = self._files.path_identity(self._data_dir / LOCK_NAME) is not None
        except OSError:
            return failure
        return failure if is_there else StoreGone(f"{failure}: the data directory {self._data_dir} is gone")

    def _fail(self, error: SlotStreamError) -> SlotStreamError:
        self._discard()
        self._ended(self, Failure.of(error))
        return error

    def _discard(self) -> None:
        self._close()
        try:
            self._files.unlink(self.partial)
        except OSError as error:
            # The next start sweeps it; until then its space is lost, which somebody should know.
            _warn(f"cannot remove the partial file {self.partial}", error)

    def _close(self) -> None:
        """Closes the file, unless a chunk is still being written: then that write's end does."""
        with self._lock:
            if self._writing:
                return
            fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                self._files.close(fd)
            except OSError as error:
                # What a commit promises was synced before. Of a sample that failed nothing is promised.
                _warn(f"closing {self.partial} failed", error)


def _warn(what: str, error: OSError) -> None:
    if (more := _warned.more(str(error.errno))) is not None:
        _log.warning("%s: %s%s", what, error.strerror or error, more)
