"""Attempts in the catalogue: of a commit and an end one wins, what expired is found, and what was deleted leaves its object."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg
import pytest
from store.catalogues import HandClock, S, arriving, committed
from support.postgres import catalogue_url, set_by_hand

from slotstream.store.catalogue.attempts import EXPIRED_S, LATE_S, LIFE_S, REMOVED_AFTER_S, Attempt
from slotstream.store.catalogue.postgres.catalogue import PostgresCatalogue
from slotstream.store.catalogue.queries import Queue
from slotstream.store.records import SampleRecord, State
from slotstream.store.shared_state import AttemptCounts
from slotstream.wire.errors import Interrupted

pytestmark = pytest.mark.postgres


@pytest.fixture
def url() -> str:
    return catalogue_url()


@pytest.fixture
def clock(url: str) -> HandClock:
    clock = HandClock()
    clock.tell(set_by_hand(url, clock.now))
    return clock


@pytest.fixture
def catalogue(url: str, clock: HandClock) -> Iterator[PostgresCatalogue]:
    opened = PostgresCatalogue(url)
    yield opened
    opened.close()


def begun(catalogue: PostgresCatalogue, attempt: str, sample_id: str = "s") -> SampleRecord:
    """A sample that is on its way; as it is committed."""
    catalogue.begin(replace(arriving(sample_id), attempt=attempt)).result()
    return replace(committed(sample_id), attempt=attempt)


def due(catalogue: PostgresCatalogue) -> list[tuple[str, bool]]:
    return [(attempt.name, attempt.is_ended) for attempt in catalogue.ended_attempts(10)]


def test_a_commit_takes_its_attempt(catalogue: PostgresCatalogue, clock: HandClock) -> None:
    record = begun(catalogue, "a")
    assert catalogue.get(record.key).attempt == ""  # type: ignore[union-attr]
    assert catalogue.commit(record).result() is None
    assert catalogue.get(record.key) == record
    assert catalogue.end("a").result() is False
    assert catalogue.commit(record).result() is None
    clock.now += 10_000 * S
    assert due(catalogue) == []


def test_of_two_attempts_at_one_id_the_second_is_told_of_the_first(catalogue: PostgresCatalogue) -> None:
    first, second = begun(catalogue, "a"), begun(catalogue, "b")
    assert catalogue.commit(first).result() is None
    assert catalogue.commit(second).result() == first
    assert catalogue.get(first.key) == first
    assert catalogue.end("b").result() is True


def test_what_was_ended_is_not_committed(catalogue: PostgresCatalogue) -> None:
    record = begun(catalogue, "a")
    assert catalogue.end("a").result() is True
    assert catalogue.end("a").result() is False
    with pytest.raises(Interrupted):
        catalogue.commit(record).result()
    assert catalogue.get_settled(record.key).state is State.ARRIVING  # type: ignore[union-attr]


def test_of_a_commit_and_an_end_at_once_one_wins(url: str, catalogue: PostgresCatalogue) -> None:
    """Also of two servers."""
    other = PostgresCatalogue(url)
    with ThreadPoolExecutor(2) as threads:
        for number in range(60):
            record = begun(catalogue, f"a{number}", f"s{number}")
            together = threading.Barrier(2)

            def commit(record: SampleRecord = record, together: threading.Barrier = together) -> bool:
                together.wait()
                try:
                    return catalogue.commit(record).result() is None
                except Interrupted:
                    return False

            def end(record: SampleRecord = record, together: threading.Barrier = together) -> bool:
                together.wait()
                return other.end(record.attempt).result()

            ends = threads.submit(commit), threads.submit(end)
            is_committed, is_ended = (one.result() for one in ends)
            assert is_committed is not is_ended
            found = catalogue.get_settled(record.key)
            assert found is not None
            assert (found.state is State.COMMITTED) is is_committed
    other.close()


def test_an_attempt_expires_unless_it_is_renewed(catalogue: PostgresCatalogue, clock: HandClock) -> None:
    begun(catalogue, "a")
    begun(catalogue, "b", "t")
    clock.now += round((LIFE_S - 1) * S)
    assert catalogue.renew(["a", "none"]).result() == {"a"}
    clock.now += round((EXPIRED_S + 2) * S)
    assert catalogue.ended_attempts(10) == [Attempt(arriving("t").key, "b", False)]
    clock.now += round(LIFE_S * S)
    assert due(catalogue) == [("b", False), ("a", False)]
    catalogue.end("b").result()
    assert catalogue.renew(["a", "b"]).result() == {"a"}
    assert due(catalogue) == []


def test_what_was_ended_is_due_a_minute_later_until_it_is_forgotten(catalogue: PostgresCatalogue, clock: HandClock) -> None:
    begun(catalogue, "a")
    catalogue.end("a").result()
    assert due(catalogue) == []
    clock.now += round((REMOVED_AFTER_S + 1) * S)
    assert due(catalogue) == [("a", True)]
    catalogue.forget_attempts(["a"]).result()
    assert due(catalogue) == []


def test_an_open_attempt_is_not_forgotten(catalogue: PostgresCatalogue) -> None:
    record = begun(catalogue, "a")
    catalogue.forget_attempts(["a"]).result()
    assert catalogue.commit(record).result() is None


@pytest.mark.parametrize("by_rule", [False, True])
def test_what_is_deleted_is_gone_at_once_and_its_object_later(
    catalogue: PostgresCatalogue, clock: HandClock, by_rule: bool
) -> None:
    record = begun(catalogue, "a")
    catalogue.commit(record).result()
    late = begun(catalogue, "b")
    if by_rule:
        assert catalogue.mark_unused(catalogue.candidates(Queue.OLDEST, "n", (-1, -1), 10), catalogue.lead())
    else:
        assert catalogue.mark_deleting(record) == 0
    assert catalogue.get_settled(record.key) is None
    assert due(catalogue) == []
    with pytest.raises(Interrupted):  # What was on its way before does not bring it back.
        catalogue.commit(late).result()
    clock.now += round((REMOVED_AFTER_S - 1) * S)
    catalogue.hold_attempts(["a"]).result()  # Somebody reads it still.
    clock.now += 2 * S
    assert due(catalogue) == [("b", True)]
    clock.now += round(REMOVED_AFTER_S * S)
    assert due(catalogue) == [("a", True), ("b", True)] or due(catalogue) == [("b", True), ("a", True)]
    assert catalogue.commit(begun(catalogue, "c")).result() is None


def test_a_damaged_sample_keeps_its_object_until_another_takes_its_place(
    catalogue: PostgresCatalogue, clock: HandClock
) -> None:
    record = begun(catalogue, "a")
    catalogue.commit(record).result()
    catalogue.put_damaged(record, "why").result()
    assert catalogue.get(record.key).attempt == "a"  # type: ignore[union-attr]
    again = begun(catalogue, "b")
    clock.now += 1000 * S
    catalogue.renew(["b"]).result()
    assert due(catalogue) == []
    assert catalogue.commit(again).result() is None
    catalogue.put_damaged(record, "late").result()  # It is another sample now.
    assert catalogue.get(record.key) == again
    clock.now += round((REMOVED_AFTER_S + 1) * S)
    assert due(catalogue) == [("a", True)]


def test_nobody_fails_what_another_server_sends(catalogue: PostgresCatalogue) -> None:
    begun(catalogue, "a")
    begun(catalogue, "b")
    catalogue.end("a").result()
    assert catalogue.fail(arriving(), "ABORTED", "no").result() is False
    assert catalogue.fail_abandoned(arriving().key).result() is False
    catalogue.end("b").result()
    assert catalogue.fail_abandoned(arriving().key).result() is True
    assert catalogue.get(arriving().key).error_code == "INTERRUPTED"  # type: ignore[union-attr]


def test_the_oldest_attempt_and_which_are_known(catalogue: PostgresCatalogue, clock: HandClock) -> None:
    assert catalogue.oldest_attempt() == 0
    first = clock.now
    record = begun(catalogue, "a")
    clock.now += S
    begun(catalogue, "b", "t")
    assert catalogue.oldest_attempt() == first
    catalogue.commit(record).result()
    assert catalogue.oldest_attempt() == first + S
    catalogue.end("b").result()
    assert catalogue.oldest_attempt() == 0
    keys = [record.key, arriving("t").key, record.key]
    assert catalogue.known_attempts(["a", "b", "c"], keys) == {"a", "b"}


def test_how_many_attempts_there_are_and_which_of_them_are_late(catalogue: PostgresCatalogue, clock: HandClock) -> None:
    assert catalogue.count_attempts() == AttemptCounts()
    for name in ("a", "b", "c"):
        begun(catalogue, name, name)
    catalogue.end("a").result()
    assert catalogue.count_attempts() == AttemptCounts(arriving=2, ended=1)
    clock.now += round((LIFE_S + LATE_S) * S)
    assert catalogue.count_attempts() == AttemptCounts(arriving=2, ended=1, late=3)
    catalogue.renew(["b"]).result()
    catalogue.hold_attempts(["a"]).result()  # Somebody reads its object.
    assert catalogue.count_attempts() == AttemptCounts(arriving=2, ended=1, late=1)
    clock.now += round(REMOVED_AFTER_S * S)
    assert catalogue.count_attempts() == AttemptCounts(arriving=2, ended=1, late=2)
    catalogue.forget_attempts(["a"]).result()
    assert catalogue.count_attempts() == AttemptCounts(arriving=2, ended=0, late=1)


def test_a_row_whose_attempt_was_changed_is_found_out(url: str, catalogue: PostgresCatalogue) -> None:
    record = begun(catalogue, "a")
    catalogue.commit(record).result()
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("UPDATE slotstream.samples SET attempt = 'b'")
    with pytest.raises(Exception, match="does not match its checksum"):
        catalogue.get(record.key)
