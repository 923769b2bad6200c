"""Slots that are lent through shared memory: each to one at a time, in any order of turns, and none by who is gone."""

from __future__ import annotations

import random
import time
from collections import deque
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

from support.waiting import WAIT_S

from slotstream.connector.sending.process.main import _Desk
from slotstream.connector.sending.process.messages import Want, hear, say
from slotstream.connector.sending.staging_area import LeaseRing, StagingArea, control_bytes
from slotstream.connector.sending.staging_pool import StagingPool, StagingShape
from slotstream.wire.errors import StagingFull


def _area(num_slots: int, note_words: int = 0) -> StagingArea:
    shape = StagingShape(num_slots, 2, 64, 8, note_words)
    return StagingArea(memoryview(bytearray(shape.nbytes)), memoryview(bytearray(control_bytes(shape))), shape)


def _ends(area: StagingArea, first_turn: int = 0) -> tuple[LeaseRing, LeaseRing]:
    lender, leaser = area.lending(first_turn), area.lending(first_turn)
    lender.clear()
    return lender, leaser


def test_slots_come_out_in_the_order_in_which_they_were_lent_each_once() -> None:
    rng = random.Random(0)
    for num_slots in (1, 7, 8, 31):
        lender, leaser = _ends(_area(num_slots))
        free, lent, leased = list(range(num_slots)), deque[int](), list[int]()
        for _ in range(3000):
            if rng.random() < 0.5:
                count = rng.randrange(len(free) + 1)
                lender.lend(free[:count])
                lent.extend(free[:count])
                del free[:count]
            elif rng.random() < 0.7:
                wanted = rng.randrange(num_slots + 2)
                ready = leaser.ready(wanted)
                assert ready == list(lent)[:wanted]
                taken = rng.randrange(len(ready) + 1)
                leaser.take(taken)
                leased += [lent.popleft() for _ in range(taken)]
            else:
                rng.shuffle(leased)
                free += leased[: len(leased) // 2]
                del leased[: len(leased) // 2]
            assert lender.stock == len(lent)
            assert sorted(free + list(lent) + leased) == list(range(num_slots))


def test_what_a_lender_that_died_had_lent_is_not_the_next_ones() -> None:
    area = _area(8)
    lender, leaser = _ends(area)
    for _ in range(5):
        lender.lend([0, 1, 2, 3])
        leaser.take(len(leaser.ready(4)))
    lender.lend([4, 5, 6])
    assert leaser.ready(1) == [4]
    again, next_leaser = _ends(area, leaser.after())
    assert leaser.ready(8) == next_leaser.ready(8) == []
    again.lend([7, 6, 5, 4, 3, 2, 1, 0])
    assert leaser.ready(8) == []  # The engine may still look where the old one lent.
    assert next_leaser.ready(8) == [7, 6, 5, 4, 3, 2, 1, 0]
    assert again.stock == 8


def test_notes_and_words_lie_where_they_belong_and_share_nothing() -> None:
    area = _area(3, note_words=6)
    assert area.notes.shape == (5, 8, 6)
    area.notes[:] = -7
    for slot in range(5):
        area.words(slot)[:] = slot
    lender, leaser = _ends(area)
    lender.lend([0, 1, 2])
    area.done_word[0] = 9
    assert leaser.ready(3) == [0, 1, 2]
    assert (area.notes == -7).all()
    assert area.done == 9
    assert [bytes(area.slots[slot * 64 : slot * 64 + 8]) for slot in range(5)] == [bytes([slot, *[0] * 7]) for slot in range(5)]


def test_what_is_lent_ahead_counts_for_a_worker_that_asks_for_nearly_all() -> None:
    """Slots that are lent while it asks lack in the pool: the lender would wait for the worker, which waits for the lender."""
    lender, leaser = _ends(_area(16))
    shape = StagingShape(16, 2, 64, 8)
    pool = StagingPool(memoryview(bytearray(shape.nbytes)), shape)

    def lease(count: int, deadline: float) -> list[int] | None:
        return pool.acquire(count, deadline=deadline, keep_waiting=lambda: True)

    pump: Any = SimpleNamespace(lease=lease, why_full=lambda: StagingFull("no room"))
    worker, desk = Pipe()
    _Desk(pool, pump, lender, desk)
    assert lender.stock == 4
    say(worker, Want(14, time.monotonic() + 5.0))
    assert worker.poll(WAIT_S)
    assert hear(worker).refusal is None
    assert len(leaser.ready(14)) == 14
    say(worker, Want(3, time.monotonic() + 5.0))  # All of them are there.
    assert worker.poll(WAIT_S)
    assert hear(worker).refusal is None
    worker.close()
