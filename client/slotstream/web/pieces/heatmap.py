"""The map of a window: a cell for each token and layer, in bands that fit a narrow screen. Numbers and classes, no styles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slotstream.web.measuring import Bad, Figures
from slotstream.web.window import Window

BAND_COLUMNS = 32
LEVELS = 10
CELL = 10  # Units of the drawing; on most screens a pixel each.
_LEFT, _TOP = 34, 12  # For the names of layers, and the numbers of rows.
_LABELS_MAX = 24
_NAMED_MAX = 8  # Layers of a bad row.
_MARKS = {Bad.NAN: "N", Bad.INF: "∞", Bad.ZERO: "0"}


@dataclass(frozen=True, slots=True)
class Cell:
    x: int
    y: int
    mark: str
    kind: str


@dataclass(frozen=True, slots=True)
class Label:
    x: int
    y: int
    text: str


@dataclass(frozen=True, slots=True)
class Band:
    """Rows [first, last] of the sample as one drawing; `paths`: by level, all cells of that level as one path."""

    first: int
    last: int
    width: int
    height: int
    left: int
    top: int
    cell: int
    paths: tuple[tuple[int, str], ...]
    bad: tuple[Cell, ...]
    none: str  # A path of the cells that have no value, and are not bad.
    layers: tuple[Label, ...]
    rows: tuple[Label, ...]
    columns: tuple[tuple[int, int], ...]  # (row, x): each leads to the figures of its row.
    picked: int | None  # The x of the row that was asked for.


@dataclass(frozen=True, slots=True)
class Heatmap:
    bands: tuple[Band, ...]
    least: float | None  # None: no cell has a value.
    greatest: float | None


def heatmap(window: Window, view: str) -> Heatmap:
    """`view`: `norm`, coloured by its logarithm, or `cosine`. Both from the least to the greatest value of this window."""
    figures = window.figures
    bad = (figures.nans > 0) | (figures.infs > 0) | figures.zero
    values = np.where(bad, np.nan, figures.norms if view == "norm" else figures.cosines)
    some = values[np.isfinite(values)]
    least, greatest = (float(some.min()), float(some.max())) if some.size else (None, None)
    levels = _levels(values, logarithm=view == "norm")
    bands = (_band(window, levels, at) for at in range(0, window.num_rows, BAND_COLUMNS))
    return Heatmap(tuple(bands), least, greatest)


def _levels(values: NDArray[np.float64], *, logarithm: bool) -> NDArray[np.int64]:
    """0 to 9, and -1 where there is no value."""
    with np.errstate(all="ignore"):
        scaled = np.log(values) if logarithm else values
    known = np.isfinite(scaled)
    levels = np.full(values.shape, -1, np.int64)
    if known.any():
        low, high = scaled[known].min(), scaled[known].max()
        share = (scaled[known] - low) / (high - low) if high > low else np.full(int(known.sum()), 0.5)
        levels[known] = np.minimum(LEVELS - 1, np.floor(share * LEVELS)).astype(np.int64)
    return levels


def _band(window: Window, levels: NDArray[np.int64], at: int) -> Band:
    figures, stop = window.figures, min(at + BAND_COLUMNS, window.num_rows)
    columns, layers = stop - at, levels.shape[1]
    part = levels[at:stop]
    bad = [
        Cell(_LEFT + column * CELL, _TOP + layer * CELL, _MARKS[kind], kind.lower())
        for column in range(columns)
        for layer in range(layers)
        if (kind := figures.bad(at + column, layer))
    ]
    marked = {((cell.x - _LEFT) // CELL, (cell.y - _TOP) // CELL) for cell in bad}
    none = [(c, y) for c, y in zip(*np.nonzero(part < 0), strict=True) if (int(c), int(y)) not in marked]
    paths = ((level, _path(part == level)) for level in range(LEVELS))
    step = math.ceil(layers / _LABELS_MAX)
    first = window.start + at
    return Band(
        first=first,
        last=window.start + stop - 1,
        width=_LEFT + BAND_COLUMNS * CELL,
        height=_TOP + layers * CELL,
        left=_LEFT,
        top=_TOP,
        cell=CELL,
        paths=tuple((level, path) for level, path in paths if path),
        bad=tuple(bad),
        none="".join(f"M{_LEFT + c * CELL} {_TOP + y * CELL}h{CELL - 1}v{CELL - 1}h{1 - CELL}z" for c, y in none),
        layers=tuple(
            Label(_LEFT - 4, _TOP + layer * CELL + 8, name)
            for layer, name in enumerate(window.layer_names)
            if layer % step == 0 or layer == layers - 1
        ),
        rows=tuple(Label(_LEFT + c * CELL, _TOP - 4, str(first + c)) for c in range(0, columns, BAND_COLUMNS // 4)),
        columns=tuple((first + column, _LEFT + column * CELL) for column in range(columns)),
        picked=None if window.row is None or not first <= window.row < first + columns else _LEFT + (window.row - first) * CELL,
    )


def _path(cells: NDArray[np.bool_]) -> str:
    """Squares with a gap of one unit; [columns, layers]."""
    side = CELL - 1
    found: Sequence[tuple[int, int]] = [(int(c), int(y)) for c, y in zip(*np.nonzero(cells), strict=True)]
    return "".join(f"M{_LEFT + c * CELL} {_TOP + y * CELL}h{side}v{side}h-{side}z" for c, y in found)


def bad_rows(window: Window, most: int) -> list[tuple[int, str]]:
    """The first bad rows of a window, each with what is wrong in which layers."""
    return [(window.start + row, _what(window.figures, window.layer_names, row)) for row in window.figures.bad_rows[:most]]


def _what(figures: Figures, names: Sequence[str], row: int) -> str:
    by_kind: dict[Bad, list[str]] = {}
    for layer, name in enumerate(names):
        if kind := figures.bad(row, layer):
            by_kind.setdefault(kind, []).append(name)
    return "; ".join(f"{'all zeros' if kind is Bad.ZERO else kind} in {_where(said, names)}" for kind, said in by_kind.items())


def _where(layers: Sequence[str], names: Sequence[str]) -> str:
    if len(layers) == len(names):
        return "every layer"
    more = f" and {len(layers) - _NAMED_MAX} more" if len(layers) > _NAMED_MAX else ""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(layers[:_NAMED_MAX])}{more}"
