"""Hashes of a sample's rows, one per fixed group of rows, fed while chunks arrive so that a commit need not read back.

A group is the largest power of two of rows that fits GROUP_BYTES (at least one row), larger for samples of more than
GROUPS_MAX groups, whose list of hashes would not fit the file's header. The last group ends at the last row.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from slotstream.wire.hashing import xxh3
from slotstream.wire.layout import group_count

GROUP_BYTES = 1 << 21
GROUPS_MAX = 1 << 16
_UNFINISHED_MAX = 4  # Groups hashed in part at a time; a sender that jumps about costs a read at commit, not memory.


def hash_rows_for(row_bytes: int, rows_max: int) -> int:
    """Rows per group for a sample of at most `rows_max` rows of `row_bytes` each."""
    rows = 1
    while rows * 2 * row_bytes <= GROUP_BYTES or rows * GROUPS_MAX < rows_max:
        rows *= 2
    return rows


class GroupHasher:
    """Collects group hashes from rows fed once each, in any order. Not thread safe.

    A group is hashed as its rows arrive when they arrive in order within it; else `finish` reads it back.
    """

    def __init__(self, row_bytes: int, hash_rows: int) -> None:
        self._row_bytes = row_bytes
        self._hash_rows = hash_rows
        self._done: dict[int, int] = {}
        self._unfinished: dict[int, tuple[xxhash.xxh3_64, int]] = {}  # group -> (state, next row)

    def feed(self, first_row: int, rows: int, data: memoryview, digest: int) -> None:
        """Rows [first_row, first_row + rows), as bytes with their xxh3-64. A row must not be fed twice."""
        row, stop = first_row, first_row + rows
        if rows == self._hash_rows and first_row % rows == 0:
            self._done[first_row // rows] = digest  # Exactly one group: it was hashed already, to check the chunk.
            return
        while row < stop:
            group = row // self._hash_rows
            group_stop = (group + 1) * self._hash_rows
            until = min(group_stop, stop)
            part = data[(row - first_row) * self._row_bytes : (until - first_row) * self._row_bytes]
            self._feed_group(group, row, until, part)
            row = until

    def _feed_group(self, group: int, row: int, until: int, part: memoryview) -> None:
        group_start = group * self._hash_rows
        state: xxhash.xxh3_64 | None
        if row == group_start:
            if until == group_start + self._hash_rows:
                self._done[group] = xxh3(part)
                return
            if len(self._unfinished) >= _UNFINISHED_MAX:
                return
            state = xxhash.xxh3_64()
        else:
            state, next_row = self._unfinished.pop(group, (None, -1))
            if state is None or next_row != row:
                return
        state.update(part)
        if until == group_start + self._hash_rows:
            self._done[group] = state.intdigest()
        else:
            self._unfinished[group] = (state, until)

    def finish(self, num_rows: int, read_rows: Callable[[int, int], bytes]) -> list[int]:
        """Every group's hash for rows [0, num_rows). `read_rows(start, stop)` reads back groups not hashed on the way."""
        hashes: list[int] = []
        for group in range(group_count(num_rows, self._hash_rows)):
            start = group * self._hash_rows
            stop = min(start + self._hash_rows, num_rows)
            whole = stop - start == self._hash_rows
            if whole and group in self._done:
                hashes.append(self._done[group])
                continue
            state, next_row = self._unfinished.get(group, (None, -1))
            hashes.append(state.intdigest() if state is not None and next_row == stop else xxh3(read_rows(start, stop)))
        return hashes
