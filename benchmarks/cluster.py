"""What a store beyond one machine costs: what samples take of our servers' processors through objects and through files, and
questions to the catalogue in PostgreSQL with few samples and with many.

    python benchmarks/cluster.py [--samples-mib 4,32] [--catalogue 10000,1000000] [--json FILE]

It starts a PostgreSQL (`make postgres` installs it) and an object store of its own. benchmarks/README.md says more.
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
from cluster_servers import LOCAL, measure_servers
from machine import file_system, machine, progress

_LEAST_S = 0.001  # A gibibyte: of very few samples a process's clock sees nothing.
_RATIO_MAX = 2.0  # A question with many samples, in parts of one with few.


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/cluster.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--catalogue", default="10000,1000000", help="samples at rest, fewest first (default: %(default)s)")
    parser.add_argument("--samples-mib", default="4,32", help="sizes of samples through servers (default: %(default)s)")
    parser.add_argument("--total-mib", type=int, default=512, help="of each size, a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each server; the median counts (default: %(default)s)")
    parser.add_argument("--work-dir", metavar="DIR", type=Path, default=Path("/tmp"), help="of files (default: /tmp)")
    parser.add_argument("--questions", type=int, default=100, help="of each kind (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there, too")
    options = parser.parse_args(argv)
    counts = [int(word) for word in options.catalogue.split(",") if word]
    sizes = [int(word) for word in options.samples_mib.split(",") if word]
    servers = measure_servers(sizes, options.total_mib, options.rounds, options.work_dir)
    rows = []
    for count in counts:
        progress(f"[{count} samples]")
        rows.append(measure_catalogue(count, min(options.questions, count)))
    verdicts = _server_verdicts(servers) + _verdicts(rows)
    figures = {
        "benchmark": "cluster",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "file_system": file_system(options.work_dir),
        "servers": servers,
        "catalogue": rows,
        "verdicts": verdicts,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    progress("\n")
    _print_servers(servers)
    if rows:
        _print(rows, verdicts)
    return 0


def _server_verdicts(servers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each server with objects, in parts of the one with files."""
    return [
        {"what": f"{what}, {line['sample_mib']} MiB, {name}", "ratio": ratio, "met": ratio <= _RATIO_MAX}
        for line, name, what, ratio in _ratios(servers)
    ]


def _ratios(servers: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str, str, float]]:
    return [
        (line, name, what, both[what] / max(line[LOCAL][what], _LEAST_S))
        for line in servers
        for name, both in line.items()
        if isinstance(both, dict) and name != LOCAL
        for what in both
    ]


def _print_servers(servers: list[dict[str, Any]]) -> None:
    print("| processor s a GiB, of our servers | files | with objects | of files |\n| --- | ---: | ---: | --- |")
    for line, name, what, ratio in _ratios(servers):
        said = "met" if ratio <= _RATIO_MAX else "**missed**"
        about = f"{what}, samples of {line['sample_mib']} MiB, {name}"
        print(f"| {about} | {line[LOCAL][what]:.2f} | {line[name][what]:.2f} | {ratio:.2f}: {said} |")
    print()


def _verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each question with the most samples, in parts of one with the fewest."""
    if not rows:
        return []
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
