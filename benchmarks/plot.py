"""Draw the figures that benchmarks wrote with --json.

    python benchmarks/plot.py FILE.json ... [--out DIR] [--format svg|png]

A FILE may be of ingest.py, transport.py, scale.py, gpu.py or online.py; each plot is named after it. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib as mpl
except ImportError as error:
    sys.exit(f"plots need {error.name}, which is not installed: pip install 'slotstream[bench]'")

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from online_figures import contenders_of, counted, loads_of, rounds_of

_MIB = 1 << 20
_Plot = tuple[str, Callable[[Axes], None]]


def bars(axes: Axes, names: Sequence[str], values: Sequence[Sequence[float]], label: str) -> None:
    """A bar for the median of each, and a line from its least to its most."""
    middles = [statistics.median(each) for each in values]
    below = [middle - min(each) for middle, each in zip(middles, values, strict=True)]
    above = [max(each) - middle for middle, each in zip(middles, values, strict=True)]
    places = range(len(names) - 1, -1, -1)
    axes.barh(places, middles, xerr=(below, above), color=["#4477aa" if _is_ours(name) else "#bbbbbb" for name in names])
    axes.set_yticks(places, names)
    axes.set_xlabel(label)


def _is_ours(name: str) -> bool:
    return name.startswith(("gRPC TCP", "gRPC unix", "NIXL", "slotstream", "get, ", "grpc", "nixl"))


def lines(axes: Axes, series: dict[str, list[tuple[float, float]]], across: str, up: str, *, linear: bool = False) -> None:
    """A line each through its (x, y), both axes logarithmic, or `linear` from 0."""
    for name, points in series.items():
        ordered = sorted(points)
        style = "-" if _is_ours(name) else "--"
        axes.plot([x for x, _ in ordered], [y for _, y in ordered], style, marker="o", label=name)
    if linear:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    else:
        axes.set_xscale("log", base=10)
        axes.set_yscale("log")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.legend(fontsize="small")


def plots_of_ingest(figures: dict[str, Any]) -> list[_Plot]:
    results = figures["results"]
    names = [result["name"] for result in results]
    speeds = [[one["gb_per_s"] for one in result["rounds"]] for result in results]
    return [("ingest", lambda axes: bars(axes, names, speeds, "GB/s"))]


def plots_of_transport(figures: dict[str, Any]) -> list[_Plot]:
    cells, reads = figures["cells"], figures["reads"]
    plots: list[_Plot] = []
    for chunk_bytes, streams in dict.fromkeys((cell["load"]["chunk_bytes"], cell["load"]["streams"]) for cell in cells):
        here = [c for c in cells if (c["load"]["chunk_bytes"], c["load"]["streams"]) == (chunk_bytes, streams)]
        names = [cell["contender"] for cell in here]
        speeds = [[one["gb_per_s"] for one in cell["rounds"]] for cell in here]
        label = f"GB/s, chunks of {chunk_bytes / _MIB:g} MiB, {streams} streams"
        plots.append((f"{chunk_bytes >> 10}k-{streams}", _bars_of(names, speeds, label)))
    for streams in dict.fromkeys(cell["load"]["streams"] for cell in cells):
        series: dict[str, list[tuple[float, float]]] = {}
        for cell in cells:
            if cell["load"]["streams"] == streams:
                speed = statistics.median(one["gb_per_s"] for one in cell["rounds"])
                series.setdefault(cell["contender"], []).append((cell["load"]["chunk_bytes"] / _MIB, speed))
        if any(len(points) > 1 for points in series.values()):
            plots.append((f"chunks-{streams}", _lines_of(series, f"chunk, MiB ({streams} streams)", "GB/s")))
    if reads:
        names = [read["name"] for read in reads]
        whole = [[1 / seconds for seconds in read["whole_s"]] for read in reads]
        plots.append(("reads", _bars_of(names, whole, "whole samples of 256 MiB a second")))
    return plots


def plots_of_scale(figures: dict[str, Any]) -> list[_Plot]:
    plots: list[_Plot] = []
    for part, column in (("sizes", "sample"), ("connectors", "connectors")):
        if rows := figures[part]:
            names = [f"{row[column]} {'connectors' if part == 'connectors' else 'a sample'}" for row in rows]
            plots.append((part, _bars_of(names, [[row["GB/s"]] for row in rows], "GB/s")))
    if rows := figures["catalogue"]:
        costs = [key for key in rows[0] if key.endswith(" ms")]
        series = {cost.removesuffix(" ms"): [(row["samples"], row[cost]) for row in rows] for cost in costs}
        plots.append(("catalogue", _lines_of(series, "samples at rest", "ms")))
    return plots


def plots_of_gpu(figures: dict[str, Any]) -> list[_Plot]:
    plots: list[_Plot] = []
    for load in ("prefill", "decode"):
        if rows := figures.get(load):
            names = [row["name"] for row in rows]
            speeds = [[one["tokens_per_s"] for one in row["rounds"]] for row in rows]
            plots.append((load, _bars_of(names, speeds, f"tokens/s, {load}")))
    return plots


def plots_of_online(figures: dict[str, Any]) -> list[_Plot]:
    """Latency over requests a second: the median of the rounds that count."""
    series: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for load in (load for load in loads_of(figures["turns"]) if load.startswith("open-")):
        rounds = counted(rounds_of(figures["turns"], load), keep_void=False)
        for what in ("ttft", "itl"):
            for cut in ("p50", "p90", "p99"):
                for name in contenders_of(turn for one in rounds for turn in one.values()):
                    middle = statistics.median(one[name][f"{what}_ms"][cut] for one in rounds if name in one)
                    points = series.setdefault((what, cut), {}).setdefault(name, [])
                    points.append((float(load.removeprefix("open-")), middle))
    return [
        (f"{what}-{cut}", _lines_of(found, "requests a second", f"{what.upper()} {cut}, ms", linear=True))
        for (what, cut), found in series.items()
    ]


def _bars_of(names: Sequence[str], values: Sequence[Sequence[float]], label: str) -> Callable[[Axes], None]:
    return lambda axes: bars(axes, names, values, label)


def _lines_of(
    series: dict[str, list[tuple[float, float]]], across: str, up: str, *, linear: bool = False
) -> Callable[[Axes], None]:
    return lambda axes: lines(axes, series, across, up, linear=linear)


def plots_of(figures: dict[str, Any]) -> list[_Plot]:
    """Which benchmark it is of shows in what it holds."""
    if "cells" in figures:
        return plots_of_transport(figures)
    if "catalogue" in figures:
        return plots_of_scale(figures)
    if "prefill" in figures:
        return plots_of_gpu(figures)
    if "turns" in figures:
        return plots_of_online(figures)
    if "results" in figures:
        return plots_of_ingest(figures)
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--out", type=Path, metavar="DIR", help="put the plots there (default: beside each file)")
    parser.add_argument("--format", choices=("svg", "png"), default="svg", help="default: %(default)s")
    options = parser.parse_args(arguments)
    for file in options.files:
        plots = plots_of(json.loads(file.read_text()))
        if not plots:
            parser.error(f"{file} holds no figures of a benchmark")
        for name, draw in plots:
            figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
            draw(axes)
            target = (options.out or file.parent) / f"{file.stem}-{name}.{options.format}"
            figure.savefig(target)
            plt.close(figure)
            print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
