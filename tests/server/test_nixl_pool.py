"""Slots of the pool that NIXL reads into: never two in one place, and nothing of it lost."""

from __future__ import annotations

import random

import pytest

from slotstream.server.config import NIXL_POOL_BYTES_MIN
from slotstream.server.nixl.pool import NixlPool
from slotstream.wire.names import CHUNK_BYTES_MAX

MIB = 1 << 20


def drain(pool: NixlPool, nbytes: int) -> list[int]:
    slots = []
    while (slot := pool.take(nbytes)) is not None:
        slots.append(slot)
    return slots


@pytest.mark.parametrize(
    ("nbytes", "count"),
    [
        (1, 512),
        (64 << 10, 512),
        ((64 << 10) + 1, 256),
        (2 * MIB, 16),
        (3 * MIB, 8),
        (4 * MIB + 1, 4),
        (CHUNK_BYTES_MAX, 4),
    ],
)
def test_a_slot_is_no_larger_than_it_has_to_be(nbytes: int, count: int) -> None:
    pool = NixlPool(NIXL_POOL_BYTES_MIN)
    slots = drain(pool, nbytes)
    assert sorted(slots) == list(range(0, NIXL_POOL_BYTES_MIN, NIXL_POOL_BYTES_MIN // count))
    for slot in slots:
        pool.give(slot)
    assert len(drain(pool, CHUNK_BYTES_MAX)) == 4


def test_what_is_not_a_whole_largest_slot_is_left_alone() -> None:
    assert len(drain(NixlPool(NIXL_POOL_BYTES_MIN + CHUNK_BYTES_MAX - 1), CHUNK_BYTES_MAX)) == 4


def test_the_slot_that_was_given_back_last_is_taken_first() -> None:
    pool = NixlPool(NIXL_POOL_BYTES_MIN)
    slots = [pool.take(CHUNK_BYTES_MAX) for _ in range(3)]
    assert slots == [0, CHUNK_BYTES_MAX, 2 * CHUNK_BYTES_MAX]
    for slot in (0, CHUNK_BYTES_MAX):
        pool.give(slot)
    assert pool.take(CHUNK_BYTES_MAX) == CHUNK_BYTES_MAX


@pytest.mark.parametrize("seed", range(20))
def test_slots_never_overlap_and_all_come_back(seed: int) -> None:
    rng = random.Random(seed)
    pool = NixlPool(NIXL_POOL_BYTES_MIN)
    taken: dict[int, int] = {}
    aside: set[int] = set()
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            slot = rng.choice(sorted(taken))
            if rng.random() < 0.2:
                pool.set_aside(slot)
                aside.add(slot)
            else:
                pool.give(slot)
                aside.discard(slot)
                del taken[slot]
        else:
            nbytes = rng.choice([1, 5000, 100_000, MIB, 2 * MIB, 3 * MIB, CHUNK_BYTES_MAX])
            got = pool.take(nbytes)
            if got is not None:
                assert 0 <= got <= NIXL_POOL_BYTES_MIN - nbytes
                assert all(got + nbytes <= at or at + size <= got for at, size in taken.items())
                taken[got] = nbytes
        assert pool.quarantined == len(aside)
    for slot in taken:
        pool.give(slot)
    assert pool.quarantined == 0
    assert len(drain(pool, CHUNK_BYTES_MAX)) == 4
