"""Random machines against a dict: one store on a disk, and two that share a bucket and a catalogue.

On the disk, crashing at any operation is a move, losing power another. The two are killed, expire, and meet requests that fail.

The long run: `SLOTSTREAM_MACHINE_EXAMPLES=2000 pytest tests/store/test_store_machine.py`.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from store.machine import Machine, Process
from store.power import Plugged, PowerFiles
from store.store_kit import BROKEN, FULL, Crash, crash, crash_server
from support.memory_blobs import Bucket, MemoryBlobs
from support.memory_catalogue import MemoryCatalogue
from support.memory_tables import Tables

from slotstream.store.cluster.generation import is_own
from slotstream.store.cluster.keeping import Keeper
from slotstream.store.cluster.opening import open_store
from slotstream.store.cluster.reading import object_key
from slotstream.store.cluster.store import ObjectStore
from slotstream.store.directory.looking import verify_directory
from slotstream.store.records import State
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import Interrupted, IoError, SlotStreamError, VerdictUnknown

EXAMPLES = int(os.environ.get("SLOTSTREAM_MACHINE_EXAMPLES", "20"))
SETTINGS = settings(max_examples=EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
OPERATIONS = st.sampled_from(["create", "pwrite", "truncate", "sync_data", "rename", "sync_dir", "unlink"])
REQUESTS = st.sampled_from(["part", "complete", "put", "abort", "delete", "commit"])


class StoreMachine(Machine):
    """One store, on a disk."""

    def _begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="slotstream-machine-"))
        self.lives = 0
        self._plug(self.root / "0")

    def _plug(self, directory: Path, files: PowerFiles | None = None) -> None:
        self.plugged = Plugged(directory, files)
        self.directory, self.files = directory, self.plugged.files
        self.process = Process(self.plugged.store)

    def _do(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except SlotStreamError as error:
            return error
        except Crash:
            self._end_process()
            self._plug(self.directory, self.files)
            self._look_again()
            return Crash
        finally:
            self.files.faults = {}

    def _disarm(self) -> Any:
        faults, self.files.faults = self.files.faults, {}
        return faults

    def _arm_again(self, fault: Any) -> None:
        self.files.faults = fault

    def _end_process(self, end: Callable[[SampleStore], None] = crash) -> None:
        self.files.faults, self.files.crashed = {}, False
        for _, reader in self.process.readers:
            reader.close()
        end(self.store)

    def _look_again(self, *, forgetful: bool = False) -> None:
        """After a start: ghosts are settled."""
        self._find_ghosts()
        self.ghosts.clear()
        self._look_at_standing(forgetful=forgetful)

    @rule(operation=OPERATIONS, at=st.integers(1, 3), kind=st.sampled_from([FULL, BROKEN, Crash]))
    def arm(self, operation: str, at: int, kind: Any) -> None:
        """The next move meets a fault, if it gets that far."""
        self.files.faults = {operation: (self.files.calls.count(operation) + at, kind)}

    @rule(cleanly=st.booleans())
    def restart(self, cleanly: bool) -> None:
        self._end_process(SampleStore.close if cleanly else crash)
        self._plug(self.directory, self.files)
        self._look_again()

    @rule(catalogue=st.sampled_from(["kept", "cut", "lost"]), seed=st.integers(0, 1 << 16))
    def lose_power(self, catalogue: str, seed: int) -> None:
        self.lives += 1
        after = self.root / str(self.lives)
        self.files.faults = {}
        self.plugged.cut(after, random.Random(seed), catalogue)
        self._end_process()
        self._plug(after)
        self._look_again(forgetful=True)

    def teardown(self) -> None:
        if not hasattr(self, "process"):
            return
        self.files.faults = {}
        for _, reader in self.process.readers:
            reader.close()
        self.store.close()
        SampleStore.open(self.directory).close()  # What the disk refused is settled by a start.
        found = {verdict.sample_id: verdict.damage for verdict in verify_directory(self.directory)}
        assert found.keys() >= self.committed.keys()
        assert all(found[sample_id] == "" for sample_id in self.committed)
        assert "FOREIGN" not in found.values()
        assert not list(self.directory.rglob("*.partial"))
        shutil.rmtree(self.root)
        self.patch.undo()


class _Faults:
    """The n-th request of a kind from now on fails: before the engine does it, or after, so that nobody hears of it."""

    def __init__(self) -> None:
        self.coming: tuple[str, int, bool] | None = None

    def meets(self, kind: str) -> str:
        if self.coming is None or self.coming[0] != kind:
            return ""
        _, left, is_done = self.coming
        if left > 1:
            self.coming = (kind, left - 1, is_done)
            return ""
        self.coming = None
        return "done" if is_done else "refused"


class _Blobs(MemoryBlobs):
    def __init__(self, bucket: Bucket, faults: _Faults) -> None:
        super().__init__(bucket, lambda bytes_max: 300)
        self._faults = faults

    def _do(self, request: Callable[[], None], what: str) -> None:
        fate = self._faults.meets(what)
        if fate != "refused":
            super()._do(request, what)
        if fate:
            raise IoError("the object store does not answer")


class _Catalogue(MemoryCatalogue):
    def __init__(self, tables: Tables, faults: _Faults) -> None:
        super().__init__(tables)
        self._faults = faults

    def _do(self, run: Callable[[], Any], key: Any = None, *, is_commit: bool = False) -> Any:
        fate = self._faults.meets("commit") if is_commit else ""
        future = super()._do(run if fate != "refused" else lambda: None, key, is_commit=is_commit)
        if fate == "":
            return future
        lost: Any = type(future)()
        lost.set_exception(VerdictUnknown("nobody answered the COMMIT") if fate == "done" else IoError("the catalogue is away"))
        return lost


class PairMachine(Machine):
    """Two stores, one world."""

    def _begin(self) -> None:
        # Their threads would do at moments of their own what is a move here.
        self.patch.setattr(Keeper, "start", lambda keeper: None)
        self.patch.setattr(Keeper, "stop", lambda keeper: None)
        self.root = Path(tempfile.mkdtemp(prefix="slotstream-machine-"))
        self.lives = itertools.count()
        self.tables, self.bucket, self.faults = Tables(time.time_ns), Bucket(), _Faults()
        self.pair = [self._opened(), self._opened()]
        self.turn = 0

    def _opened(self) -> Process:
        return Process(
            open_store(
                "s3://bucket",
                "postgresql://somewhere/slotstream",
                self.root / str(next(self.lives)),
                blobs=_Blobs(self.bucket, self.faults),
                catalogue=_Catalogue(self.tables, self.faults),
            )
        )

    @property
    def process(self) -> Process:  # type: ignore[override]
        return self.pair[self.turn]

    def _ask_who_leads(self) -> None:
        self.turn = next(turn for turn, process in enumerate(self.pair) if self._server(process)._shared.lead())

    def _server(self, process: Process) -> ObjectStore:
        assert isinstance(process.store, ObjectStore)
        return process.store

    def _do(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except SlotStreamError as error:
            return error
        except VerdictUnknown as error:
            return Interrupted(str(error))
        finally:
            self.faults.coming = None
            self._find_ghosts()

    def _disarm(self) -> Any:
        fault, self.faults.coming = self.faults.coming, None
        return fault

    def _arm_again(self, fault: Any) -> None:
        self.faults.coming = fault

    def _deleted(self, name: str) -> None:
        """What is on its way may still come."""

    @rule(turn=st.integers(0, 1))
    def ask(self, turn: int) -> None:
        """From here on this server is asked."""
        self.turn = turn

    @rule(request=REQUESTS, at=st.integers(1, 3), is_done=st.booleans())
    def arm(self, request: str, at: int, is_done: bool) -> None:
        """The next move meets a request that nobody answers, if it gets that far."""
        self.faults.coming = (request, at, is_done)

    @rule(cleanly=st.booleans())
    def restart(self, cleanly: bool) -> None:
        """What it was sending is abandoned; nobody tells the catalogue where it was killed."""
        self._disarm()
        for _, reader in self.process.readers:
            reader.close()
        if cleanly:
            self.store.close()
        else:
            crash_server(self._server(self.process))
        self.pair[self.turn] = self._opened()
        self._find_ghosts()
        self._look_at_standing(forgetful=False)

    @rule(stands_still=st.booleans())
    def let_time_pass(self, stands_still: bool) -> None:
        """So long that what is over is removed, and what nobody renews expires. `stands_still`: that server renews nothing."""
        self._disarm()
        renewed: set[str] = set()
        for process in self.pair:
            keeper = self._server(process)._keeper
            if process is self.process and stands_still:
                keeper._good_until = dict.fromkeys(keeper._good_until, 0)
                continue
            keeper.beat()
            renewed |= set(keeper._open_attempts())
        held = {reader.record.attempt for process in self.pair for _, reader in process.readers}
        for name, attempt in self.tables.attempts.items():
            if name not in renewed | held:
                attempt.due = 0
        for process in self.pair:
            if self._server(process)._shared.lead():
                self._server(process)._keeper.sweep()
        self._find_ghosts()

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        self._disarm()
        for process in self.pair:
            for _, reader in process.readers:
                reader.close()
            process.readers.clear()
        for turn in (0, 1):
            self.turn = turn
            self.restart(cleanly=False)
        for _ in range(3):
            self.let_time_pass(stands_still=False)
        self.what_is_committed_is_there_and_nothing_else()
        rows = [row.record for row in self.tables.rows.values()]
        wanted = {object_key(row.key, row.attempt) for row in rows if row.state is State.COMMITTED}
        assert {name for name in self.bucket.objects if not is_own(name)} == wanted
        assert not self.bucket.uploads
        assert not self.tables.attempts
        for process in self.pair:
            process.store.close()
        shutil.rmtree(self.root)
        self.patch.undo()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = SETTINGS
TestPairMachine = PairMachine.TestCase
TestPairMachine.settings = SETTINGS
