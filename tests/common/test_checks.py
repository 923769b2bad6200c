from __future__ import annotations

import math

import pytest

from slotstream.common.checks import check_number


@pytest.mark.parametrize(
    ("value", "limits", "whole"),
    [
        (0, (0, 1), True),
        (1, (0, 1), True),
        (0.5, (0, 1), False),
        (10**30, (0, math.inf), False),
        (math.inf, (0, math.inf), False),
    ],
)
def test_numbers_within_their_limits(value: float, limits: tuple[float, float], whole: bool) -> None:
    check_number("--x", value, *limits, whole=whole)


@pytest.mark.parametrize(
    ("value", "limits", "whole", "sentence"),
    [
        (2, (0, 1), True, "--x must be a whole number from 0 to 1, not 2"),
        (-1, (0, 1), False, "--x must be a number from 0 to 1, not -1"),
        (0.5, (0, 1), True, "--x must be a whole number from 0 to 1, not 0.5"),
        (True, (0, 1), True, "--x must be a whole number from 0 to 1, not True"),
        ("1", (0, 1), False, "--x must be a number from 0 to 1, not '1'"),
        (None, (0, math.inf), False, "--x must be a number of at least 0, not None"),
        (math.nan, (0, math.inf), False, "--x must be a number of at least 0, not nan"),
        (3, (4, (1 << 62) - 1), False, "--x must be a number of at least 4, not 3"),
        (1 << 62, (4, (1 << 62) - 1), False, f"--x must be a number from 4 to {(1 << 62) - 1}, not {1 << 62}"),
        ("x" * 99, (0, 1), False, "--x must be a number from 0 to 1, not '" + "x" * 39),
    ],
)
def test_one_sentence_says_what_is_allowed(value: object, limits: tuple[float, float], whole: bool, sentence: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        check_number("--x", value, *limits, whole=whole)
    assert str(caught.value) == sentence
