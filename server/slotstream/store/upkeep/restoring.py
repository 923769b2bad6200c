"""Takes files out of the quarantine that verify again: what a bad cable or a failing memory made of them is not what they are.

A file goes back if it is the one that was put aside (its name says when it was committed, and so does its header), if every
byte of it verifies, and if its id is still free. The name comes before the row, as in a commit: a crash between the two leaves
a whole file, which the next start adopts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slotstream.store.disk.files import store_error
from slotstream.store.disk.retrying import retried
from slotstream.store.parts import StoreParts
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.store.sample.file import sample_file_at
from slotstream.store.upkeep.quarantine import Quarantine
from slotstream.store.upkeep.verifying import IO_ERROR, UNSUPPORTED, Verdict, verify_record
from slotstream.wire.errors import Damaged, UnsupportedFormat

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of one file of the quarantine. `kept`: why it stays there, in a sentence; "" when it went back."""

    key: SampleKey
    file: str  # Below the data directory.
    damage: str = ""  # As in a Verdict, where the file does not verify.
    kept: str = ""
    bytes_checked: int = 0


class Restorer:
    """Empties the quarantine of one store as far as that can be. Thread safe."""

    def __init__(self, parts: StoreParts) -> None:
        self._files, self._data_dir, self._opened = parts.files, parts.data_dir, parts.opened
        self._catalogue, self._id_lock = parts.catalogue, parts.id_lock
        self._quarantine = Quarantine(parts.files, parts.data_dir, parts.opened)

    def restore(self, namespace: str = "", sample_id: str = "") -> Iterator[Restored]:
        """Look at every file (of one namespace, of one id), and put back what can be.

        Raises StoreFull, StoreGone, IoError and InternalFault.
        """
        try:
            self._opened.check()
            for key, committed_unix_ns, path in self._quarantine.held(namespace):
                if not sample_id or key.sample_id == sample_id:
                    yield self._restore(key, committed_unix_ns, path)
        except OSError as error:
            raise store_error(error, "taking a file out of the quarantine") from error

    def _restore(self, key: SampleKey, committed_unix_ns: int, path: Path) -> Restored:
        file = str(path.relative_to(self._data_dir))
        verdict = self._verdict(key, committed_unix_ns, path)
        if verdict.damage:
            return Restored(key, file, verdict.damage, verdict.message)
        assert verdict.record is not None, "a verdict of a sound file has its record"
        with self._id_lock(key):
            if in_the_way := self._in_the_way(key):
                return Restored(key, file, kept=in_the_way, bytes_checked=verdict.bytes_checked)
            self._opened.check()
            target = key.path(self._data_dir)
            for directory in (target.parent.parent, target.parent):
                self._files.make_dir(directory)
                self._files.sync_dir(directory.parent)
            self._files.rename(path, target)
            self._files.sync_dir(target.parent)
            self._files.sync_dir(path.parent)
            self._catalogue.adopt(verdict.record).result()
        _log.warning("sample %s verifies again: it is committed as before", key)
        return Restored(key, file, bytes_checked=verdict.bytes_checked)

    def _verdict(self, key: SampleKey, committed_unix_ns: int, path: Path) -> Verdict:
        def kept(damage: str, message: str) -> Verdict:
            return Verdict(key.namespace, key.sample_id, damage, message)

        try:
            file = sample_file_at(self._files, path)
            record: SampleRecord = file.record()
        except UnsupportedFormat as error:
            return kept(UNSUPPORTED, str(error))
        except Damaged as error:
            return kept("UNREADABLE", str(error))
        except OSError as error:
            return kept(IO_ERROR, str(store_error(error, "reading the file")))
        if file.key != key:
            return kept("UNREADABLE", "the file is another sample's")
        if record.committed_unix_ns != committed_unix_ns:
            return kept("HASH_MISMATCH", "the file is not the one that was committed")
        return verify_record(self._files, self._data_dir, record, path=path)

    def _in_the_way(self, key: SampleKey) -> str:
        """Why the id is not free; "" where it is."""
        record = self._catalogue.get(key)
        if record is not None and record.state is State.COMMITTED:
            return "the sample was stored again meanwhile"
        if record is not None and record.state is State.DELETING:
            return "the sample is being deleted"
        if retried(lambda: self._files.path_size(key.path(self._data_dir))) is not None:
            return "another file is in the sample's place"
        return ""
