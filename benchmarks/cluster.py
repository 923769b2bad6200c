"""What a store beyond one machine costs. So far: questions to the catalogue in PostgreSQL, with few samples and with many.

    python benchmarks/cluster.py [--catalogue 10000,1000000] [--json FILE]

It starts a PostgreSQL of its own (`make postgres` installs it). benchmarks/README.md says more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster_catalogue import measure_catalogue
from machine import file_system, machine, progress

_RATIO_MAX = 2.0  # A question with many samples, in parts of one with few.


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/cluster.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--catalogue", default="10000,1000000", help="samples at rest, fewest first (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=100, help="of each kind (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there, too")
    options = parser.parse_args(argv)
    counts = [int(word) for word in options.catalogue.split(",")]
    rows = []
    for count in counts:
        progress(f"[{count} samples]")
        rows.append(measure_catalogue(count, min(options.questions, count)))
    verdicts = _verdicts(rows)
    figures = {
        "benchmark": "cluster",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "file_system": file_system(Path("/tmp")),
        "catalogue": rows,
        "verdicts": verdicts,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    progress("\n")
    _print(rows, verdicts)
    return 0


def _verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each question with the most samples, in parts of one with the fewest."""
    few, many = rows[0], rows[-1]
    return [
        {"what": name.removesuffix(" ms"), "ratio": many[name] / few[name], "met": many[name] / few[name] <= _RATIO_MAX}
        for name in few
        if name.endswith(" ms")
    ]


def _print(rows: list[dict[str, Any]], verdicts: list[dict[str, Any]]) -> None:
    names = [name for name in rows[0] if name != "samples"]
    ratios = {f"{verdict['what']} ms": verdict for verdict in verdicts}
    heads = " | ".join(f"{row['samples']} samples" for row in rows)
    print(f"| | {heads} | many / few |")
    print(f"| --- | {' | '.join(['---:'] * len(rows))} | --- |")
    for name in names:
        verdict = ratios.get(name)
        said = "" if verdict is None else f"{verdict['ratio']:.2f}: {'met' if verdict['met'] else '**missed**'}"
        print(f"| {name} | {' | '.join(f'{row[name]:.2f}' for row in rows)} | {said} |")


if __name__ == "__main__":
    sys.exit(main())
