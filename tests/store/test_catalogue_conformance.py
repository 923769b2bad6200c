"""What every catalogue does with attempts, deletions and readers. A line of `CATALOGUES` (catalogues.py) an implementation."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from store.catalogues import RECORDS, HandClock, S, arriving, committed

from slotstream.store.catalogue.base import Catalogue
from slotstream.store.catalogue.queries import Candidate, Queue, Standing, Usage
from slotstream.store.records import SampleKey, SampleRecord, State
from slotstream.wire.errors import SampleNotFound, StoreFull

BEGIN = (-(1 << 62), -1)


def _state(catalogue: Catalogue, record: SampleRecord) -> State | None:
    found = catalogue.get_settled(record.key)
    return found.state if found is not None else None


# Attempts.


def test_a_sample_arrives_and_is_committed(empty: Catalogue) -> None:
    assert empty.get(arriving().key) is None
    assert empty.begin(arriving()).result() is True
    found = empty.get(arriving().key)
    assert found is not None
    assert (found.state, found.dtype, found.tags) == (State.ARRIVING, "BF16", {"split": "train"})
    empty.commit(committed()).result()
    assert empty.get(committed().key) == committed()


def test_a_second_upload_does_not_hide_what_is_there(empty: Catalogue) -> None:
    empty.begin(arriving(created=10)).result()
    assert empty.begin(arriving(created=20)).result() is False
    assert empty.get_settled(arriving().key).created_unix_ns == 10  # type: ignore[union-attr]
    empty.commit(committed()).result()
    assert empty.begin(arriving(created=30)).result() is False
    assert empty.get(committed().key) == committed()


def test_a_failed_sample_may_arrive_again(empty: Catalogue) -> None:
    empty.begin(arriving()).result()
    assert empty.fail(arriving(), "ABORTED", "no").result() is True
    failed = empty.get(arriving().key)
    assert failed is not None
    assert (failed.state, failed.error_code, failed.error_message) == (State.FAILED, "ABORTED", "no")
    assert empty.begin(arriving(created=20)).result() is True
    assert _state(empty, arriving()) is State.ARRIVING


def test_a_failure_keeps_what_was_known_of_the_sample(empty: Catalogue) -> None:
    empty.begin(arriving(created=10)).result()
    empty.fail(SampleRecord.refused(arriving().key, "other", 20), "TOO_LARGE", "why").result()
    found = empty.get(arriving().key)
    assert found is not None
    assert (found.model, found.created_unix_ns, found.dtype) == ("m", 10, "BF16")


def test_a_sample_may_fail_that_never_arrived(empty: Catalogue) -> None:
    assert empty.fail(SampleRecord.refused(arriving().key, "m", 20), "STORE_FULL", "why").result() is True
    assert _state(empty, arriving()) is State.FAILED


def test_no_failure_takes_a_committed_sample_away(empty: Catalogue) -> None:
    empty.commit(committed()).result()
    assert empty.fail(arriving(), "ABORTED", "no").result() is False
    assert empty.get(committed().key) == committed()
    assert empty.mark_deleting(committed()) == 0
    assert empty.fail(arriving(), "ABORTED", "no").result() is False
    assert _state(empty, committed()) is State.DELETING


def test_what_was_forgotten_never_arrived(empty: Catalogue) -> None:
    empty.begin(arriving()).result()
    assert empty.forget(arriving().key).result() is True
    assert empty.get(arriving().key) is None
    assert empty.forget(arriving().key).result() is False
    empty.commit(committed()).result()
    assert empty.forget(committed().key).result() is False
    assert empty.get(committed().key) == committed()


def test_operations_of_one_thread_are_done_in_their_order(empty: Catalogue) -> None:
    for number in range(50):
        empty.begin(arriving(f"s{number}"))
        empty.commit(committed(f"s{number}"))
        last = empty.fail(arriving(f"s{number}"), "ABORTED", "no")
    assert last.result() is False
    assert empty.totals()[State.COMMITTED] == (50, 5000)


def test_of_a_commit_and_a_failure_at_once_the_commit_stays(empty: Catalogue) -> None:
    """In either order: who is told Committed finds the sample."""
    with ThreadPoolExecutor(8) as threads:
        for number in range(40):
            name = f"s{number}"
            empty.begin(arriving(name)).result()
            together = threading.Barrier(2)

            def commit(name: str = name, together: threading.Barrier = together) -> None:
                together.wait()
                empty.commit(committed(name)).result()

            def fail(name: str = name, together: threading.Barrier = together) -> None:
                together.wait()
                empty.fail(arriving(name), "ABORTED", "no").result()

            for end in (threads.submit(commit), threads.submit(fail)):
                end.result()
            assert empty.get(committed(name).key) == committed(name)


def test_damage_and_what_becomes_of_it(empty: Catalogue) -> None:
    empty.commit(committed()).result()
    empty.put_damaged(committed(), "gone").result()
    found = empty.get(committed().key)
    assert found is not None
    assert (found.state, found.error_code, found.error_message) == (State.FAILED, "DAMAGED", "gone")
    empty.adopt(committed()).result()
    assert empty.get(committed().key) == committed()
    empty.put_deleting(committed()).result()
    assert _state(empty, committed()) is State.DELETING


# Deletion.


def test_a_deletion_hides_the_sample_and_then_forgets_it(empty: Catalogue) -> None:
    empty.commit(committed()).result()
    assert empty.mark_deleting(committed()) == 0
    assert [record.state for record in empty.unfinished()] == [State.DELETING]
    empty.drop_deleting([committed().key])
    assert empty.get(committed().key) is None
    assert empty.unfinished() == []


def test_a_deletion_is_of_the_sample_that_was_seen(empty: Catalogue) -> None:
    with pytest.raises(SampleNotFound):
        empty.mark_deleting(committed())
    empty.commit(committed(created=20)).result()
    with pytest.raises(SampleNotFound):
        empty.mark_deleting(committed(created=10))
    assert _state(empty, committed()) is State.COMMITTED


def test_a_lease_ends_before_its_sample_is_deleted(empty: Catalogue, clock: HandClock) -> None:
    empty.commit(committed()).result()
    until = empty.lease(committed().key, "me", 60.0, 10, 10)
    assert until == clock.now + 60 * S
    assert empty.mark_deleting(committed()) == until
    assert _state(empty, committed()) is State.COMMITTED
    clock.now = until
    assert empty.mark_deleting(committed()) == 0


def test_a_sample_that_was_committed_again_is_not_dropped(empty: Catalogue) -> None:
    empty.commit(committed(created=10)).result()
    empty.mark_deleting(committed(created=10))
    empty.commit(committed(created=20)).result()
    empty.drop_deleting([committed().key])
    assert empty.get(committed().key) == committed(created=20)


def test_many_rows_are_answered_in_the_order_asked(empty: Catalogue) -> None:
    for record in RECORDS[:20]:
        empty.commit(replace(record, state=State.COMMITTED)).result()
    empty.begin(arriving("arrives")).result()
    keys = [record.key for record in RECORDS[:20][::-1]]
    keys[3:3] = [SampleKey("n0", "nobody"), arriving("arrives").key, keys[0], SampleKey("nowhere", keys[0].sample_id)]
    found = empty.get_many(keys)
    assert found == [empty.get(key) for key in keys]
    assert [record is None for record in found].count(True) == 2
    assert empty.get_many([]) == []


def test_rules_take_only_what_nobody_uses(empty: Catalogue) -> None:
    names = ["free", "held", "leased", "replaced", "gone"]
    for name in names:
        empty.commit(committed(name)).result()
    chosen = empty.candidates(Queue.OLDEST, "n", BEGIN, 10)
    assert [candidate.key.sample_id for candidate in chosen] == names
    hold = empty.hold_read(SampleKey("n", "held"))
    assert empty.is_held(SampleKey("n", "held"))
    empty.lease(SampleKey("n", "leased"), "me", 60.0, 10, 10)
    empty.commit(committed("replaced", created=20)).result()
    empty.mark_deleting(committed("gone"))
    empty.drop_deleting([SampleKey("n", "gone")])
    assert [candidate.key.sample_id for candidate in empty.mark_unused(chosen)] == ["free"]
    hold.end()
    hold.end()
    assert not empty.is_held(SampleKey("n", "held"))
    assert [candidate.key.sample_id for candidate in empty.mark_unused(chosen)] == ["held"]
    empty.end_leases(SampleKey("n", "leased"), None)
    assert [candidate.key.sample_id for candidate in empty.mark_unused(chosen)] == ["leased"]


def _queue(catalogue: Catalogue, queue: Queue, namespace: str = "n", page: int = 2) -> list[Candidate]:
    found: list[Candidate] = []
    after = BEGIN
    while candidates := catalogue.candidates(queue, namespace, after, page):
        found += candidates
        after = candidates[-1].position
    return found


def test_queues_of_candidates(empty: Catalogue, clock: HandClock) -> None:
    for number, name in enumerate(["a", "b", "c", "d", "e"]):
        empty.commit(committed(name, created=100 - number, nbytes=number)).result()
    empty.commit(committed("elsewhere", namespace="o")).result()
    for name, reads in (("a", 3), ("b", 1), ("c", 1)):
        empty.count_reads([(SampleKey("n", name), committed(name, created=100 - "abc".index(name)).committed_unix_ns)] * reads)
    for name in ("d", "b"):
        assert empty.ack(SampleKey("n", name))
        clock.now += 1
    for name, created in (("f", 40), ("g", 30)):
        empty.fail(arriving(name, created=created), "ABORTED", "no").result()
    empty.fail(SampleRecord.refused(SampleKey("n", "h"), "m", 35), "STORE_FULL", "no").result()

    def names(queue: Queue) -> list[str]:
        return [candidate.key.sample_id for candidate in _queue(empty, queue)]

    assert names(Queue.OLDEST) == ["e", "d", "c", "b", "a"]
    assert names(Queue.OLDEST_READ) == ["d", "c", "b", "a"]
    assert names(Queue.READ) == ["b", "c", "a"]
    assert names(Queue.ACKED) == ["d", "b"]
    assert names(Queue.FAILED) == ["g", "h", "f"]
    assert names(Queue.REFUSED) == ["h"]
    first = _queue(empty, Queue.OLDEST)[0]
    assert (first.stamp_unix_ns, first.file_bytes, first.error_code) == (96 + 5, 4, "")
    assert _queue(empty, Queue.FAILED)[0].error_code == "ABORTED"
    begun = empty.candidates(Queue.READ, "n", (2, -1), 10)
    assert [candidate.key.sample_id for candidate in begun] == ["a"], "(n, -1) stands before all whose column is n"


def test_counts_by_namespace_and_state(catalogue: Catalogue) -> None:
    def counted(namespace: str) -> Usage:
        rows = [record for record in RECORDS if record.namespace == namespace]
        committed = [record for record in rows if record.state is State.COMMITTED]
        return Usage(namespace, len(committed), sum(r.file_bytes for r in committed), len(rows) - len(committed))

    wanted = [counted(f"n{number}") for number in range(3)]
    assert [catalogue.usage(usage.namespace) for usage in wanted] == wanted
    assert catalogue.usage("none") == Usage("none")
    assert catalogue.usages("", 2) + catalogue.usages("n1", 2) == wanted
    assert catalogue.totals()[State.COMMITTED] == (54, sum(usage.bytes for usage in wanted))
    assert catalogue.totals()[State.FAILED][0] == 6
    assert catalogue.committed_until("n0", 1_999) == 0
    assert catalogue.committed_until("n0", 2_000) == wanted[0].samples


# Readers.


def test_reads_count_for_the_sample_that_was_read(empty: Catalogue) -> None:
    empty.commit(committed()).result()
    other = (committed().key, 1)
    empty.count_reads([(committed().key, 15), (committed().key, 15), other, (SampleKey("n", "none"), 15)]).result()
    assert empty.standing(committed().key) == Standing(reads=2)
    empty.commit(committed(created=20)).result()
    assert empty.standing(committed().key) == Standing(), "nobody has read the sample that took its place"


def test_the_first_ack_stays(empty: Catalogue, clock: HandClock) -> None:
    assert empty.ack(committed().key) is False
    empty.begin(arriving()).result()
    assert empty.ack(committed().key) is False
    empty.commit(committed()).result()
    at = clock.now
    assert empty.ack(committed().key) is True
    clock.now += S
    assert empty.ack(committed().key) is True
    assert empty.standing(committed().key).acked_unix_ns == at


def test_leases_have_limits(empty: Catalogue, clock: HandClock) -> None:
    for name in ("a", "b", "c"):
        empty.commit(committed(name)).result()
    empty.commit(committed("a", namespace="o")).result()

    def lease(name: str, holder: str = "me", namespace: str = "n", seconds: float = 60.0) -> int:
        return empty.lease(SampleKey(namespace, name), holder, seconds, 3, 2)

    lease("a"), lease("b")
    lease("a", seconds=30.0)  # In place of its own.
    assert empty.standing(SampleKey("n", "a")).leased_until_unix_ns == clock.now + 30 * S
    with pytest.raises(StoreFull):
        lease("c")
    lease("a", namespace="o")
    with pytest.raises(StoreFull):
        lease("a", holder="you", namespace="o")
    clock.now += 30 * S  # One of them has ended.
    lease("a", holder="you", namespace="o")
    with pytest.raises(SampleNotFound):
        lease("none")


def test_leases_are_given_back_and_shortened(empty: Catalogue, clock: HandClock) -> None:
    key = committed().key
    with pytest.raises(SampleNotFound):
        empty.end_leases(key, "me")
    empty.commit(committed()).result()
    empty.lease(key, "me", 60.0, 10, 10)
    empty.lease(key, "you", 90.0, 10, 10)
    empty.end_leases(key, "you")
    assert empty.standing(key).leased_until_unix_ns == clock.now + 60 * S
    empty.shorten_leases(clock.now + 5 * S)
    assert empty.standing(key).leased_until_unix_ns == clock.now + 5 * S
    empty.end_leases(key, None)
    assert empty.standing(key).leased_until_unix_ns == 0


def test_no_lease_comes_between_a_deletions_look_and_its_mark(empty: Catalogue) -> None:
    """A sample is leased or on its way out, and never both."""
    with ThreadPoolExecutor(2) as threads:
        for number in range(40):
            record = committed(f"s{number}")
            empty.commit(record).result()
            together = threading.Barrier(2)

            def delete(record: SampleRecord = record, together: threading.Barrier = together) -> bool:
                together.wait()
                return empty.mark_deleting(record) == 0

            def lease(record: SampleRecord = record, together: threading.Barrier = together) -> bool:
                together.wait()
                try:
                    return empty.lease(record.key, "me", 60.0, 100, 100) > 0
                except SampleNotFound:
                    return False

            deleted, leased = threads.submit(delete), threads.submit(lease)
            assert deleted.result() is not leased.result()


# Several servers.


def test_who_leads_keeps_its_term(empty: Catalogue, clock: HandClock) -> None:
    term = empty.lead()
    assert term > 0
    assert empty.lead() == term
    for name in ("a", "b"):
        empty.commit(committed(name)).result()
    chosen = empty.candidates(Queue.OLDEST, "n", BEGIN, 10)
    assert empty.mark_unused(chosen, term) == chosen
    empty.drop_deleting([candidate.key for candidate in chosen], term)
    assert empty.get(committed("a").key) is None


def test_in_a_term_that_is_over_nothing_is_done(empty: Catalogue, clock: HandClock) -> None:
    other = empty.lead() + 1
    for name in ("a", "b", "c"):
        empty.commit(committed(name)).result()
    until = empty.lease(SampleKey("n", "a"), "me", 60.0, 10, 10)
    assert empty.mark_unused(empty.candidates(Queue.OLDEST, "n", BEGIN, 10), other) == []
    empty.shorten_leases(clock.now, other)
    assert empty.standing(SampleKey("n", "a")).leased_until_unix_ns == until
    empty.mark_deleting(committed("b"))
    empty.drop_deleting([SampleKey("n", "b")], other)
    assert _state(empty, committed("b")) is State.DELETING
    assert _state(empty, committed("c")) is State.COMMITTED


def test_who_watches_is_told_what_became_of_samples(empty: Catalogue) -> None:
    told: queue.SimpleQueue[SampleKey | None] = queue.SimpleQueue()
    empty.watch(told.put)

    def is_told(name: str) -> None:
        while told.get(timeout=30) != SampleKey("n", name):
            pass

    changes: list[tuple[str, Callable[[], object]]] = [
        ("a", lambda: empty.begin(arriving("a")).result()),
        ("a", lambda: empty.commit(committed("a")).result()),
        ("b", lambda: empty.fail(arriving("b"), "ABORTED", "no").result()),
        ("c", lambda: empty.begin(arriving("c")).result()),
        ("c", lambda: empty.forget(SampleKey("n", "c")).result()),
        ("d", lambda: empty.adopt(committed("d")).result()),
        ("d", lambda: empty.put_damaged(committed("d"), "gone").result()),
        ("a", lambda: empty.mark_deleting(committed("a"))),
        ("a", lambda: empty.drop_deleting([SampleKey("n", "a")])),
    ]
    for name, change in changes:
        change()
        is_told(name)
