"""The thread that touches the spool's disk, the only one of the connector. It does what it is asked, in order, and says so."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slotstream.common.throttle import Throttle
from slotstream.connector.counters import Counters
from slotstream.connector.sending.spool import files as spool_files
from slotstream.connector.sending.spool.files import OwnedDir, Place, SpooledSample, SpoolFile
from slotstream.transport.logs import connector_logger
from slotstream.v1 import ingest_pb2
from slotstream.wire.hashing import xxh3

logger = connector_logger(__name__)


@dataclass(frozen=True, slots=True)
class Appended:
    """A record was written; or not, and then `offset` is None and the file is as before, or takes no more."""

    token: object
    offset: int | None


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Rows were read into their buffer, whose hash is `digest`; None when they cannot be had as they were written.

    `later`: the disk failed, and said nothing about them. They may be had at another time.
    """

    token: object
    digest: int | None
    later: bool = False


@dataclass(frozen=True, slots=True)
class Adopted:
    """Files that a dead owner left, each to be loaded."""

    files: tuple[SpoolFile, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a file says; None when the disk does not let it be read now. One that is gone says nothing, and is `damaged`."""

    file: SpoolFile
    sample: SpooledSample | None


SpoolEvent = Appended | ReadBack | Adopted | Loaded


class DiskThread:
    """Samples on the engine's own disk, at most `bytes_max` of them. Every answer goes to `post`, from this thread.

    A directory that cannot be written to is no error here: what is asked is answered as refused, counted and logged.
    """

    def __init__(self, base: Path, bytes_max: int, counters: Counters, post: Callable[[SpoolEvent], None]) -> None:
        self._base = base
        self._bytes_max = bytes_max
        self._counters = counters
        self._post = post
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._own: OwnedDir | None = None
        self._adopted: list[OwnedDir] = []
        self._throttle = Throttle(every_s=10.0)
        self._stop_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="slotstream-spool", daemon=True)
        self.bytes_in_use = 0

    # Asked by the pump.

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def append(self, file: SpoolFile, request: ingest_pb2.IngestRequest, data: memoryview | None, token: object) -> None:
        """Add a record, answered with Appended. `data` must stay as it is until then."""
        self._tasks.put(lambda: self._append(file, request, data, token))

    def read(self, file: SpoolFile, place: Place, skip: int, into: memoryview, token: object) -> None:
        """Read the chunk at `place` but for its first `skip` bytes, as much as `into` takes; answered with ReadBack."""
        self._tasks.put(lambda: self._read(file, place, skip, into, token))

    def drop(self, file: SpoolFile) -> None:
        """The sample needs its file no longer."""
        self._tasks.put(lambda: self._drop(file))

    def adopt(self) -> None:
        """Take over what dead owners left, answered with Adopted if there is anything."""
        self._tasks.put(self._adopt)

    def load(self, file: SpoolFile) -> None:
        """Read an adopted file's records, answered with Loaded."""
        self._tasks.put(lambda: self._load(file))

    def close(self, timeout_s: float) -> None:
        """Do what was asked so far, for at most `timeout_s`, stop, and leave what is in the spool to the next owner."""
        self._stop_at = time.monotonic() + timeout_s
        self._tasks.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s + 1.0)

    # The thread.

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None and time.monotonic() < self._stop_at:
            try:
                task()
            except Exception:  # Our own bug: the others' files are still wanted.
                self._counters.add("hook_faults")
                logger.exception("slotstream: the spool failed")
        for owned in (*self._adopted, *([self._own] if self._own is not None else [])):
            owned.give_up()

    def _append(self, file: SpoolFile, request: ingest_pb2.IngestRequest, data: memoryview | None, token: object) -> None:
        offset: int | None = None
        try:
            size = spool_files.record_bytes(request.ByteSize(), 0 if data is None else data.nbytes)
            if file.dropped or file.broken:
                pass
            elif self.bytes_in_use + size > self._bytes_max:
                self._say("full", f"the spool holds {self.bytes_in_use} bytes: {size} more are past spool_bytes_max")
            else:
                self._place(file)
                offset = spool_files.append(file, request, data)
                self.bytes_in_use += size
                self._counters.add("spooled_bytes", size)
        except OSError as error:
            self._failed("written to", error)
        finally:
            if offset is None and not file.nbytes:
                self._abandon(file)
            self._post(Appended(token, offset))

    def _abandon(self, file: SpoolFile) -> None:
        """Its first record could not be written: nothing may follow."""
        file.broken = True
        if file.directory is not None:
            with suppress(OSError):
                file.path.unlink(missing_ok=True)

    def _place(self, file: SpoolFile) -> None:
        """Give a new file its directory. Raises OSError."""
        if file.directory is None:
            if self._own is not None and not self._own.path.is_dir():  # Somebody removed it, with all that was in it.
                self._own.give_up()
                self._own = None
            if self._own is None:
                self._own = spool_files.create_dir(self._base)
            file.directory = self._own
            self._own.files += 1

    def _read(self, file: SpoolFile, place: Place, skip: int, into: memoryview, token: object) -> None:
        digest: int | None = None
        later = False
        try:
            if skip == 0 and into.nbytes == place.nbytes:
                digest = place.digest if _read_right(file, place, into) else None
            else:  # Written by an engine with larger chunks: all of it has to be read for its hash.
                whole = memoryview(bytearray(place.nbytes))
                if _read_right(file, place, whole):
                    into[:] = whole[skip : skip + into.nbytes]
                    digest = xxh3(into)
        except OSError as error:
            later = spool_files.may_pass(error)
            self._failed("read", error)
        finally:
            self._post(ReadBack(token, digest, later))

    def _drop(self, file: SpoolFile) -> None:
        owned = file.directory
        if owned is None or file.dropped:
            file.dropped = True
            return
        file.dropped = True
        self.bytes_in_use -= file.nbytes
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            self._failed("emptied", error)
        owned.files -= 1
        if owned in self._adopted and owned.files == 0:
            self._adopted.remove(owned)
            owned.give_up()

    def _adopt(self) -> None:
        found: list[SpoolFile] = []
        try:
            for owned, files in spool_files.adopt_dirs(self._base, self._skipped):
                if not files:
                    owned.give_up()
                    continue
                self._adopted.append(owned)
                self.bytes_in_use += sum(file.nbytes for file in files)
                found += files
        except FileNotFoundError:
            pass  # Nothing was ever spooled here.
        except OSError as error:
            self._failed("looked through", error)
        if found:
            logger.info("slotstream: %d samples that an earlier engine left in the spool go to the server now", len(found))
            self._post(Adopted(tuple(found)))

    def _skipped(self, path: Path, error: OSError) -> None:
        self._counters.add("spool_errors")
        why = error.strerror or error
        self._say(path.name, f"what an earlier engine left in {path} is passed over until the next link: {why}")

    def _load(self, file: SpoolFile) -> None:
        sample: SpooledSample | None = SpooledSample(damaged=True)
        try:
            sample = spool_files.read_index(file)
            if sample.damaged:  # What two looks found alike.
                sample = spool_files.read_index(file)
        except OSError as error:
            if spool_files.may_pass(error):
                sample = None
            self._failed("read", error)
        finally:
            self._post(Loaded(file, sample))

    def _failed(self, what: str, error: OSError) -> None:
        self._counters.add("spool_errors")
        self._say("error", f"the spool {self._base} cannot be {what}: {error.strerror or error}")

    def _say(self, kind: str, message: str) -> None:
        if self._throttle.admit(kind) is not None:
            logger.warning("slotstream: %s", message)


def _read_right(file: SpoolFile, place: Place, into: memoryview) -> bool:
    """Whether a chunk's rows are in `into`; False when two looks found others. Raises OSError."""
    return any(spool_files.read_data(file, place, into) for _ in range(2))
