"""How many threads or processes of a kind are worth having on this machine."""

from __future__ import annotations

import os

_CORES_EACH = 4


def for_cores(most: int, *, cores: int | None = None, sharers: int = 1) -> int:
    """One for every four cores, from 1 to `most`. `cores`: how many there are, unless the system is to say.

    `sharers`: how many processes divide the cores among them.
    """
    found = len(os.sched_getaffinity(0)) if cores is None else cores
    return max(1, min(most, found // (_CORES_EACH * sharers)))
