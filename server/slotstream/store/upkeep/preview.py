"""What rules would delete, without deleting: the sweeps that delete, over a store on which a deletion only takes notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slotstream.store.catalogue.base import Questions
from slotstream.store.catalogue.queries import Candidate, Queue, Usage
from slotstream.store.records import SampleKey
from slotstream.store.upkeep.retention import Policy, Reason
from slotstream.store.upkeep.sweeping import Sweeper

_PAGE = 1000
_BITS = 12  # Rows that were deleted are noted in masks of so many bits: a table of any size costs little.
_UNLIMITED = 1 << 62


class Imagined:
    """A store as a sweep sees it. What a sweep deletes here is gone for that sweep alone. For one thread."""

    def __init__(self, catalogue: Questions, now_unix_ns: int, doubt: str = "") -> None:
        """`doubt`: why the clock is in doubt, "" where it is not."""
        self._catalogue = catalogue
        self._now, self._doubt = now_unix_ns, doubt
        self._gone: dict[int, int] = {}
        self._gone_of: dict[str, Counter[str]] = {}
        self._stamps_gone: dict[str, list[int]] = {}  # Only asked for while the clock is in doubt.
        self.bytes_gone = 0

    def now(self) -> int:
        return self._now

    def doubt(self) -> str:
        return self._doubt

    def finish_deletions(self) -> None:
        """Of deletions that the disk refused earlier: no rule's."""

    def usage(self, namespace: str) -> Usage:
        return self._without_gone(self._catalogue.usage(namespace))

    def every_usage(self) -> Iterator[Usage]:
        after = ""
        while page := self._catalogue.usages(after, _PAGE):
            yield from map(self._without_gone, page)
            after = page[-1].namespace

    def candidates(self, queue: Queue, namespace: str, after: tuple[int, int], limit: int) -> list[Candidate]:
        while True:
            page = self._catalogue.candidates(queue, namespace, after, limit)
            left = [candidate for candidate in page if not self._is_gone(candidate)]
            if left or not page:
                return left
            after = page[-1].position

    def committed_until(self, namespace: str, until_unix_ns: int) -> int:
        found = self._catalogue.committed_until(namespace, until_unix_ns)
        return found - sum(stamp <= until_unix_ns for stamp in self._stamps_gone.get(namespace, ()))

    def delete_unused(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        deleted = [candidate for candidate in candidates if not self._is_used(candidate.key)]
        for candidate in deleted:
            number = candidate.position[1]
            self._gone[number >> _BITS] = self._gone.get(number >> _BITS, 0) | 1 << (number & (1 << _BITS) - 1)
            kind = "samples" if candidate.file_bytes else "failed"  # A committed sample has a file.
            self._gone_of.setdefault(candidate.key.namespace, Counter()).update({kind: 1, "bytes": candidate.file_bytes})
            if self._doubt:
                self._stamps_gone.setdefault(candidate.key.namespace, []).append(candidate.stamp_unix_ns)
            self.bytes_gone += candidate.file_bytes
        return deleted

    def _is_used(self, key: SampleKey) -> bool:
        return self._catalogue.is_held(key) or self._catalogue.standing(key).leased_until_unix_ns > self._now

    def _is_gone(self, candidate: Candidate) -> bool:
        number = candidate.position[1]
        return bool(self._gone.get(number >> _BITS, 0) >> (number & (1 << _BITS) - 1) & 1)

    def _without_gone(self, usage: Usage) -> Usage:
        gone = self._gone_of.get(usage.namespace, Counter())
        left = (usage.samples - gone["samples"], usage.bytes - gone["bytes"], usage.failed - gone["failed"])
        return Usage(usage.namespace, *left)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one key of a namespace's rule would delete. `stored`: the namespace's committed samples."""

    namespace: str
    key: str  # As in a rules file.
    samples: int
    bytes: int
    stored: int

    @property
    def of_failed(self) -> bool:
        """Whether these are samples that had failed, and have no file."""
        return self.key == "failed_age_s_max"


@dataclass(frozen=True, slots=True)
class Preview:
    """What a policy would delete now, by namespace and key; and where nothing goes by age, because the clock is in doubt."""

    forecasts: tuple[Forecast, ...]
    age_held: frozenset[str]

    def emptied(self) -> frozenset[str]:
        """Namespaces that would lose more than half of their committed samples."""
        lost: Counter[str] = Counter()
        stored: dict[str, int] = {}
        for one in self.forecasts:
            lost[one.namespace] += 0 if one.of_failed else one.samples
            stored[one.namespace] = one.stored
        return frozenset(name for name, count in lost.items() if 2 * count > stored[name])


def preview(store: Imagined, policy: Policy, free_bytes: Callable[[], int]) -> Preview:
    """What a sweep by `policy` would delete. Raises what asking the catalogue raises."""
    stored = {usage.namespace: usage.samples for usage in store.every_usage()}
    sweeper = Sweeper(store, policy, lambda: free_bytes() + store.bytes_gone, budget=_UNLIMITED)
    swept, room = sweeper.sweep(), sweeper.make_room()
    samples, nbytes = swept.samples_of + room.samples_of, swept.bytes_of + room.bytes_of
    return Preview(
        tuple(
            Forecast(namespace, key_of(reason, policy, namespace), count, nbytes[namespace, reason], stored.get(namespace, 0))
            for (namespace, reason), count in sorted(samples.items())
        ),
        frozenset(swept.held),
    )


def key_of(reason: Reason, policy: Policy, namespace: str) -> str:
    """The key of a rules file by which samples of a namespace go for this reason."""
    if reason is Reason.FREE_SPACE and not policy.rule_for(namespace).delete_when_full:
        return "delete_read_when_full"
    return {
        Reason.AGE: "age_s_max",
        Reason.BYTES: "bytes_max",
        Reason.SAMPLES: "samples_max",
        Reason.READS: "delete_after_reads",
        Reason.ACK: "delete_on_ack",
        Reason.FREE_SPACE: "delete_when_full",
        Reason.FAILED_AGE: "failed_age_s_max",
    }[reason]
