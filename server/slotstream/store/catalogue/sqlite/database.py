"""The database of a catalogue in SQLite. It can be lost: recovery rebuilds it from the sample files.

A start looks at it as closely as it must (`seal`), and each row has a checksum (`row_sums`). Damage that shows while it is in
use is mended at once: what is sound is kept (`salvage`), what is lost comes back from the files.

One thread writes, batch by batch (`batches`).
`synchronous=NORMAL`: a power cut may lose the last rows and never the database; the files they index are durable before.
Only what no file can tell is synced (`durable=True`): that a sample will be deleted, or is out of service.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from slotstream.store.catalogue.batches import BATCH_MAX, BatchWriter
from slotstream.store.catalogue.sqlite import salvage, seal, sql
from slotstream.store.catalogue.sqlite.damage import ERRORS, CatalogueCorrupt, CatalogueDamaged, catalogue_error
from slotstream.store.catalogue.sqlite.opening import READERS, open_database
from slotstream.store.catalogue.sqlite.row_sums import MalformedRow
from slotstream.store.records import SampleKey, SampleRecord
from slotstream.wire.errors import ConfigError, IoError, SlotStreamError

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Operation = Callable[[sqlite3.Connection], object]
_Entry = tuple[_Operation, "Future[Any]", bool]  # The last: whether it has to survive a power cut.


class Database(BatchWriter[_Operation]):
    """Runs operations and queries of `SqliteCatalogue`. Thread safe. Raises StoreFull, IoError and InternalFault."""

    def __init__(self, path: Path) -> None:
        """Open or create the database. Raises CatalogueCorrupt and ConfigError."""
        super().__init__()
        self.path = path
        self._readers: queue.SimpleQueue[sqlite3.Connection | None] = queue.SimpleQueue()
        self._is_open = False
        self._aside: Path | None = None  # A damaged catalogue from which not all is saved yet.
        self._connect()
        # After a rebuild: the samples whose files are there and whose rows are not, as records. Without it damage is only told.
        self.find_lost: Callable[[Callable[[SampleKey], SampleRecord | None]], Iterator[SampleRecord]] | None = None
        self.rebuilds = 0  # In this process, while it was in use.
        self._thread.start()

    def _connect(self) -> None:
        """Open the file. Raises CatalogueCorrupt and ConfigError."""
        opened = open_database(self.path)
        self._writer_db, self._seal, self.was_shut_down_cleanly = opened.writer, opened.seal, opened.was_sealed
        self.log_was_cut = opened.log_was_cut
        self._is_open = True
        while not self._readers.empty():  # What stood for readers while the file could not be opened.
            self._readers.get()
        for reader in opened.readers:
            self._readers.put(reader)

    def _disconnect(self) -> None:
        """Close every connection, once nobody uses it. Readers find None until there are new ones."""
        if not self._is_open:
            return
        readers: list[sqlite3.Connection] = []
        while len(readers) < READERS:
            if (reader := self._readers.get()) is not None:
                readers.append(reader)
        self._is_open = False
        for reader in readers:
            reader.close()
            self._readers.put(None)
        self._writer_db.close()

    def close(self, *, clean: bool = True) -> None:
        """Write what was asked so far and close. `clean` seals the file: the next start need not look at it."""
        if not self._stop_writing():
            return
        was_open = self._is_open
        self._disconnect()
        log = self.path.with_name(self.path.name + "-wal")  # Gone now, unless somebody else has the file open.
        if clean and was_open and not (log.exists() and log.stat().st_size):
            try:
                replace(self._seal, file_xxh3=seal.hash_of(self.path)).write(self.path)
            except OSError as error:
                _log.warning("the catalogue cannot be sealed, so the next start looks at everything: %s", error)

    # Writing. Each method returns at once; the future is done when the change is committed.

    def submit(
        self, operation: Callable[[sqlite3.Connection], _T], *, urgent: bool = True, durable: bool = False
    ) -> Future[_T]:
        """Run `operation` in the writer's next transaction; one that is not `urgent` may wait for others a little.

        Operations run in the order they were asked for. One may run twice, so it must not act outside the database.
        One that raises undoes the whole transaction, and the others in it begin again: expected outcomes are returned.
        `durable`: the future is done once the change, with all before it, survives a power cut.
        """
        return self._ask_for(operation, urgent=urgent, durable=durable)

    def _write_batch(self, batch: list[_Entry]) -> bool:
        """One transaction. False when it failed and holds more than one operation; a single one gets its error.

        One that meets damage is done again once the catalogue is rebuilt.
        """
        return self._write(batch, again=False)

    def _write(self, batch: list[_Entry], *, again: bool) -> bool:
        if not self._is_open and not self._mend(CatalogueDamaged("it could not be opened before")):
            for _, future, _ in batch:
                future.set_exception(IoError("the catalogue cannot be opened"))
            return True
        db = self._writer_db
        durable = any(entry[2] for entry in batch)
        try:
            if durable:
                db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            results = [operation(db) for operation, _, _ in batch]
            db.execute("COMMIT")
        except Exception as error:
            with suppress(sqlite3.Error):
                if db.in_transaction:
                    db.execute("ROLLBACK")
            if len(batch) > 1:
                return False
            failure = catalogue_error(error) if isinstance(error, ERRORS) else error
            if isinstance(failure, CatalogueDamaged) and not again and self._mend(failure):
                return self._write(batch, again=True)
            batch[0][1].set_exception(failure)
            return True
        finally:
            if durable:
                with suppress(sqlite3.Error):
                    db.execute("PRAGMA synchronous = NORMAL")
        for (_, future, _), result in zip(batch, results, strict=True):
            future.set_result(result)
        return True

    # Mending.

    def _mend(self, damage: Exception) -> bool:
        """Open the file again; if it is damaged still, start over with what is sound. All calls wait meanwhile.

        In the thread that writes. False when the disk does not let it: then the next call tries again.
        """
        if self.find_lost is None:
            return False
        _log.error("the catalogue %s is damaged (%s): it is looked at again", self.path, damage)
        self._disconnect()
        try:
            self._reopen()
        except (OSError, CatalogueCorrupt, SlotStreamError, ConfigError, *ERRORS) as error:
            _log.error("the catalogue cannot be opened: %s", error)
            self._disconnect()
            return False
        self.rebuilds += 1
        return True

    def _reopen(self) -> None:
        try:
            self._connect()
            if self._aside is None:
                self._check_rows()
                _log.warning("the catalogue is sound: the damage was in what was read, and not on the disk")
                return
        except (CatalogueCorrupt, *ERRORS) as error:
            if not isinstance(error, CatalogueCorrupt) and not isinstance(catalogue_error(error), CatalogueDamaged):
                raise
            self._disconnect()
            aside = salvage.set_aside(self.path)
            self._aside = self._aside or aside  # What an earlier attempt began is nothing to save from.
            self._connect()
        saved = self.take_over(self._aside)
        found = self._put_lost()
        _log.error(
            "the catalogue is rebuilt: %s; %d samples come from their files; %s is what it was", saved, found, self._aside
        )
        self._aside = None

    def _check_rows(self) -> None:
        """Raises MalformedRow and sqlite3.Error."""
        after = 0
        while page := sql.scan(self._writer_db, after, BATCH_MAX):
            after = page[-1][0]

    def _put_lost(self) -> int:
        assert self.find_lost is not None, "checked before"
        db, found = self._writer_db, 0
        db.execute("BEGIN IMMEDIATE")
        for record in self.find_lost(lambda key: sql.get(db, key.namespace, key.sample_id)):
            sql.put(db, record)
            found += 1
        db.execute("COMMIT")
        return found

    def take_over(self, aside: Path) -> salvage.Saved:
        """Copy what is sound in another catalogue. Before anything else is asked of this one, or in the thread that writes."""
        db = self._writer_db
        db.execute("BEGIN IMMEDIATE")
        saved = salvage.copy_rows(aside, db)
        db.execute("COMMIT")
        return saved

    # Reading.

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        while (db := self._readers.get()) is None:
            if not self._is_open:
                self._readers.put(None)
                raise CatalogueDamaged("the catalogue cannot be opened")
        try:
            yield db
        except ERRORS as error:
            raise catalogue_error(error) from error
        finally:
            self._readers.put(db)

    def ask(self, question: Callable[[sqlite3.Connection], _T]) -> _T:
        """The answer of a query that changes nothing. One that meets damage is asked again once the catalogue is rebuilt."""
        rebuilds = self.rebuilds
        try:
            with self._reader() as db:
                return question(db)
        except CatalogueDamaged as error:
            if self.find_lost is None:
                raise
            damage = error

        def rebuilt(db: sqlite3.Connection) -> None:
            if self.rebuilds == rebuilds:  # Nobody did it meanwhile.
                raise MalformedRow(str(damage))

        self.submit(rebuilt).result()
        with self._reader() as db:
            return question(db)

    def written(self) -> None:
        """Waits until what lingers is written: what was opened before shows from here on."""
        if self._is_lingering():
            self.submit(lambda db: None).result()
