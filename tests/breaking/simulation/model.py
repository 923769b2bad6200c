"""What clients saw, and whether it can be: each id is a register, from which rules may delete."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import inf

from register import NONE, Operation, deleted_under_a_lease, explain

from slotstream.store.records import SampleKey
from slotstream.store.upkeep.retention import Policy, Rule

KEPT, ACKED, TRIMMED = "default", "acked", "trimmed"
POLICY = Policy(
    namespaces={
        ACKED: Rule(delete_on_ack=True, failed_age_s_max=20.0),
        TRIMMED: Rule(samples_max=2, age_s_max=40.0),
    }
)


@dataclass(frozen=True)
class Lease:
    granted_at: float
    ends_at: float


class Model:
    """Of one seed. Times are the simulation's."""

    def __init__(self) -> None:
        self.histories: defaultdict[SampleKey, list[Operation]] = defaultdict(list)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self._leases: defaultdict[SampleKey, list[Lease]] = defaultdict(list)
        self._lives_ended_at: list[float] = []
        self._leases_doubted_at: list[float] = []
        self.catalogues_lost_at: list[float] = []
        self._deletions: defaultdict[SampleKey, int] = defaultdict(int)  # That are under way, or were never answered.
        self._deleted_at: defaultdict[SampleKey, float] = defaultdict(float)

    def deletes(self, key: SampleKey) -> None:
        """A client asks for it. Until it is answered, and where it never is, the sample may go at any time."""
        self._deletions[key] += 1

    def may_be_gone(self, key: SampleKey, since: float) -> bool:
        """Whether somebody, or a rule, may have removed all that is known of an id since then."""
        return key.namespace != KEPT or self._deletions[key] > 0 or self._deleted_at[key] >= since

    def note(self, key: SampleKey, operation: Operation) -> None:
        """A client's operation on an id, and how it was answered."""
        self.histories[key].append(operation)
        self.counts[f"{operation.kind} {operation.answer}"] += 1
        if operation.kind == "delete" and operation.answer != "unknown":
            self._deletions[key] -= 1
            self._deleted_at[key] = operation.returned_at
        if operation.kind == "put" and operation.answer in ("committed", "unknown") and key.namespace == TRIMMED:
            self._may_go(key, operation.called_at)

    def acked(self, key: SampleKey, called_at: float) -> None:
        """A client said that it is done with a sample, whether or not it was heard."""
        if key.namespace == ACKED:
            self._may_go(key, called_at)

    def _may_go(self, key: SampleKey, since: float) -> None:
        self.histories[key].append(Operation(-1, "delete", "unknown", since, inf))

    def leased(self, key: SampleKey, granted_at: float, ends_at: float) -> None:
        self._leases[key].append(Lease(granted_at, ends_at))

    def leases_in_doubt(self, at: float) -> None:
        """The clock leapt, or the catalogue lost its last seconds: leases of before may be over."""
        self._leases_doubted_at.append(at)

    def died(self, at: float) -> None:
        """The server was killed: what it had not done by then, it never does."""
        self._lives_ended_at.append(at)

    def lost_catalogue(self, at: float) -> None:
        """With it goes what it said of files that must be removed: of deletions that nobody was told are done, and of commits
        that failed where the disk refused to remove the file."""
        self.catalogues_lost_at.append(at)

    def _undone(self, history: list[Operation]) -> list[Operation]:
        """What a start may bring back whose catalogue is gone."""
        begun_at = min((one.called_at for one in history if (one.kind, one.answer) == ("delete", "unknown")), default=inf)
        puts = [one for one in history if one.kind == "put"]
        deleted = {one.value for one in puts if one.answer in ("committed", "unknown")}
        found = []
        for at in self.catalogues_lost_at:
            values = {one.value for one in puts if one.answer == "failed" and one.called_at < at}
            if begun_at < at:
                values |= deleted
            # Just before that life ends: by then, or never.
            found += [Operation(0, "put", "unknown", at - 1e-9, inf, value) for value in sorted(values)]
        return found

    def wrong(self) -> list[str]:
        """What cannot be."""
        found = []
        for key, history in self.histories.items():
            history += self._undone(history)
            history.sort(key=lambda one: one.called_at)
            if not explain(history, self._lives_ended_at):
                found.append(f"{key}: no order explains\n" + "\n".join(f"    {one}" for one in history))
            leases = [(one.granted_at, self._end_of(one)) for one in self._leases[key]]
            for one, lease in deleted_under_a_lease(history, leases):
                found.append(f"{key}: {one} was done although a lease held: {lease}")
            for one in history:
                for granted_at, ends_at in leases:
                    is_gone = (one.kind, one.answer, one.value) == ("read", "is", NONE)
                    if is_gone and granted_at < one.called_at and one.returned_at < ends_at:
                        found.append(f"{key}: {one} although a lease held from {granted_at} to {ends_at}")
        return found

    def _end_of(self, lease: Lease) -> float:
        return min([lease.ends_at, *(at for at in self._leases_doubted_at if at >= lease.granted_at)])
