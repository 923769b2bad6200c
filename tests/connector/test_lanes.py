"""Which lane a sample goes to."""

from __future__ import annotations

from typing import Any

import pytest

from slotstream.connector.sending.lane import Lanes
from slotstream.connector.sending.sample_state import SampleState
from slotstream.v1 import ingest_pb2


@pytest.fixture
def lanes() -> Lanes:
    sink: Any = None  # Nothing is sent.
    found = Lanes([sink, sink, sink])
    for lane in found:
        lane.up = True
    return found


def _sample(serial: int, name: str, namespace: str = "n") -> SampleState:
    return SampleState(serial, f"r{serial}", ingest_pb2.OpenSample(namespace=namespace, sample_id=name))


def _index(lanes: Lanes, sample: SampleState, owed_bytes: int) -> int:
    lane = lanes.for_sample(sample)
    lane.begin(sample, owed_bytes)
    return lane.index


def test_samples_go_to_the_lane_that_owes_least(lanes: Lanes) -> None:
    assert [_index(lanes, _sample(number, f"s{number}"), 10 - number) for number in range(5)] == [0, 1, 2, 2, 1]


def test_one_goes_behind_another_of_its_name_as_long_as_that_is_on_a_lane(lanes: Lanes) -> None:
    """A refused request of a sample's id would else be heard of before the sample."""
    first, second, elsewhere = _sample(1, "s"), _sample(2, "s"), _sample(3, "s", "other")
    assert [_index(lanes, one, 100) for one in (first, second, elsewhere)] == [0, 0, 1]
    lanes.of(first).end(first)
    assert _index(lanes, _sample(4, "s"), 100) == 0
    for lane in lanes:
        lane.went_down()
    assert not any(lane.names for lane in lanes)
    assert _index(lanes, _sample(5, "x"), 100) == 0
    assert _index(lanes, _sample(6, "s"), 100) == 1


def test_a_lane_that_is_down_gets_none(lanes: Lanes) -> None:
    first = _sample(1, "s")
    assert _index(lanes, first, 100) == 0
    lanes.of(first).up = False
    assert _index(lanes, _sample(2, "s"), 100) == 1
