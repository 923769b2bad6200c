"""How fast rows get to a server, over each transport, beside what the machine and others do.

    python benchmarks/transport.py [--full] [--json FILE]

Every contender runs in processes of its own, in interleaved rounds: absolute figures do not travel from one machine, or one
minute, to the next; ratios within a round do. benchmarks/README.md says what each row means.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from children import ChildFailed
from load import ROW_BYTES, Load
from machine import file_system, machine, plain, progress
from transport_contenders import DURABLE, NULL, OURS, PLAIN_FILE, STORED, Contender, Round, assembled, missing
from transport_reads import Read, judge_reads, measure_reads, report_reads

from slotstream.wire.names import CHUNK_BYTES_MAX

_KIB, _MIB = 1 << 10, 1 << 20
_TARGET_CHUNK = _MIB
_PARTS = ("null", "stored", "reads")


@dataclass(slots=True)
class Cell:
    """One contender under one load."""

    contender: str
    load: Load
    rounds: list[Round] = field(default_factory=list)

    def median(self, what: str) -> float | None:
        found = [value for one in self.rounds if (value := getattr(one, what)) is not None]
        return statistics.median(found) if found else None


def measure(options: argparse.Namespace, contenders: Sequence[Contender]) -> list[Cell]:
    """All loads, each in rounds of all contenders, one after the other, never two at once."""
    cells: list[Cell] = []
    for streams in options.streams:
        for chunk_kib in options.chunks:
            load = Load.of(chunk_kib * _KIB, streams, options.mib * _MIB)
            here = [(contender, Cell(contender.name, load)) for contender in contenders if contender.takes(load)]
            cells += [cell for _, cell in here]
            for number in range(options.rounds):
                progress(f"{chunk_kib} KiB, {streams} streams, round {number + 1}/{options.rounds}:")
                for contender, cell in here:
                    cell.rounds.append(contender.measure(load))
                    progress(f"  {contender.name} {cell.rounds[-1].gb_per_s:.2f}")
                progress("\n")
    return cells


def report(cells: Sequence[Cell]) -> str:
    """A table a load."""
    lines: list[str] = []
    load = None
    for cell in cells:
        if cell.load != load:
            load = cell.load
            title = f"{load.chunk_bytes / _MIB:g} MiB chunks, {load.streams} {'stream' if load.streams == 1 else 'streams'}"
            lines += [
                "",
                f"{title:26}{'GB/s':>7}{'min':>7}{'max':>7}{'CPU s/GB':>10}{'p50 ms':>9}{'p99 ms':>9}{'alone ms':>10}",
            ]
        speeds = [one.gb_per_s for one in cell.rounds]
        waits = "".join(_shown(cell.median(what), width) for what, width in (("p50_ms", 9), ("p99_ms", 9), ("alone_ms", 10)))
        lines.append(
            f"{cell.contender:26}{statistics.median(speeds):>7.2f}{min(speeds):>7.2f}{max(speeds):>7.2f}"
            f"{cell.median('cpu_s_per_gb'):>10.2f}{waits}"
        )
    return "\n".join(lines)


def _shown(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.2f}"


def judge(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The targets that these cells can say something of. The rounds decide: see `ingest.judge`."""
    verdicts: list[dict[str, Any]] = []
    for load in dict.fromkeys(cell.load for cell in cells if cell.load.chunk_bytes == _TARGET_CHUNK):
        found = {cell.contender: [one.gb_per_s for one in cell.rounds] for cell in cells if cell.load == load}

        def verdict(ours: str, others: Sequence[str], target: float, load: Load = load, found: Any = found) -> None:
            if ours in found and all(other in found for other in others):
                bounds = zip(*(found[other] for other in others), strict=True)
                ratios = [mine / min(bound) for mine, bound in zip(found[ours], bounds, strict=True)]
                what = f"{ours} / {'the slower of ' if len(others) > 1 else ''}{' and '.join(others)}"
                verdicts.append(verdict_of(f"{what}, {load.streams} streams", ratios, target, at_least=True))

        verdict("gRPC TCP", ["Arrow Flight"], 1.0)
        verdict("NIXL CMA", ["raw TCP"], 1.5)
        verdict("NIXL TCP", ["raw TCP"], 0.9)
        for ours in OURS:
            verdict(ours + STORED, [ours, PLAIN_FILE], 0.8)
    return verdicts


def verdict_of(what: str, ratios: Sequence[float], target: float, *, at_least: bool) -> dict[str, Any]:
    ratio = statistics.median(ratios)
    met = ratio >= target if at_least else ratio < target
    return {"what": what, "ratio": ratio, "ratio_of_rounds": list(ratios), "target": target, "at_least": at_least, "met": met}


