"""Sizes and times as people write them: 10GiB, 1h30m. A bare number is bytes, or seconds."""

from __future__ import annotations

import argparse
import re

_SIZES = {"": 1, "b": 1}
_SIZES |= {f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgtp", 1)}
_SIZES |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)}
_POWER = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?[eE][0-9]{1,2}")  # As in 1e12.
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,9})?) ?([a-z]{0,3})", re.I)
SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIME = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ms|[smhdw]))+")
_PART = re.compile(r"([0-9.]+)(ms|[smhdw])")


def size(text: str) -> int:
    """Bytes. Raises ArgumentTypeError, also for what is no whole number of bytes."""
    try:
        return int(text)  # Of any length, and with a sign: its bounds are checked where they are known.
    except ValueError:
        pass
    if _POWER.fullmatch(text.strip()):
        return int(float(text))
    match = _SIZE.fullmatch(text.strip())
    number, unit = (match[1], match[2].lower()) if match else ("", "?")
    if unit in ("k", "m", "g", "t", "p"):
        raise argparse.ArgumentTypeError(f"{text!r} could be {number}{unit.upper()}iB or {number}{unit.upper()}B: say which")
    if unit not in _SIZES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 10GiB, 512MiB or 1000000")
    whole, _, rest = number.partition(".")
    nbytes, left = divmod(int(whole + rest) * _SIZES[unit], int(10 ** len(rest)))
    if left:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of bytes")
    return nbytes


def seconds(text: str) -> float:
    """Seconds. Raises ArgumentTypeError."""
    try:
        return float(text)
    except ValueError:
        pass
    if not _TIME.fullmatch(text.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30s, 1h30m or 90")
    return sum(float(number) * SECONDS[unit] for number, unit in _PART.findall(text))
