"""Which server is tried next, and when."""

from __future__ import annotations

import random

import pytest

from slotstream.transport.targets import RECORDS_MAX, OpenOnStream, Target, Targets, resolve

FIRST_S, MOST_S = 0.25, 2.0


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _targets(*servers: str, seed: int = 0, records: dict[str, list[str]] | None = None) -> tuple[Targets, Clock]:
    clock = Clock()
    names = records or {}
    made = Targets(servers, resolve=lambda host, port: names.get(host, []), rng=random.Random(seed), clock=clock)
    return made, clock


def _try(targets: Targets, *, up: bool = False) -> str:
    address = targets.next().address
    targets.ended(up=up)
    return address


def test_a_round_tries_each_server_once_in_random_order() -> None:
    servers = ("a:1", "b:1", "c:1")
    orders = set()
    for seed in range(50):
        targets, _ = _targets(*servers, seed=seed)
        orders.add(tuple(_try(targets) for _ in servers))
    assert all(sorted(order) == list(servers) for order in orders)
    assert len(orders) == 6


def test_after_a_stream_that_was_up_all_others_come_first() -> None:
    for seed in range(20):
        targets, _ = _targets("a:1", "b:1", "c:1", seed=seed)
        was_up = _try(targets, up=True)
        assert sorted({_try(targets), _try(targets)} | {was_up}) == ["a:1", "b:1", "c:1"]
        assert _try(targets) == was_up


def test_another_server_is_tried_at_once_and_the_same_one_after_a_pause() -> None:
    targets, clock = _targets("a:1", "b:1")
    targets.next()
    clock.now += 60
    targets.ended(up=True)
    assert targets.pause_s(FIRST_S, MOST_S) == 0.0
    _try(targets)
    assert targets.pause_s(FIRST_S, MOST_S) == FIRST_S
    clock.now += 0.1
    assert targets.pause_s(FIRST_S, MOST_S) == pytest.approx(FIRST_S - 0.1)


def test_the_pause_doubles_with_each_round_in_vain_up_to_the_most() -> None:
    targets, _ = _targets("a:1")
    pauses = []
    for _ in range(6):
        _try(targets)
        pauses.append(targets.pause_s(FIRST_S, MOST_S))
    assert pauses == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    _try(targets, up=True)
    assert targets.pause_s(FIRST_S, MOST_S) == FIRST_S


def test_servers_that_come_up_and_break_at_once_are_not_tried_without_a_pause() -> None:
    targets, _ = _targets("a:1", "b:1")
    pauses = []
    for _ in range(4):
        _try(targets, up=True)
        pauses.append(targets.pause_s(FIRST_S, MOST_S))
    assert pauses == [0.0, FIRST_S, FIRST_S, FIRST_S]


def test_all_were_tried_once_none_answered_since_one_was_up() -> None:
    targets, _ = _targets("a:1", "b:1", "c:1")
    told = []
    for up in (False, False, False, True, False, False):
        _try(targets, up=up)
        told.append(targets.all_tried)
    assert told == [False, False, True, False, False, True]


def test_a_name_with_several_records_is_several_servers_under_its_name() -> None:
    records = {"storage": ["10.0.0.1", "10.0.0.2", "fd00::1"]}
    targets, _ = _targets("storage:50151", records=records)
    found = set()
    for _ in range(3):
        found.add(targets.next())
        targets.ended(up=False)
    assert found == {
        Target("10.0.0.1:50151", "storage:50151"),
        Target("10.0.0.2:50151", "storage:50151"),
        Target("[fd00::1]:50151", "storage:50151"),
    }
    assert targets.several
    assert str(Target("10.0.0.1:50151", "storage:50151")) == "storage:50151 (10.0.0.1:50151)"
    records["storage"] = ["10.0.0.9"]  # A name is looked up again for every round.
    assert targets.next() == Target("storage:50151", "storage:50151")
    assert not targets.several


def test_a_name_with_more_records_than_the_limit_is_a_random_choice_of_them() -> None:
    numbers = [f"10.0.{i}.1" for i in range(RECORDS_MAX + 10)]
    targets, _ = _targets("storage:1", records={"storage": numbers})
    assert len({_try(targets) for _ in range(RECORDS_MAX)}) == RECORDS_MAX
    assert targets.all_tried


@pytest.mark.parametrize("server", ["10.0.0.1:1", "[::1]:1", "[fe80::1%25eth0]:1", "unix:/run/s"])
def test_a_number_and_a_socket_are_not_looked_up(server: str) -> None:
    def asked(host: str, port: int) -> list[str]:
        raise AssertionError(host)

    assert Targets((server,), resolve=asked).next() == Target(server, server)


def test_a_name_that_stands_for_nothing_stays_a_name() -> None:
    assert resolve("no-such-host.invalid", 1) == []
    assert Targets(("no-such-host.invalid:1",)).next().address == "no-such-host.invalid:1"


def test_the_preferred_one_is_next_unless_it_is_not_ours() -> None:
    targets, _ = _targets("a:1", "b:1", "c:1")
    targets.prefer(Target("c:1", "c:1"))
    assert targets.next().address == "c:1"
    targets.prefer(Target("x:1", "x:1"))
    targets.ended(up=False)
    assert {_try(targets) for _ in range(3)} <= {"a:1", "b:1", "c:1"}


def test_a_stream_that_is_left_refuses_new_samples_and_ends_with_the_last_open_one() -> None:
    stream = OpenOnStream()
    assert stream.open(1)
    stream.leaving = True
    assert not stream.open(2)
    assert stream.takes(1)
    assert not stream.takes(2)
    assert not stream.may_end
    stream.ended(1)
    assert stream.may_end
