from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slotstream.store.sample.ranges import RangeSet

_ranges = st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(_ranges, max_size=20), _ranges)
def test_it_is_a_set_of_integers(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    ranges, model = RangeSet(), set[int]()
    for start, stop in added:
        ranges.add(start, stop)
        model |= set(range(start, stop))
    assert {value for value in range(60) if value in ranges} == model
    gaps = ranges.gaps(*asked)
    assert [n for gap in gaps for n in range(*gap)] == [n for n in range(*asked) if n not in model]
    assert len(ranges) == sum(1 for n in model if n - 1 not in model)


def test_the_lowest_range_can_be_forgotten() -> None:
    ranges = RangeSet()
    ranges.forget_lowest()
    ranges.add(1, 3)
    ranges.add(8, 9)
    ranges.forget_lowest()
    assert 1 not in ranges
    assert 8 in ranges
