from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotstream.store.sample.row_hash import GROUPS_MAX, GroupHasher, hash_rows_for
from slotstream.wire.errors import Damaged
from slotstream.wire.hashing import xxh3
from slotstream.wire.layout import decode_hashes, encode_hashes, group_count

ROW = 3


@given(st.data())
def test_hashes_do_not_depend_on_the_order_in_which_rows_came(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 40))
    hash_rows = data.draw(st.sampled_from([1, 2, 4, 8]))
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(1, rows), max_size=8))})
    chunks = data.draw(st.permutations(list(pairwise(cuts))))
    kept = data.draw(st.integers(1, rows))
    content = bytes(i % 251 for i in range(rows * ROW))
    hasher = GroupHasher(ROW, hash_rows)
    for start, stop in chunks:
        part = memoryview(content)[start * ROW : stop * ROW]
        hasher.feed(start, stop - start, part, xxh3(part))
    hashes = hasher.finish(kept, lambda start, stop: content[start * ROW : stop * ROW])
    groups = range(0, kept, hash_rows)
    assert hashes == [xxh3(content[at * ROW : min(at + hash_rows, kept) * ROW]) for at in groups]


def test_nothing_is_read_back_when_rows_came_in_order() -> None:
    hasher = GroupHasher(1, 4)
    for start in range(0, 21, 3):
        hasher.feed(start, 3, memoryview(bytes(3)), xxh3(bytes(3)))

    def read(start: int, stop: int) -> bytes:
        raise AssertionError(f"rows [{start}, {stop}) were read back")

    assert len(hasher.finish(21, read)) == 6


@pytest.mark.parametrize(("row_bytes", "rows_max"), [(1, 1), (8192, 4096), (4 << 20, 2), (512 << 10, 1 << 21), (64, 1 << 21)])
def test_a_group_is_a_power_of_two_of_rows_and_the_list_of_hashes_fits(row_bytes: int, rows_max: int) -> None:
    rows = hash_rows_for(row_bytes, rows_max)
    assert rows & (rows - 1) == 0
    assert group_count(rows_max, rows) <= GROUPS_MAX


def test_hashes_survive_their_text_and_other_text_is_damaged() -> None:
    hashes = [0, 1 << 63, 42]
    assert decode_hashes(encode_hashes(hashes), 9, 4) == hashes
    for text, rows, hash_rows in [("", 1, 1), ("0" * 16, 2, 1), ("x" * 16, 1, 1), ("0" * 16, 1, 0)]:
        with pytest.raises(Damaged):
            decode_hashes(text, rows, hash_rows)
