"""Samples that the tests of the page look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from support.synthetic import SyntheticSample

ZERO_ROW, NAN_ROW, INF_ROW = 7, 11, 13


@dataclass(frozen=True)
class OddSample(SyntheticSample):
    """float32 noise; with `bad`, row 7 all zeros, a NaN in the second layer of row 11, an infinity in the third of row 13."""

    dtype: str = "F32"
    layer_ids: tuple[int, ...] = (2, 18, 33, 37)
    bad: bool = True

    def array(self) -> np.ndarray[tuple[int, int, int], np.dtype[np.float32]]:
        """float32 [tokens, layers, hidden]."""
        shape = (self.num_tokens, len(self.layer_ids), self.hidden_size)
        rows = np.random.default_rng(self.seed).standard_normal(shape).astype(np.float32)
        rows[:, 1:] += rows[:, :-1]
        if self.bad:
            rows[ZERO_ROW], rows[NAN_ROW, 1, 3], rows[INF_ROW, 2, 5] = 0, np.nan, np.inf
        return rows

    def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
        return self.array()[start:stop].tobytes()


MARKUP = '<img src=x onerror="alert(1)">&amp;'
ODD = OddSample(
    "odd",
    namespace="a",
    tags={"run": "eagle3", "<b>key</b>": MARKUP},
    metadata={
        "engine_id": "<script>engine</script>",
        "prompt_tokens": "24",
        "token_start": "4",
        "layer_names": '["2", "18", "33", "final"]',
    },
)
LONG = OddSample("long", namespace="a", num_tokens=600, bad=False)
FAILED = SyntheticSample("failed", namespace="a")
