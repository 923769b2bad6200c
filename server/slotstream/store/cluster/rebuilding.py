"""The catalogue, brought up to what the bucket holds: after a dump was restored, or with a catalogue that is new.

Objects describe themselves. What the catalogue alone knew is lost: reads, acks, leases, and samples that failed. No object is
ever removed here, and servers may run meanwhile. First all names are compared, which is the plan; then headers are read.

A catalogue that is older than the bucket has attempts that say arriving, and were committed since. Those that nobody renews are
taken for lost, and their objects are looked at as if the catalogue did not know them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from slotstream.store.blobs.base import Blobs
from slotstream.store.catalogue.attempts import Generation, SharedCatalogue
from slotstream.store.catalogue.base import scan
from slotstream.store.cluster.generation import KEY, decoded, encoded, is_older, is_own
from slotstream.store.cluster.keeping import BEAT_S
from slotstream.store.cluster.reading import BlobFiles, attempt_of, object_key, object_path
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.store.sample.file import sample_file_at, unsupported_record_at
from slotstream.wire.errors import Damaged, IoError, UnsupportedFormat

_log = logging.getLogger(__name__)
_PAGE = 500
_READERS = 16
_RENEWED_S = 2 * BEAT_S + 5  # Who still sends a sample has said so by then.
Progress = Callable[[int], None]


@dataclass
class Plan:
    """What differs, by names alone."""

    is_behind: bool  # The catalogue is older than the bucket, or is new.
    same: int = 0  # Objects of samples that the catalogue has.
    known: int = 0  # Objects that it knows as arriving, or as going away.
    unknown: dict[SampleKey, list[str]] = field(default_factory=dict)  # Sample -> attempts whose objects it does not know.
    nbytes: int = 0  # Of these.
    foreign: list[str] = field(default_factory=list)  # Objects that cannot be a sample's, by their names.
    lost: list[SampleRecord] = field(default_factory=list)  # Committed samples whose objects are gone.
    abandoned: set[str] = field(default_factory=set)  # Attempts that say arriving, and that nobody renews.

    @property
    def objects(self) -> int:
        return sum(map(len, self.unknown.values()))


@dataclass
class Outcome:
    added: int = 0
    dropped: int = 0
    left: list[tuple[str, str]] = field(default_factory=list)  # Objects that became no sample, and why.


class Rebuild:
    """Of one bucket and one catalogue. Raises what the engines raise; done again, it goes on."""

    def __init__(self, catalogue: SharedCatalogue, blobs: Blobs) -> None:
        self._catalogue, self._blobs, self._objects = catalogue, blobs, BlobFiles(blobs)

    def plan(self, progress: Progress = lambda done: None) -> Plan:
        """Compare all names. `progress` is told how many objects were seen."""
        there = self._blobs.get_small(KEY)
        plan = Plan(there is not None and is_older(self._catalogue.generation(), decoded(there.data)))
        if plan.is_behind:
            plan.abandoned = self._abandoned()
        seen: set[str] = set()
        listed = self._blobs.list()
        while page := list(islice(listed, _PAGE)):
            named = {stored.key: attempt_of(stored.key) for stored in page if not is_own(stored.key)}
            ours = [one for one in named.values() if one is not None]
            seen.update(attempt for _, attempt in ours)
            known = self._catalogue.known_attempts([attempt for _, attempt in ours], [key for key, _ in ours])
            for stored in page:
                one = named.get(stored.key)
                if one is None:
                    plan.foreign += [stored.key] if stored.key in named else []
                elif one[1] in known - plan.abandoned:
                    plan.known += 1
                else:
                    plan.unknown.setdefault(one[0], []).append(one[1])
                    plan.nbytes += stored.nbytes
            progress(len(seen))
        for record in scan(self._catalogue):
            if record.state is not State.COMMITTED:
                continue
            if record.attempt in seen or self._blobs.checksum(object_path(record).as_posix()) is not None:
                plan.same += 1
            else:
                plan.lost.append(record)
        plan.known -= min(plan.known, plan.same)
        return plan

    def _abandoned(self) -> set[str]:
        before = self._catalogue.open_attempts()
        if not before:
            return set()
        time.sleep(_RENEWED_S)
        after = self._catalogue.open_attempts()
        return {name for name, one in before.items() if after.get(name) == one}

    def carry_out(self, plan: Plan, progress: Progress = lambda done: None) -> Outcome:
        """`progress` is told how many of the plan's objects were looked at."""
        outcome = Outcome()
        lost = {record.attempt for record in plan.lost}
        with ThreadPoolExecutor(_READERS, thread_name_prefix="rebuild") as threads:
            unknown = iter(plan.unknown.items())
            while page := list(islice(unknown, _PAGE)):
                for added, left in threads.map(lambda one: self._decide(one[0], one[1], plan, lost), page):
                    outcome.added += added
                    outcome.left += left
                progress(outcome.added + len(outcome.left))
        if plan.is_behind:
            for record in plan.lost:
                outcome.dropped += self._catalogue.drop_lost(record).result()
            self._let_go(plan)
            self._lift()
        return outcome

    def _let_go(self, plan: Plan) -> None:
        """What a dump has as arriving, and is no sample now: its object may have been acknowledged, so nobody removes it.

        One without an object is left to the leader.
        """
        of = {name: key for key, attempts in plan.unknown.items() for name in attempts if name in plan.abandoned}
        self._catalogue.let_go(sorted(of)).result()
        for key in of.values():
            self._catalogue.fail_abandoned(key).result()

    def _decide(self, key: SampleKey, attempts: list[str], plan: Plan, lost: set[str]) -> tuple[int, list[tuple[str, str]]]:
        """Of the objects under one id, the one that was committed last is the sample."""
        left, found = [], []
        for attempt in attempts:
            name = object_key(key, attempt)
            try:
                record = self._read(name)
                if record.key != key:
                    raise Damaged(f"its header says that it is sample {record.key}")
                found.append(replace(record, attempt=attempt))
            except FileNotFoundError:
                continue
            except Damaged as error:
                left.append((name, str(error)))
        added = 0
        for record in sorted(found, key=lambda one: one.committed_unix_ns, reverse=True):
            if not added and self._is_taken(record, plan, lost):
                added = 1
            else:
                left.append((object_key(key, record.attempt), f"another sample has the id {key}"))
        return added, left

    def _is_taken(self, record: SampleRecord, plan: Plan, lost: set[str]) -> bool:
        there = self._catalogue.get_settled(record.key)
        over = there.attempt if there is not None and there.state is State.COMMITTED else None
        if over is not None and over not in lost:
            assert there is not None, "it has an attempt"
            # Both are whole, so the earlier one was deleted after the dump.
            if not plan.is_behind or record.committed_unix_ns <= there.committed_unix_ns:
                return False
        return self._catalogue.take_over(record, over).result()

    def _read(self, name: str) -> SampleRecord:
        """Raises Damaged and FileNotFoundError."""
        try:
            return sample_file_at(self._objects, Path(name)).record()
        except UnsupportedFormat:
            return unsupported_record_at(self._objects, Path(name))

    def _lift(self) -> None:
        """The catalogue knows all that the bucket holds."""
        there = self._blobs.get_small(KEY)
        mine = self._catalogue.generation()
        said = None if there is None else decoded(there.data)
        following = Generation(mine.catalogue, max(mine.number, 0 if said is None else said.number) + 1)
        self._catalogue.set_generation(following.number)
        if not self._blobs.swap(KEY, encoded(following), "" if there is None else there.tag):
            raise IoError("somebody else compared the catalogue with the bucket meanwhile: look again")
        _log.info("the catalogue was compared with the bucket: generation %d", following.number)
