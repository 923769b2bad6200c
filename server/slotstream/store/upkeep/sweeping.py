"""Carries retention out: looks for samples that the rules let go, a page at a time along an index, and deletes them.

A sweep costs as much as it deletes, and a few index look-ups a namespace, for any number of samples. What is being read
or leased is passed over; it goes in a later sweep.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from slotstream.store.catalogue.queries import Candidate, Queue, Usage
from slotstream.store.upkeep.retention import (
    FAILED_AGE_S_MAX,
    UNLIMITED,
    Policy,
    Reason,
    Rule,
    forgotten,
    over_limit,
    stays,
    to_free,
)

_log = logging.getLogger(__name__)
_PAGE = 64  # Candidates looked at, and deleted, at a time: the length of the catalogue's transaction.
_BUDGET = 1024  # Samples deleted before a sweep lets its caller look around; how many are in use has limits of its own.
REFUSED_AGE_S_MAX = 7 * 86400.0  # Whatever the rules say: a refusal is news, and not for long.
_BEGIN = (-(1 << 62), -1)


class Stock(Protocol):
    """What a sweep asks of a store, and does to it: `Lifetimes`, or `Imagined`, which deletes nothing."""

    def now(self) -> int:
        """The wall clock, in Unix ns."""

    def doubt(self) -> str:
        """Why the clock is in doubt, in a sentence; "" where it is not."""

    def usage(self, namespace: str) -> Usage: ...

    def every_usage(self) -> Iterator[Usage]: ...

    def candidates(self, queue: Queue, namespace: str, after: tuple[int, int], limit: int) -> list[Candidate]: ...

    def committed_until(self, namespace: str, until_unix_ns: int) -> int: ...

    def finish_deletions(self) -> None: ...

    def delete_unused(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Remove those that nobody reads, leases or has replaced; which they were."""


@dataclass(slots=True)
class Swept:
    """What a sweep did. `unfinished`: it stopped at its budget; the caller should call again. `still_short`: room is still
    missing, and nothing more may be deleted for that.
    """

    samples: Counter[Reason] = field(default_factory=Counter)
    bytes: Counter[Reason] = field(default_factory=Counter)
    samples_of: Counter[tuple[str, Reason]] = field(default_factory=Counter)  # By namespace too.
    bytes_of: Counter[tuple[str, Reason]] = field(default_factory=Counter)
    unfinished: bool = False
    still_short: bool = False
    held: set[str] = field(default_factory=set)  # Namespaces in which nothing went by age, because the clock is in doubt.


class Sweeper:
    """Sweeps one store by one policy. Not thread safe: one thread sweeps."""

    def __init__(self, stock: Stock, policy: Policy, free_bytes: Callable[[], int], *, budget: int = 0) -> None:
        """`budget`: samples after whose deletion a sweep stops, 0: as many as usual. `policy` may be replaced between two."""
        self._stock = stock
        self.policy = policy
        self._free_bytes = free_bytes
        self._budget = budget
        self._passed: dict[str, tuple[int, int]] = {}  # By namespace, where those of its first failed samples end that stay,
        self._passed_by = policy  # by this policy.

    def sweep(self, namespaces: Iterable[str] | None = None) -> Swept:
        """Apply the rules to these namespaces, None: to all. Raises StoreFull, StoreGone, IoError and InternalFault."""
        sweep = self._begin()
        if namespaces is None:
            self._stock.finish_deletions()
            for usage in self._stock.every_usage():
                sweep.apply(usage)
        else:
            for namespace in namespaces:
                sweep.apply(self._stock.usage(namespace))
        return sweep.done

    def _begin(self) -> _Sweep:
        if self._passed_by is not self.policy:
            self._passed, self._passed_by = {}, self.policy
        return _Sweep(self._stock, self.policy, self._budget or _BUDGET, self._passed)

    def make_room(self) -> Swept:
        """While less is free than the policy's target, delete the oldest samples that may go for that. Raises as `sweep`."""
        sweep = self._begin()
        if self.policy.deletes_when_full:
            missing = self.policy.free_bytes_target - self._room()
            if missing > 0:
                sweep.free(missing)
        return sweep.done

    def _room(self) -> int:
        """Bytes that are free: of the disk, or of what the bucket may hold."""
        if not self.policy.bucket_bytes_max:
            return self._free_bytes()
        return self.policy.bucket_bytes_max - sum(usage.bytes for usage in self._stock.every_usage())