def report_verdicts(verdicts: Sequence[dict[str, Any]]) -> str:
    lines = ["", "targets (medians of the rounds' ratios):"]
    for one in verdicts:
        bound = "at least" if one["at_least"] else "under"
        rounds = " ".join(f"{ratio:.3g}" for ratio in one["ratio_of_rounds"])
        lines.append(
            f"{'met    ' if one['met'] else 'NOT met'} {one['what']}: {one['ratio']:.3g} ({rounds}), {bound} {one['target']}"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--full", action="store_true", help="chunks of 256 KiB to 64 MiB, 1 to 8 streams: about an hour")
    add("--chunks", type=_numbers, default=[1024], metavar="KIB", help="chunk sizes (default: 1024)")
    add("--streams", type=_numbers, default=[1, 4], metavar="N", help="senders at a time (default: 1,4)")
    add("--parts", type=_words, default=list(_PARTS), metavar="NAMES", help=f"of {', '.join(_PARTS)} (default: all)")
    add("--only", type=_words, metavar="NAMES", help="only these contenders, as the tables name them")
    add("--mib", type=int, default=512, metavar="N", help="moved in a run, all streams together (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="interleaved rounds to take medians of (default: %(default)s)")
    add("--work-dir", type=Path, default=Path(), metavar="DIR", help="put a temporary data directory here (default: .)")
    add("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    if options.full:
        options.chunks, options.streams, options.rounds = [256, 1024, 2048, 8192, 16384, 65536], [1, 2, 4, 8], 5
    if unknown := set(options.parts) - set(_PARTS):
        parser.error(f"--parts: unknown {sorted(unknown)}")
    if unknown := set(options.only or ()) - {*NULL, *DURABLE}:
        parser.error(f"--only: unknown {sorted(unknown)}; known: {[*NULL, *DURABLE]}")
    if any(chunk * _KIB % ROW_BYTES for chunk in options.chunks):
        parser.error(f"--chunks: a chunk is whole rows of {ROW_BYTES // _KIB} KiB")
    if min(*options.chunks, *options.streams, options.mib, options.rounds) < 1:
        parser.error("--chunks, --streams, --mib and --rounds must be at least 1")
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def run(options: argparse.Namespace, work: Path) -> tuple[list[Cell], list[Read]]:
    absent = missing()
    for name, why in absent.items():
        print(f"left out: {name}: {why}")

    def present(names: Sequence[str]) -> list[str]:
        return [name for name in names if not any(name.startswith(one) for one in absent)]

    names = [*(NULL if "null" in options.parts else ()), *(DURABLE if "stored" in options.parts else ())]
    names = [name for name in present(names) if options.only is None or name in options.only]
    cells: list[Cell] = []
    reads: list[Read] = []
    with tempfile.TemporaryDirectory(prefix="slotstream-") as sockets:
        if names:
            with assembled(names, Path(sockets), work) as contenders:
                cells = measure(options, contenders)
        if "reads" in options.parts:
            reads = measure_reads(present, options.rounds, Path(sockets), work)
    return cells, reads


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    host = machine()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: no process and no data directory stays behind.
    with tempfile.TemporaryDirectory(prefix="slotstream-bench-", dir=options.work_dir.absolute()) as work:
        Path(work, ".gitignore").write_text("*\n")  # It may lie in a checkout while this runs.
        disk = file_system(Path(work))
        date = f"{datetime.now(UTC):%Y-%m-%d}"
        print(
            f"{date}: {host['cpus']} CPUs ({host['cpu']}), {host['memory_gib']} GiB, {disk}; "
            f"{options.mib} MiB a run; medians of {options.rounds} rounds",
            flush=True,
        )
        if max(options.chunks) * _KIB > CHUNK_BYTES_MAX:
            print(
                f"slotstream's protocol takes chunks of at most {CHUNK_BYTES_MAX // _MIB} MiB: larger ones are the others' only"
            )
        try:
            cells, reads = run(options, Path(work))
        except ChildFailed as error:
            print(f"transport benchmark: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    verdicts = [*judge(cells), *judge_reads(reads, verdict_of)]
    print(report(cells) + report_reads(reads) + "\n" + report_verdicts(verdicts))
    if options.json is not None:
        figures = {
            "benchmark": "transport",
            "date": date,
            "machine": {**host, "file_system": disk},
            "options": plain(options),
            "cells": [asdict(cell) for cell in cells],
            "reads": [asdict(read) for read in reads],
            "verdicts": verdicts,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
