"""Figures of rows, as they arrive: a block at a time, so that a window takes little more memory than its rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from slotstream.client import RowReader
from slotstream.client.arrays import NumpyArrays

Floats = NDArray[np.float64]


class Bad(StrEnum):
    """What is wrong with a layer of a row; the value is how people read it."""

    NAN = "NaN"
    INF = "inf"
    ZERO = "zero"


@dataclass(frozen=True, slots=True)
class Layer:
    """Figures of one layer of one row. Where elements are no numbers, mean, spread, least and greatest are of the others."""

    norm: float
    cosine: float  # to the layer before; NaN where there is none, or where one of the two has no direction
    mean: float
    spread: float  # the standard deviation
    least: float
    greatest: float
    zeros: int
    nans: int
    infs: int
    bad: Bad | None


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """Of rows [0, n) of a window; [rows, layers] each."""

    norms: Floats
    cosines: Floats  # NaN: see `Layer`
    nans: NDArray[np.int64]
    infs: NDArray[np.int64]
    zero: NDArray[np.bool_]  # Every element is 0.
    row: tuple[Layer, ...]  # Of the row that was asked for; () where none was.

    def bad(self, row: int, layer: int) -> Bad | None:
        if self.nans[row, layer]:
            return Bad.NAN
        if self.infs[row, layer]:
            return Bad.INF
        return Bad.ZERO if self.zero[row, layer] else None

    def worst(self, row: int) -> Bad | None:
        """Of its layers: NaN before inf before zero."""
        kinds = {self.bad(row, layer) for layer in range(self.norms.shape[1])}
        return next((kind for kind in Bad if kind in kinds), None)

    @property
    def bad_rows(self) -> list[int]:
        """Rows with a bad layer, ascending."""
        return [int(row) for row in np.flatnonzero(((self.nans > 0) | (self.infs > 0) | self.zero).any(axis=1))]


def measure(reader: RowReader, row: int | None = None) -> Figures:
    """Figures of all rows of `reader`; `row` counts from its first. Raises what iterating the reader raises."""
    arrays = NumpyArrays()
    shape = (reader.num_rows, len(reader.layer_ids))
    norms, cosines = np.zeros(shape), np.full(shape, np.nan)
    nans, infs, zero = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    picked: Floats | None = None
    for block in reader:
        first = block.first_row - reader.start
        at = slice(first, first + block.rows)
        stored = arrays.of(block.data, reader.info.dtype, (block.rows, shape[1], reader.info.hidden_size))
        with np.errstate(all="ignore"):
            # float64: the square of a float32 may be none.
            rows: Floats = arrays.float32(stored).astype(np.float64)
            norms[at] = np.sqrt(np.einsum("rlh,rlh->rl", rows, rows))
            products = np.einsum("rlh,rlh->rl", rows[:, 1:], rows[:, :-1])
            cosines[at, 1:] = products / (norms[at, 1:] * norms[at, :-1])
        nans[at], infs[at], zero[at] = np.isnan(rows).sum(-1), np.isinf(rows).sum(-1), ~rows.any(axis=-1)
        if row is not None and first <= row < first + block.rows:
            picked = rows[row - first].copy()
    cosines[~np.isfinite(cosines)] = np.nan
    figures = Figures(norms, cosines, nans, infs, zero, ())
    if row is None or picked is None:
        return figures
    layers = tuple(_layer(figures, row, layer, picked[layer]) for layer in range(shape[1]))
    return Figures(norms, cosines, nans, infs, zero, layers)


def _layer(figures: Figures, row: int, layer: int, elements: Floats) -> Layer:
    numbers = elements[np.isfinite(elements)]
    some = numbers if numbers.size else np.full(1, np.nan)
    return Layer(
        norm=float(figures.norms[row, layer]),
        cosine=float(figures.cosines[row, layer]),
        mean=float(some.mean()),
        spread=float(some.std()),
        least=float(some.min()),
        greatest=float(some.max()),
        zeros=int((elements == 0).sum()),
        nans=int(figures.nans[row, layer]),
        infs=int(figures.infs[row, layer]),
        bad=figures.bad(row, layer),
    )