class _Sweep:
    """One sweep under way."""

    def __init__(self, stock: Stock, policy: Policy, budget: int, passed: dict[str, tuple[int, int]]) -> None:
        self._stock = stock
        self._policy = policy
        self._budget = budget
        self._passed = passed
        # The whole sweep goes by one look at the clock, from before it was judged: it may leap at any moment.
        self._now = stock.now()
        self._clock_trouble = stock.doubt()
        self.done = Swept()

    def apply(self, usage: Usage) -> None:
        """The rule of one namespace."""
        rule = self._policy.rule_for(usage.namespace)
        if usage.failed:
            age_s_max = FAILED_AGE_S_MAX if rule.failed_age_s_max is None else rule.failed_age_s_max
            refused = replace(rule, failed_age_s_max=min(age_s_max, REFUSED_AGE_S_MAX))
            self._forget(Queue.REFUSED, refused, usage.namespace, _BEGIN)
            after = self._passed.get(usage.namespace, _BEGIN) if rule.failed_age_s_max is None else _BEGIN
            self._passed[usage.namespace] = self._forget(Queue.FAILED, rule, usage.namespace, after)
        if not rule.limits():
            return
        if usage.samples:
            if rule.delete_on_ack:
                self._drain(Queue.ACKED, usage.namespace, _BEGIN, Reason.ACK)
            if rule.delete_after_reads != UNLIMITED:
                first = (int(rule.delete_after_reads), -1)
                self._drain(Queue.READ, usage.namespace, first, Reason.READS)
            if min(rule.bytes_max, rule.samples_max, rule.age_s_max) != UNLIMITED:
                self._trim(self._without_doubt(rule, usage), usage.namespace)

    def free(self, nbytes: int) -> None:
        """The oldest samples, of all namespaces whose rule allows it together, until `nbytes` of files are gone."""
        queues = [
            self._queue(queue, usage.namespace)
            for usage in self._stock.every_usage()
            if usage.samples and (queue := _to_make_room(self._policy.rule_for(usage.namespace))) is not None
        ]
        oldest = heapq.merge(*queues, key=lambda candidate: candidate.stamp_unix_ns)
        while nbytes > 0 and not self._is_spent():
            page = to_free(nbytes, _first(oldest, _PAGE))
            if not page:
                self.done.still_short = True
                return
            nbytes -= sum(candidate.file_bytes for candidate in self._delete(page, [Reason.FREE_SPACE] * len(page)))

    def _drain(self, queue: Queue, namespace: str, after: tuple[int, int], reason: Reason) -> None:
        """Everything in a queue from `after` on."""
        while not self._is_spent():
            page = self._stock.candidates(queue, namespace, after, _PAGE)
            if not page:
                return
            self._delete(page, [reason] * len(page))
            after = page[-1].position

    def _without_doubt(self, rule: Rule, usage: Usage) -> Rule:
        """`rule`; without its age while the clock is in doubt and says that more than half of the samples are too old."""
        if rule.age_s_max == UNLIMITED or not self._clock_trouble:
            return rule
        until = self._now - round(rule.age_s_max * 1e9)
        if 2 * self._stock.committed_until(usage.namespace, until) <= usage.samples:
            return rule
        self.done.held.add(usage.namespace)
        return replace(rule, age_s_max=UNLIMITED)

    def _trim(self, rule: Rule, namespace: str) -> None:
        after = _BEGIN
        while not self._is_spent():
            # Read again for each page: what was in use still counts, so younger samples go in its place.
            usage = self._stock.usage(namespace)
            page = self._stock.candidates(Queue.OLDEST, namespace, after, _PAGE)
            due = over_limit(rule, usage, page, self._now)
            if not due:
                return
            self._delete([candidate for candidate, _ in due], [reason for _, reason in due])
            after = due[-1][0].position

    def _forget(self, queue: Queue, rule: Rule, namespace: str, after: tuple[int, int]) -> tuple[int, int]:
        """Failed samples behind `after` that are old enough; up to where only such are left that stay."""
        passed = after
        while not self._is_spent():
            page = self._stock.candidates(queue, namespace, after, _PAGE)
            due = forgotten(rule, page, self._now)
            if not due:
                break
            going = [candidate for candidate in due if not stays(rule, candidate)]
            gone = {candidate.key for candidate in self._delete(going, [Reason.FAILED_AGE] * len(going))}
            if passed == after and gone.issuperset(candidate.key for candidate in going):
                passed = due[-1].position
            after = due[-1].position
        return passed

    def _queue(self, queue: Queue, namespace: str) -> Iterator[Candidate]:
        after = _BEGIN
        while page := self._stock.candidates(queue, namespace, after, _PAGE):
            yield from page
            after = page[-1].position

    def _delete(self, page: Sequence[Candidate], reasons: Sequence[Reason]) -> list[Candidate]:
        deleted = self._stock.delete_unused(page)
        why = dict(zip((candidate.key for candidate in page), reasons, strict=True))
        for candidate in deleted:
            self.done.samples[why[candidate.key]] += 1
            self.done.bytes[why[candidate.key]] += candidate.file_bytes
            self.done.samples_of[candidate.key.namespace, why[candidate.key]] += 1
            self.done.bytes_of[candidate.key.namespace, why[candidate.key]] += candidate.file_bytes
            _log.debug("deleted %s: %s", candidate.key, why[candidate.key])
        self._budget -= len(deleted)
        return deleted

    def _is_spent(self) -> bool:
        if self._budget <= 0:
            self.done.unfinished = True
        return self._budget <= 0


def _to_make_room(rule: Rule) -> Queue | None:
    """Which samples a rule lets go when room is missing."""
    if rule.delete_when_full:
        return Queue.OLDEST
    return Queue.OLDEST_READ if rule.delete_read_when_full else None


def _first(candidates: Iterator[Candidate], count: int) -> Iterator[Candidate]:
    for _ in range(count):
        candidate = next(candidates, None)
        if candidate is None:
            return
        yield candidate
