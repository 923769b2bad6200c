"""The staging pool: who may take a slot, and which one goes first."""

from __future__ import annotations

import random
import time

from slotstream.connector.sending.staging_pool import StagingPool, StagingShape


def _pool(num_slots: int, reserved: int = 0) -> StagingPool:
    return StagingPool(memoryview(bytearray((num_slots + reserved) * 64)), StagingShape(num_slots, reserved, 64, 8))


def _lease(pool: StagingPool, count: int) -> list[int] | None:
    return pool.acquire(count, deadline=time.monotonic(), keep_waiting=lambda: True)


def test_kept_slots_are_taken_when_no_free_one_is_left_spare_ones_first_then_the_oldest_owners() -> None:
    pool = _pool(6)
    a, b, c, d, e = _lease(pool, 5) or []
    old, young = 7, 3
    kept = {slot: pool.keep(slot, owner) for slot, owner in ((a, old), (b, young), (c, old))}
    spare = pool.keep(d, None)
    assert (pool.in_use, pool.kept, pool.free) == (1, 4, 1)
    assert _lease(pool, 2) == [5, d]
    assert not pool.reclaim(spare)
    assert not pool.was_robbed(old)
    assert set(_lease(pool, 2) or []) == {a, c}
    assert (pool.was_robbed(old), pool.was_robbed(young)) == (True, False)
    assert not pool.reclaim(kept[a])
    assert pool.reclaim(kept[b])
    assert _lease(pool, 1) is None
    assert pool.keep(e, old) == 0  # Worth nothing without the others.
    assert _lease(pool, 1) == [e]


def test_an_owner_forgotten_gets_its_slots_back_and_a_clean_record() -> None:
    pool = _pool(3)
    a, b, c = _lease(pool, 3) or []
    tickets = [pool.keep(slot, 1) for slot in (a, b, c)]
    assert _lease(pool, 1) is not None
    pool.forget(1, tickets)
    assert (pool.in_use, pool.kept, pool.free) == (1, 0, 2)
    assert not pool.was_robbed(1)


def test_reserved_slots_are_never_leased_and_lie_beside_the_others() -> None:
    pool = _pool(4, reserved=2)
    assert pool.reserved_slots == (4, 5)
    assert sorted(_lease(pool, 4) or []) == [0, 1, 2, 3]
    assert _lease(pool, 1) is None
    pool.buffer(5, 64)[:] = b"x" * 64
    assert bytes(pool._memory[-64:]) == b"x" * 64


def test_no_slot_is_ever_in_two_hands() -> None:
    rng, pool = random.Random(0), _pool(8)
    leased: set[int] = set()
    tickets: dict[int, tuple[int, int]] = {}
    for _ in range(5000):
        move = rng.randrange(4)
        if move == 0 and (slots := _lease(pool, rng.randrange(1, 4))) is not None:
            assert not leased & set(slots)
            assert len(set(slots)) == len(slots)
            leased |= set(slots)
        elif move == 1 and leased:
            pool.release([slot := rng.choice(sorted(leased))])
            leased.discard(slot)
        elif move == 2 and leased:
            leased.discard(slot := rng.choice(sorted(leased)))
            owner = rng.randrange(3)
            if ticket := pool.keep(slot, owner or None):
                tickets[ticket] = (slot, owner)
        elif tickets:
            ticket = rng.choice(sorted(tickets))
            slot, owner = tickets.pop(ticket)
            if rng.random() < 0.5:
                if pool.reclaim(ticket):
                    assert slot not in leased
                    leased.add(slot)
            else:
                pool.forget(owner, [ticket])
        assert pool.in_use == len(leased)
        assert pool.free + pool.kept == 8 - len(leased)
