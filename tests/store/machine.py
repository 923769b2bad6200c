"""Moves of a random machine against a dict: what every store does with samples, in files or in objects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store.store_kit import Crash, Sample, read_all

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.records import Failure, State
from slotstream.store.sample import row_hash
from slotstream.store.sample.reading import SampleReader
from slotstream.store.sample.upload import Upload
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.store.upkeep.sweeping import Sweeper
from slotstream.wire.errors import SlotStreamError

IDS = st.sampled_from(["a", "b", "c"])


class Process:
    """A server's life: its store, and what is under way in it."""

    def __init__(self, store: SampleStore) -> None:
        self.store = store
        self.uploads: list[tuple[Sample, Upload, list[tuple[int, int]], set[int]]] = []  # Chunks to send, rows sent.
        self.readers: list[tuple[Sample, SampleReader]] = []


class Machine(RuleBasedStateMachine):
    """Each kind of store is a subclass. It has `process`, whose turn it is, and faults."""

    process: Process

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(row_hash, "GROUP_BYTES", 256)
        self.committed: dict[str, Sample] = {}
        # What a crash or an error left open: of these, an id may turn out to be committed later.
        self.ghosts: dict[str, list[Sample]] = {}
        self.acked: set[str] = set()
        self.leased: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        raise NotImplementedError

    def _do(self, action: Callable[[], Any]) -> Any:
        """The result of a move, or the error or Crash that it ended with. No fault is left after it."""
        raise NotImplementedError

    def _disarm(self) -> Any:
        """Take back the fault that is to come, if there is one. What `_arm_again` takes."""
        raise NotImplementedError

    def _arm_again(self, fault: Any) -> None:
        raise NotImplementedError

    @property
    def store(self) -> SampleStore:
        return self.process.store

    def _ask_who_leads(self) -> None:
        """Rules are applied by one of several."""

    def _find_ghosts(self) -> None:
        """What turned out to be committed is what somebody sent."""
        listed, _ = self.store.list_page(ListQuery(state=State.COMMITTED))
        for name in {record.sample_id for record in listed} - self.committed.keys():
            content = read_all(self.store, Sample(name).key)
            (self.committed[name],) = [s for s in self.ghosts[name] if (s.data, s.token_ids) == content][:1]

    def _look_at_standing(self, *, forgetful: bool) -> None:
        """`forgetful`: acks and leases may be lost, as a power cut loses them."""
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
            self.process.uploads.append((sample, upload, chunks, set()))

    @precondition(lambda self: self.process.uploads)
    @rule(which=st.integers(0, 9), count=st.integers(1, 5), again=st.booleans())
    def write(self, which: int, count: int, again: bool) -> None:
        """Some chunks, in a shuffled order; `again`: they will be sent once more."""
        uploads = self.process.uploads
        sample, upload, chunks, sent = uploads[which % len(uploads)]
        for start, stop in chunks[:count]:
            if isinstance(self._do(partial(sample.write, upload, start, stop)), SlotStreamError):
                break
            sent.add(start)
        if not again:
            del chunks[:count]

    @precondition(lambda self: self.process.uploads)
    @rule(which=st.integers(0, 9), drop=st.sampled_from([0, 0, 0, 1]))
    def commit(self, which: int, drop: int) -> None:
        """The chunks that are left, but for those that got lost on the way, and then the commit."""
        sample, upload, chunks, sent = self.process.uploads.pop(which % len(self.process.uploads))
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

    @precondition(lambda self: self.process.uploads)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        _, upload, _, _ = self.process.uploads.pop(which % len(self.process.uploads))
        self._do(lambda: upload.abort(Failure("ABORTED", "no")))

    # Reading, and what stays.

    @precondition(lambda self: self.committed and len(self.process.readers) < 3)
    @rule(which=st.integers(0, 9))
    def begin_read(self, which: int) -> None:
        name = sorted(self.committed)[which % len(self.committed)]
        self._disarm()
        self.process.readers.append((self.committed[name], self.store.reader(Sample(name).key)))

    @precondition(lambda self: self.process.readers)
    @rule(which=st.integers(0, 9))
    def end_read(self, which: int) -> None:
        """Its rows are all there, after all that happened meanwhile."""
        sample, reader = self.process.readers.pop(which % len(self.process.readers))
        self._disarm()
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
            self._deleted(sample_id)

    def _deleted(self, name: str) -> None:
        self.ghosts.pop(name, None)

    @rule(samples_max=st.sampled_from([float("inf"), 2, 1, 0]), on_ack=st.booleans())
    def sweep(self, samples_max: float, on_ack: bool) -> None:
        self._ask_who_leads()
        in_use = self.leased | {sample.sample_id for sample, _ in self.process.readers}
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
                self._deleted(name)

    @invariant()
    def what_is_committed_is_there_and_nothing_else(self) -> None:
        fault = self._disarm()
        listed, _ = self.store.list_page(ListQuery(state=State.COMMITTED))
        assert sorted(record.sample_id for record in listed) == sorted(self.committed)
        assert self.store.lifetimes.usage("default").samples == len(self.committed)
        for sample in self.committed.values():
            assert read_all(self.store, sample.key) == (sample.data, sample.token_ids)
        self._arm_again(fault)
