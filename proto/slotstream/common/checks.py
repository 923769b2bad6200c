"""Checks of numbers that people wrote into options and files."""

from __future__ import annotations

import math

_UNBOUNDED = (1 << 62) - 1  # A limit from here on only keeps a number inside 64 bits.


def check_number(name: str, value: object, low: float, high: float = math.inf, *, whole: bool = False) -> None:
    """Raises ValueError, in one sentence that names `name`, unless `value` is a number from `low` to `high`.

    True, False and NaN are no numbers. `whole`: no float either.
    """
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if is_number and low <= value <= high:  # type: ignore[operator]  # Neither is true of NaN.
        return
    too_high = is_number and value > high  # type: ignore[operator]
    bounds = f"from {low} to {high}" if high < _UNBOUNDED or too_high else f"of at least {low}"
    raise ValueError(f"{name} must be {'a whole number' if whole else 'a number'} {bounds}, not {repr(value)[:40]}")
