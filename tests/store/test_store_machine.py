"""A random machine against a dict. Crashing, at any disk operation, is one of its moves."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_kit import BROKEN, FULL, Crash, FaultyFiles, Sample, crash, read_all

from slotstream.store import rowhash
from slotstream.store.catalogue_sql import ListQuery
from slotstream.store.records import Failure, State
from slotstream.store.samples import SampleStore
from slotstream.store.upload import Upload
from slotstream.store.verifying import verify_directory
from slotstream.wire.errors import SlotStreamError

IDS = st.sampled_from(["a", "b", "c"])
OPERATIONS = st.sampled_from(["create", "pwrite", "truncate", "sync_data", "rename", "sync_dir", "unlink"])


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(rowhash, "GROUP_BYTES", 256)
        self.directory = Path(tempfile.mkdtemp(prefix="slotstream-machine-"))
        self.files = FaultyFiles()
        self.store = SampleStore.open(self.directory, files=self.files)
        self.committed: dict[str, Sample] = {}
        self.uncertain: dict[str, Sample] = {}  # A crash cut its commit or its deletion short: both outcomes are right.
        self.uploads: list[tuple[Sample, Upload, list[tuple[int, int]]]] = []

    def _do(self, action: Callable[[], Any]) -> Any:
        """The result of a move, or the error or Crash that it ended with."""
        try:
            return action()
        except SlotStreamError as error:
            return error
        except Crash:
            crash(self.store)
            self._reopen()
            return Crash
        finally:
            self.files.faults = {}

    def _reopen(self) -> None:
        self.files = FaultyFiles()
        self.store = SampleStore.open(self.directory, files=self.files)
        self.uploads.clear()
        for sample_id, sample in self.uncertain.items():
            self._settle(sample_id, sample)
        self.uncertain.clear()

    def _settle(self, sample_id: str, sample: Sample) -> None:
        record = self.store.stat(sample.key)
        if record is not None and record.state is State.COMMITTED:
            self.committed[sample_id] = sample
        else:
            self.committed.pop(sample_id, None)

    @rule(sample_id=IDS, seed=st.integers(0, 1), rows=st.integers(1, 14), exact=st.booleans(), order=st.randoms())
    def open(self, sample_id: str, seed: int, rows: int, exact: bool, order: Any) -> None:
        sample = Sample(sample_id, rows, seed, exact=exact)
        upload = self._do(lambda: self.store.open_upload(sample.spec()))
        chunks = sample.chunks()
        order.shuffle(chunks)
        if isinstance(upload, Upload):
            self.uploads.append((sample, upload, chunks))

    @precondition(lambda self: self.uploads)
    @rule(which=st.integers(0, 9), count=st.integers(1, 5), keep=st.booleans())
    def write(self, which: int, count: int, keep: bool) -> None:
        sample, upload, chunks = self.uploads[which % len(self.uploads)]
        for start, stop in chunks[:count]:
            if isinstance(self._do(lambda start=start, stop=stop: sample.write(upload, start, stop)), SlotStreamError):
                break
        if not keep:
            del chunks[:count]

    @precondition(lambda self: self.uploads)
    @rule(which=st.integers(0, 9))
    def commit(self, which: int) -> None:
        sample, upload, chunks = self.uploads.pop(which % len(self.uploads))
        for start, stop in chunks:
            if self._do(lambda start=start, stop=stop: sample.write(upload, start, stop)) is Crash:
                return
        before = self.committed.get(sample.sample_id)
        if before is None:
            self.uncertain[sample.sample_id] = sample
        outcome = self._do(lambda: upload.commit(sample.rows, sample.token_ids))
        self.uncertain.pop(sample.sample_id, None)
        if outcome is Crash:
            return
        if outcome is False:
            assert before is None
            self.committed[sample.sample_id] = sample
        elif outcome is True:
            assert before is not None
            assert (before.data, before.token_ids) == (sample.data, sample.token_ids)
        elif before is not None and isinstance(outcome, SlotStreamError) and outcome.code == "ALREADY_EXISTS":
            assert before.data != sample.data

    @precondition(lambda self: self.uploads)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        _, upload, _ = self.uploads.pop(which % len(self.uploads))
        self._do(lambda: upload.abort(Failure("ABORTED", "no")))

    @rule(sample_id=IDS)
    def delete(self, sample_id: str) -> None:
        sample = self.committed.get(sample_id, Sample(sample_id))
        if sample_id in self.committed:
            self.uncertain[sample_id] = sample
        outcome = self._do(lambda: self.store.delete(sample.key))
        self.uncertain.pop(sample_id, None)
        if outcome is None or (isinstance(outcome, SlotStreamError) and sample_id in self.committed):
            # A deletion that the disk interrupted is finished by the next start; until then nobody sees the sample.
            self.committed.pop(sample_id, None)

    @rule(operation=OPERATIONS, at=st.integers(1, 3), kind=st.sampled_from([FULL, BROKEN, Crash]))
    def arm(self, operation: str, at: int, kind: Any) -> None:
        """The next move meets a fault, if it gets that far."""
        self.files.faults = {operation: (self.files.calls.count(operation) + at, kind)}

    @rule(cleanly=st.booleans())
    def restart(self, cleanly: bool) -> None:
        self.files.faults = {}
        if cleanly:
            self.store.close()
        else:
            crash(self.store)
        self._reopen()

    @invariant()
    def what_is_committed_is_there_and_nothing_else(self) -> None:
        faults, self.files.faults = self.files.faults, {}
        listed, _ = self.store.list_page(ListQuery(state=State.COMMITTED))
        assert sorted(record.sample_id for record in listed) == sorted(self.committed)
        for sample in self.committed.values():
            assert read_all(self.store, sample.key) == (sample.data, sample.token_ids)
        self.files.faults = faults

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.files.faults = {}
        self.store.close()
        found = {verdict.sample_id: verdict.damage for verdict in verify_directory(self.directory)}
        assert found.keys() >= self.committed.keys()
        assert all(found[sample_id] == "" for sample_id in self.committed)
        assert "FOREIGN" not in found.values()
        assert not list(self.directory.rglob("*.partial"))
        shutil.rmtree(self.directory)
        self.patch.undo()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
