"""The step that makes a sample a committed one: its partial file gets its final name, and its row says COMMITTED.

A file under a final name is whole and synced, and is never overwritten. Its row is written after it, and before anybody is
told. The same content again is a duplicate; other content under an id that is taken is refused. But first the bytes that are
stored are checked: if they are rotten, they are put aside, and what was sent takes their place. The sender has the only other
copy that there is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slotstream.store.parts import StoreParts
from slotstream.store.records import SampleRecord, State
from slotstream.store.sample.file import sample_file_at
from slotstream.store.sample.reading import unreadable
from slotstream.store.sample.upload import Draft, OpenSample, VerdictUnknown
from slotstream.wire.errors import AlreadyExists, Damaged, SlotStreamError, StoreFull, UnsupportedFormat

_log = logging.getLogger(__name__)


class Publisher:
    """Publishes the samples of one store. Thread safe."""

    def __init__(self, parts: StoreParts, put_aside_if_rotten: Callable[[SampleRecord], bool]) -> None:
        """`put_aside_if_rotten`: see `Lifetimes`."""
        self._files, self._data_dir, self._opened = parts.files, parts.data_dir, parts.opened
        self._catalogue, self._id_lock, self._free_bytes_min = parts.catalogue, parts.id_lock, parts.free_bytes_min
        self._put_aside_if_rotten = put_aside_if_rotten
        self._clock = parts.clock
        self._sealing: dict[object, int] = {}  # A commit under way -> a stamp before the one that it takes.
        self._sealed = threading.Condition()  # Guards it; notified when one ends.
        self.left_a_file = False  # Of a commit that failed: the next start has to look.

    def settled(self, limit_s: float) -> int:
        """A stamp up to which every sample that this process stamps, and that is ever committed, is committed already.

        Waits at most so long for commits that are under way; after that it is a stamp before theirs.
        """
        with self._sealed:
            before = dict(self._sealing)
            until = self._clock.stamp()  # Who begins from here on takes a later one.
            self._sealed.wait_for(lambda: before.keys().isdisjoint(self._sealing), limit_s)
            return min([until, *(stamp for one, stamp in before.items() if one in self._sealing)])

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        one = object()
        with self._sealed:
            self._sealing[one] = self._clock.last
        try:
            yield
        finally:
            with self._sealed:
                del self._sealing[one]
                self._sealed.notify_all()

    def publish(self, upload: OpenSample, draft: Draft) -> bool:
        """Make the upload's partial the committed file. True when the same content is stored already, and nothing was done.

        Raises AlreadyExists, Damaged, UnsupportedFormat and IoError for what is stored under the id, StoreFull, StoreGone,
        InternalFault, OSError and VerdictUnknown.
        """
        key = upload.spec.key
        path = key.path(self._data_dir)
        with self._id_lock(key):
            if self._is_stored(upload, draft, path):
                return True
            # The last half of what samples leave free is for the catalogue alone: deletions need it too.
            if self._files.free_bytes(self._data_dir) < self._free_bytes_min // 2:
                raise StoreFull("the disk is full: less is free than the catalogue needs")
            with self._under_way():
                record = upload.seal(draft)
                self._opened.check()
                self._files.rename(upload.partial, path)
                try:
                    self._files.sync_dir(path.parent)
                    self._catalogue.commit(record).result()
                except (OSError, SlotStreamError):
                    self._take_back(path, record)
                    raise
        return False

    def _take_back(self, path: Path, record: SampleRecord) -> None:
        """Remove the file of a commit that failed, for good: its sample is going to be told to have failed.

        Where the disk refuses that, the sample is marked as being deleted, durably: its file goes later, and no start takes it
        for a committed one. Raises VerdictUnknown where not even that can be written.
        """
        try:
            self._files.unlink(path)
            self._files.sync_dir(path.parent)
        except OSError as error:
            _log.error("cannot remove %s, whose commit failed: %s", path, error)
            try:
                self._catalogue.put_deleting(record).result()
            except SlotStreamError as second:
                self.left_a_file = True
                raise VerdictUnknown(f"the commit failed, and its file may be found by the next start: {second}") from second

    def _is_stored(self, upload: OpenSample, draft: Draft, path: Path) -> bool:
        """True when the same content is stored, and sound; False when nothing is in the way.

        Raises AlreadyExists, Damaged, UnsupportedFormat and IoError (what is stored cannot be checked now).
        """
        key = upload.spec.key
        if self._files.path_size(path) is None:
            return False
        record = self._catalogue.get(key)
        if record is not None and record.state is State.DELETING:
            self._files.unlink(path)  # A deletion that the disk interrupted.
            return False
        committed = record if record is not None and record.state is State.COMMITTED else None
        try:
            stored = sample_file_at(self._files, path, committed.header_xxh3 if committed is not None else "")
        except FileNotFoundError:
            return False
        except OSError as error:
            raise unreadable(error) from error
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"what is stored under {key} cannot be compared, and stays: {error}") from error
        except Damaged as error:
            if record is not None and record.state is State.FAILED:
                return False  # It was given up already; what arrives now replaces it.
            if committed is not None and self._put_aside_if_rotten(committed):
                return False
            raise Damaged(f"a damaged file is stored under {key}; delete it first ({error})") from error
        if stored.key != key or (committed is not None and committed.header_xxh3 != stored.header_xxh3):
            if committed is not None and self._put_aside_if_rotten(committed):
                return False
            raise Damaged(f"the file stored under {key} is not the one that was committed; delete it first")
        is_same = upload.content_hashed_by(draft.content, stored.hash_rows) == stored.content
        if committed is not None and not is_same:
            raise AlreadyExists(f"{key} is stored with other content")
        if self._put_aside_if_rotten(committed or stored.record()):
            return False
        if committed is None:  # A whole file that the catalogue does not show: somebody put it back, or a commit ended unknown.
            self._files.sync_dir(path.parent)
            self._catalogue.adopt(stored.record()).result()
        if not is_same:
            raise AlreadyExists(f"{key} is stored with other content")
        return True
