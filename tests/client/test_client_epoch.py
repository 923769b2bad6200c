"""The plan of an epoch: who gets which rows, and when, by ids alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from slotstream.client import epoch as plan
from slotstream.client.epoch import Cut, Member, Stretch, Turn
from slotstream.client.ranks import Place

SEED, EPOCH = 5, 2


def members(count: int, most: int = 300) -> list[Member]:
    chance = random.Random(0)
    return [Member("n", f"s{number}", chance.randint(1, most), 1, (4,)) for number in range(count)]


def places(world_size: int, workers: int) -> list[Place]:
    return [Place(rank, world_size, worker, workers) for rank in range(world_size) for worker in range(workers)]


def order_of(all_of_them: list[Member], cut: Cut, where: Place, width: int) -> list[tuple[str, int]]:
    """Names of stretches and rows, in the order in which this reader hands them out."""
    marked = [
        (mark, (turn.stretch.name, row))
        for turn in plan.turns((s for s in plan.stretches(all_of_them, cut) if s.is_of(where)), SEED, EPOCH)
        for row, mark in enumerate(turn.marks(SEED, EPOCH, width))
    ]
    return [row for _, row in sorted(marked)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_each_row_is_of_one_reader(world_size: int, workers: int) -> None:
    everything = members(60)
    cut = Cut.of(len(everything), 1000, world_size)
    found = Counter(
        (unit.member.name, row)
        for where in places(world_size, workers)
        for unit in plan.stretches(everything, cut)
        if unit.is_of(where)
        for row in range(unit.start, unit.stop)
    )
    assert found == Counter((member.name, row) for member in everything for row in range(member.rows))


def test_a_sample_that_is_gone_moves_no_other() -> None:
    everything = members(200)
    cut = Cut.of(len(everything), 1000, 3)
    width = plan.window(sum(member.rows for member in everything), 1000, 6)
    for where in places(3, 2):
        before = order_of(everything, cut, where, width)
        gone = {everything[number].name for number in range(0, 200, 7)}
        after = order_of([member for member in everything if member.name not in gone], cut, where, width)
        assert after == [row for row in before if row[0].rpartition("/")[0] not in gone]
        assert len(after) < len(before)


def test_the_order_depends_on_the_seed_and_on_the_epoch() -> None:
    units = list(plan.stretches(members(50), Cut(1, 100)))
    orders = [[turn.tag for turn in plan.turns(units, seed, epoch)] for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] == [turn.tag for turn in plan.turns(reversed(units), 0, 0)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize(("count", "most"), [(2000, 60), (300, 3000), (4, 50_000)])
def test_a_reader_holds_about_half_of_its_buffer(count: int, most: int) -> None:
    buffer_rows, where = 2000, Place(1, 2, 0, 2)
    everything = members(count, most)
    cut = Cut.of(count, buffer_rows, 2)
    width = plan.window(sum(member.rows for member in everything), buffer_rows, where.shards)
    order = plan.turns((s for s in plan.stretches(everything, cut) if s.is_of(where)), SEED, EPOCH)
    held: list[Turn] = []
    largest = 0
    for turn in order:
        held = [one for one in held if one.key + width > turn.key] + [turn]
        largest = max(largest, sum(one.stretch.rows for one in held))
    assert buffer_rows / 8 < largest < 1.25 * buffer_rows


def test_what_fits_the_buffer_is_shuffled_as_a_whole() -> None:
    everything = members(40, 10)
    rows = sum(member.rows for member in everything)
    turns = plan.turns(plan.stretches(everything, Cut.of(40, 4 * rows, 1)), SEED, EPOCH)
    width = plan.window(rows, 4 * rows, 1)
    first = sorted(mark for turn in turns for mark in turn.marks(SEED, EPOCH, width))[: rows // 4]
    assert len(set(plan.tags_of(first))) > 20


@pytest.mark.parametrize("count", [20, 1000])
def test_ranks_get_about_equally_many_rows(count: int) -> None:
    everything = members(count)
    for world_size in (2, 4, 8):
        counted = plan.census(everything, Cut.of(count, 16384, world_size), world_size)
        sums = [sum(lanes) for lanes in counted]
        assert sum(sums) == sum(member.rows for member in everything)
        assert max(sums) - min(sums) < 0.06 * sum(sums) / world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_ranks_get_equally_many_full_batches(world_size: int, workers: int) -> None:
    batch = 37
    counted = plan.census(members(100), Cut.of(100, 16384, world_size), world_size)
    totals = []
    for rank in range(world_size):
        owed = [plan.full_batches(counted, batch, Place(rank, world_size, worker, workers)) for worker in range(workers)]
        there = [sum(counted[rank][worker::workers]) for worker in range(workers)]
        assert all(count * batch <= rows for count, rows in zip(owed, there, strict=True))
        totals.append(sum(owed))
    assert len(set(totals)) == 1
    fewest = min(sum(sum(lanes[worker::workers]) // batch for worker in range(workers)) for lanes in counted)
    assert totals[0] == fewest


def test_a_mark_says_which_row_it_is() -> None:
    turn = Turn(key=77, tag=(1 << 64) - 3, stretch=Stretch(Member("n", "s", 500, 1, (4,)), 2, 100, 300))
    marks = turn.marks(SEED, EPOCH, 1000)
    assert plan.rows_of(marks) == list(range(200))
    assert set(plan.tags_of(marks)) == {turn.tag}
    assert all(77 <= plan.place_of(mark) < 1077 for mark in marks)
    assert len({plan.place_of(mark) for mark in marks}) > 150
