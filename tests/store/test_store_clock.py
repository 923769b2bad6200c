"""A clock that leapt: ages go by the wall clock, and most of a namespace goes only if it is believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from store.store_kit import Sample, crash
from support.sqlite_of import sqlite_of

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.disk.clock import Clock
from slotstream.store.records import SampleKey, State
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.store.upkeep.scrubbing import Scrubber
from slotstream.store.upkeep.sweeping import Sweeper, Swept
from slotstream.wire.errors import Leased

DAY = 86400 * 10**9
WEEK_S = 7 * 86400.0


class World:
    """A wall clock that somebody sets, and one that nobody does."""

    def __init__(self) -> None:
        self.wall = 1_700_000_000 * 10**9
        self.elapsed = 5 * DAY

    def pass_(self, ns: int) -> None:
        self.wall += ns
        self.elapsed += ns

    def open(self, directory: Path) -> SampleStore:
        return SampleStore.open(directory, wall=lambda: self.wall, elapsed=lambda: self.elapsed)


@pytest.fixture
def world() -> World:
    return World()


def _put(store: SampleStore, *names: str) -> None:
    for name in names:
        Sample(name).put(store)


def _sweep(store: SampleStore, **rule: float | bool) -> Swept:
    return Sweeper(store.lifetimes, Policy(default=Rule(**rule)), store.free_bytes).sweep()  # type: ignore[arg-type]


def _left(store: SampleStore) -> str:
    return "".join(sorted(record.sample_id for record in store.list_page(ListQuery(state=State.COMMITTED))[0]))


ENDS = pytest.mark.parametrize("end", [SampleStore.close, crash], ids=["stopped", "killed"])


def test_a_clock_that_ran_ahead_once_deletes_nothing_once_it_is_right(tmp_path: Path, world: World) -> None:
    store = world.open(tmp_path)
    _put(store, "a", "b")
    world.wall += 400 * DAY
    _put(store, "c")
    assert store.lifetimes.watch.look().startswith("the clock is 400 days ahead")
    assert _sweep(store, age_s_max=WEEK_S).held == {"default"}
    assert _left(store) == "abc"
    world.wall -= 400 * DAY
    _put(store, "d")
    assert "up to 400 days ahead of the clock" in store.lifetimes.watch.look()
    for _ in range(3):
        world.pass_(DAY)
        _sweep(store, age_s_max=WEEK_S)
    assert _left(store) == "abcd"
    # What is truly old goes, for that is not more than half; the rest bears times to come.
    world.pass_(5 * DAY)
    assert _sweep(store, age_s_max=WEEK_S).held == set()
    assert _left(store) == "cd"
    store.close()


def test_a_clock_that_leaps_in_the_middle_of_a_sweep_deletes_nothing(tmp_path: Path, world: World) -> None:
    """At each moment at which the sweep looks at it."""
    store = world.open(tmp_path)
    _put(store, "a", "b", "c")
    looks = 0

    def leaps_later() -> int:
        nonlocal looks
        looks -= 1
        return world.wall + (400 * DAY if looks < 0 else 0)

    store.lifetimes.clock._source = leaps_later
    for before in range(20):
        looks = before
        _sweep(store, age_s_max=WEEK_S)
        assert _left(store) == "abc", f"it leapt after {before} looks"
        looks = 1 << 30
        assert store.lifetimes.watch.look() == ""
    store.close()


def test_a_clock_that_was_accepted_stays_so_while_samples_come(tmp_path: Path, world: World) -> None:
    store = world.open(tmp_path)
    world.wall += 30 * DAY
    _put(store, "a")
    world.wall -= 30 * DAY
    assert "30 days ahead" in store.lifetimes.watch.look()
    store.lifetimes.accept_clock()
    _put(store, "b", "c")  # Their stamps go on from those of "a".
    assert store.lifetimes.watch.look() == ""
    store.close()
    store = world.open(tmp_path)
    assert store.lifetimes.watch.trouble == ""
    world.wall += 60 * DAY
    _put(store, "d")
    world.wall -= 60 * DAY
    assert "60 days ahead" in store.lifetimes.watch.look()  # What nobody has accepted.
    store.close()


@ENDS
def test_a_start_with_a_clock_that_is_ahead_deletes_nothing_until_somebody_says_that_it_is_right(
    tmp_path: Path, world: World, end: Callable[[SampleStore], None]
) -> None:
    store = world.open(tmp_path)
    _put(store, "a", "b", "c")
    end(store)
    world.wall += 30 * DAY
    for _ in range(2):  # Also the start after the next.
        store = world.open(tmp_path)
        assert "30 days ahead" in store.lifetimes.watch.trouble
        done = _sweep(store, age_s_max=WEEK_S)
        assert (done.held, _left(store)) == ({"default"}, "abc")
        end(store)
    store = world.open(tmp_path)
    world.pass_(DAY)
    assert "30 days ahead" in store.lifetimes.watch.look()
    store.lifetimes.accept_clock()
    assert store.lifetimes.watch.trouble == ""
    assert _sweep(store, age_s_max=WEEK_S).held == set()
    assert _left(store) == ""
    end(store)
    store = world.open(tmp_path)
    assert store.lifetimes.watch.trouble == ""
    store.close()


def test_leases_given_while_the_clock_ran_ahead_end_within_a_day_once_it_is_accepted(tmp_path: Path, world: World) -> None:
    store = world.open(tmp_path)
    _put(store, "a", "b")
    store.lifetimes.lease(SampleKey("default", "a"), "trainer", 3600.0)
    world.wall += 400 * DAY
    store.lifetimes.lease(SampleKey("default", "b"), "trainer", 3600.0)
    world.wall -= 400 * DAY
    store.lifetimes.lease(SampleKey("default", "a"), "trainer", 3600.0)  # It ended in the meantime.
    world.pass_(2 * DAY)
    with pytest.raises(Leased):
        store.delete(SampleKey("default", "b"))
    store.lifetimes.accept_clock()
    with pytest.raises(Leased):
        store.delete(SampleKey("default", "b"))
    world.pass_(DAY)
    store.delete(SampleKey("default", "b"))
    assert _left(store) == "a"
    store.close()


@ENDS
def test_a_clock_that_is_right_again_at_the_next_start_is_believed(
    tmp_path: Path, world: World, end: Callable[[SampleStore], None]
) -> None:
    store = world.open(tmp_path)
    _put(store, "a")
    end(store)
    world.wall += 30 * DAY
    store = world.open(tmp_path)
    assert store.lifetimes.watch.trouble
    end(store)
    world.wall -= 30 * DAY
    store = world.open(tmp_path)
    assert store.lifetimes.watch.trouble == ""
    store.close()


def test_without_a_leap_nothing_changes(tmp_path: Path, world: World) -> None:
    store = world.open(tmp_path)
    _put(store, "a", "b", "c")
    store.close()
    world.pass_(DAY - 10**9)  # A stop of less than a day.
    store = world.open(tmp_path)
    for _ in range(40):
        world.pass_(DAY // 2)
        assert store.lifetimes.watch.look() == ""
    assert _sweep(store, age_s_max=WEEK_S).held == set()
    assert _left(store) == ""
    store.close()


def test_what_is_not_by_age_goes_on_while_the_clock_is_in_doubt(tmp_path: Path, world: World) -> None:
    store = world.open(tmp_path)
    _put(store, "a", "b", "c", "d")
    world.wall += 30 * DAY
    store.lifetimes.ack(Sample("d").key)
    done = _sweep(store, age_s_max=WEEK_S, samples_max=2, delete_on_ack=True)
    assert done.held == {"default"}
    assert _left(store) == "bc"
    store.close()


def test_less_than_half_of_a_namespace_goes_as_ever(tmp_path: Path, world: World) -> None:
    store = world.open(tmp_path)
    _put(store, "a", "b")
    world.pass_(6 * DAY)
    _put(store, "c", "d")
    world.wall += 2 * DAY
    done = _sweep(store, age_s_max=WEEK_S)
    assert store.lifetimes.watch.trouble
    assert (done.held, _left(store)) == (set(), "cd")
    store.close()


def test_leases_and_scrubbing_do_not_wait_for_the_stamps(tmp_path: Path, world: World) -> None:
    store = world.open(tmp_path)
    world.wall += 400 * DAY
    _put(store, "a")
    assert Scrubber(store.lifetimes, 1e12).run_pass()
    world.wall -= 400 * DAY
    store.lifetimes.lease(Sample("a").key, "me", 600)
    assert Scrubber(store.lifetimes, 1e12).due_in_s(1000) <= 1000
    world.pass_(601 * 10**9)
    assert store.lifetimes.standing(Sample("a").key).leased_until_unix_ns == 0
    store.close()


def test_an_earlier_version_remembers_no_more_than_its_samples_times(tmp_path: Path, world: World) -> None:
    store = world.open(tmp_path)
    _put(store, "a")
    sqlite_of(store).submit(lambda db: db.execute("DELETE FROM meta WHERE key = 'clock'")).result()
    crash(store)
    world.wall += 30 * DAY
    store = world.open(tmp_path)
    assert "29 days ahead" in store.lifetimes.watch.trouble
    store.close()


def test_no_stamp_is_before_one_that_another_process_gave_out() -> None:
    clock = Clock(100, lambda: 50)
    assert clock.stamp() == 101
    clock.heard(5000)
    assert clock.stamp() == 5001
    clock.heard(7)
    assert clock.stamp() == 5002
