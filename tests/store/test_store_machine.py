"""A random machine against a dict. Crashing at any disk operation is one of its moves, losing power another.

The long run: `SLOTSTREAM_MACHINE_EXAMPLES=2000 pytest tests/store/test_store_machine.py`.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store.power import Plugged, PowerFiles
from store.store_kit import BROKEN, FULL, Crash, Sample, crash, read_all

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.directory.looking import verify_directory
from slotstream.store.records import Failure, State
from slotstream.store.sample import row_hash
from slotstream.store.sample.reading import SampleReader
from slotstream.store.sample.upload import Upload
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.store.upkeep.sweeping import Sweeper
from slotstream.wire.errors import SlotStreamError

EXAMPLES = int(os.environ.get("SLOTSTREAM_MACHINE_EXAMPLES", "20"))
IDS = st.sampled_from(["a", "b", "c"])
OPERATIONS = st.sampled_from(["create", "pwrite", "truncate", "sync_data", "rename", "sync_dir", "unlink"])


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(row_hash, "GROUP_BYTES", 256)
        self.root = Path(tempfile.mkdtemp(prefix="slotstream-machine-"))
        self.lives = 0
        self.committed: dict[str, Sample] = {}
        # What a crash or an error left open: of these, an id may turn out to be committed after the next start.
        self.ghosts: dict[str, list[Sample]] = {}
        self.acked: set[str] = set()
        self.leased: set[str] = set()
        self.uploads: list[tuple[Sample, Upload, list[tuple[int, int]], set[int]]] = []  # Chunks to send, rows sent.
        self.readers: list[tuple[Sample, SampleReader]] = []
        self._plug(self.root / "0")

    def _plug(self, directory: Path, files: PowerFiles | None = None) -> None:
        self.plugged = Plugged(directory, files)
        self.directory, self.store, self.files = directory, self.plugged.store, self.plugged.files

    def _do(self, action: Callable[[], Any]) -> Any:
        """The result of a move, or the error or Crash that it ended with."""
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

    def _end_process(self, end: Callable[[SampleStore], None] = crash) -> None:
        self.files.faults, self.files.crashed = {}, False
        for _, reader in self.readers:
            reader.close()
        self.readers.clear()
        self.uploads.clear()
        end(self.store)

    def _look_again(self, *, forgetful: bool = False) -> None:
        """After a start: ghosts are settled. `forgetful`: acks and leases may be lost, as a power cut loses them."""
        listed, _ = self.store.list_page(ListQuery(state=State.COMMITTED))
        for name in {record.sample_id for record in listed} - self.committed.keys():
            content = read_all(self.store, Sample(name).key)
            (self.committed[name],) = [s for s in self.ghosts[name] if (s.data, s.token_ids) == content][:1]
        self.ghosts.clear()
        standing = {name: self.store.lifetimes.standing(Sample(name).key) for name in self.committed}
        acked = {name for name, known in standing.items() if known.acked_unix_ns}
        leased = {name for name, known in standing.items() if known.leased_until_unix_ns}
        assert acked <= self.acked
        assert leased <= self.leased
        if not forgetful:
            assert (acked, leased) == (self.acked & self.committed.keys(), self.leased & self.committed.keys())
        self.acked, self.leased = acked, leased

    def _ghost(self, name: str, sample: Sample) -> None:
        self.ghosts.setdefault(name, []).append(sample)

    def _forget(self, name: str) -> None:
        self.acked.discard(name)
        self.leased.discard(name)

    # Ingest.

    @rule(sample_id=IDS, seed=st.integers(0, 1), rows=st.integers(1, 14), exact=st.booleans(), order=st.randoms())
    def open(self, sample_id: str, seed: int, rows: int, exact: bool, order: Any) -> None:
        sample = Sample(sample_id, rows, seed, exact=exact)
        upload = self._do(lambda: self.store.open_upload(sample.spec()))
        chunks = sample.chunks()
        order.shuffle(chunks)
        if isinstance(upload, Upload):
            self.uploads.append((sample, upload, chunks, set()))

    @precondition(lambda self: self.uploads)
    @rule(which=st.integers(0, 9), count=st.integers(1, 5), again=st.booleans())
    def write(self, which: int, count: int, again: bool) -> None:
        """Some chunks, in a shuffled order; `again`: they will be sent once more."""
        sample, upload, chunks, sent = self.uploads[which % len(self.uploads)]
        for start, stop in chunks[:count]:
            if isinstance(self._do(partial(sample.write, upload, start, stop)), SlotStreamError):
                break
            sent.add(start)
        if not again:
            del chunks[:count]

    @precondition(lambda self: self.uploads)
    @rule(which=st.integers(0, 9), drop=st.sampled_from([0, 0, 0, 1]))
    def commit(self, which: int, drop: int) -> None:
        """The chunks that are left, but for those that got lost on the way, and then the commit."""
        sample, upload, chunks, sent = self.uploads.pop(which % len(self.uploads))
        name = sample.sample_id
        whole = sent | {start for start, _ in chunks[drop:]} == {start for start, _ in sample.chunks()}
        for start, stop in chunks[drop:]:
            if self._do(partial(sample.write, upload, start, stop)) is Crash:
                return
        before = self.committed.get(name)
        if before is None and whole:
            self._ghost(name, sample)
        outcome = self._do(lambda: upload.commit(sample.rows, sample.token_ids))
        if outcome is Crash:
            return
        if outcome is False:
            assert before is None
            assert whole
            self.committed[name] = sample
            self.ghosts.pop(name, None)
        elif outcome is True:
            assert before is not None
            assert (before.data, before.token_ids) == (sample.data, sample.token_ids)
        elif before is not None and outcome.code == "ALREADY_EXISTS":
            assert before.data != sample.data

    @precondition(lambda self: self.uploads)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        _, upload, _, _ = self.uploads.pop(which % len(self.uploads))
        self._do(lambda: upload.abort(Failure("ABORTED", "no")))

    # Reading, and what stays.

    @precondition(lambda self: self.committed and len(self.readers) < 3)
    @rule(which=st.integers(0, 9))
    def begin_read(self, which: int) -> None:
        name = sorted(self.committed)[which % len(self.committed)]
        self.files.faults = {}
        self.readers.append((self.committed[name], self.store.reader(Sample(name).key)))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 9))
    def end_read(self, which: int) -> None:
        """Its rows are all there, after all that happened meanwhile."""
        sample, reader = self.readers.pop(which % len(self.readers))
        self.files.faults = {}
        with reader:
            assert b"".join(bytes(piece) for block in reader.blocks(0, sample.rows) for piece in block.data) == sample.data

    @rule(sample_id=IDS)
    def ack(self, sample_id: str) -> None:
        outcome = self._do(lambda: self.store.lifetimes.ack(Sample(sample_id).key))
        assert (outcome is None) == (sample_id in self.committed)
        if outcome is None:
            self.acked.add(sample_id)

    @rule(sample_id=IDS, seconds=st.sampled_from([0, 3600]))
    def lease(self, sample_id: str, seconds: int) -> None:
        outcome = self._do(lambda: self.store.lifetimes.lease(Sample(sample_id).key, "me", seconds))
        assert isinstance(outcome, int) == (sample_id in self.committed)
        if sample_id in self.committed:
            (self.leased.add if seconds else self.leased.discard)(sample_id)

    @rule(sample_id=IDS)
    def delete(self, sample_id: str) -> None:
        sample = self.committed.get(sample_id)
        is_leased = sample_id in self.leased
        if sample is not None and not is_leased:
            self.committed.pop(sample_id)
            self._ghost(sample_id, sample)
            self._forget(sample_id)
        outcome = self._do(lambda: self.store.delete(Sample(sample_id).key))
        if is_leased:
            assert outcome is Crash or outcome.code == "LEASED"
        elif outcome is None:
            self.ghosts.pop(sample_id, None)

    @rule(samples_max=st.sampled_from([float("inf"), 2, 1, 0]), on_ack=st.booleans())
    def sweep(self, samples_max: float, on_ack: bool) -> None:
        in_use = self.leased | {sample.sample_id for sample, _ in self.readers}
        records = {name: self.store.stat(sample.key) for name, sample in self.committed.items()}
        oldest = sorted(self.committed, key=lambda name: records[name].committed_unix_ns)  # type: ignore[union-attr]
        due = [name for name in oldest if on_ack and name in self.acked and name not in in_use]
        for name in oldest:
            if name not in due and name not in in_use and len(self.committed) - len(due) > samples_max:
                due.append(name)
        for name in due:
            self._ghost(name, self.committed.pop(name))
        acked, leased = set(self.acked), set(self.leased)
        rules = Rule(samples_max=samples_max, delete_on_ack=on_ack)
        outcome = self._do(lambda: Sweeper(self.store.lifetimes, Policy(default=rules), self.store.free_bytes).sweep())
        if outcome is Crash:
            return
        assert sum(outcome.samples.values()) == len(due)
        self.acked, self.leased = acked - set(due), leased - set(due)
        for name in due:
            if self.store._catalogue.get(Sample(name).key) is None:
                self.ghosts.pop(name)

    # Trouble.

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

    @invariant()
    def what_is_committed_is_there_and_nothing_else(self) -> None:
        faults, self.files.faults = self.files.faults, {}
        listed, _ = self.store.list_page(ListQuery(state=State.COMMITTED))
        assert sorted(record.sample_id for record in listed) == sorted(self.committed)
        assert self.store.lifetimes.usage("default").samples == len(self.committed)
        for sample in self.committed.values():
            assert read_all(self.store, sample.key) == (sample.data, sample.token_ids)
        self.files.faults = faults

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.files.faults = {}
        for _, reader in self.readers:
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


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
