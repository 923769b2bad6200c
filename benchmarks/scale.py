"""What a sample costs as samples, connectors and stored samples become more: it should stay flat.

    python benchmarks/scale.py [--full] [--json FILE]

Samples of several sizes from one connector; one to many connectors; a catalogue of 10^4 and 10^5 samples at rest (10^6 with
--full). All of it against a real `slotstream serve` over loopback TCP. benchmarks/README.md says more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from children import ChildFailed, tree_cpu_seconds
from contenders import Server
from load import ROW_BYTES, Load, Senders, source
from machine import file_system, machine, progress
from scale_catalogue import measure_catalogue, resident_mib
from transport_ours import SinkStream

_MIB = 1 << 20
_GB = 1e9
_CHUNK_BYTES = 2 << 20  # The connector's default.
_SIZES = {"0.1 MiB": (3 * ROW_BYTES, 1), "1 MiB": (_MIB, 1), "12 MiB": (_CHUNK_BYTES, 6), "100 MiB": (_CHUNK_BYTES, 50)}
_CONNECTOR_SAMPLE = _SIZES["12 MiB"]
_SENDERS_MAX = 4  # Processes; connectors are spread over them.
_JUDGED, _KILLED_RATIO_MAX = 10**5, 3.0  # Samples at rest, and a start after a kill with so many, in parts of a clean one.
_PARTS = ("sizes", "connectors", "catalogue")


class ManySinks:
    """Several connectors in one process, each with a stream of its own. A `load.Stream`; the load is that of each."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._memory = source()
        self._sinks: list[SinkStream] = []

    def connect(self, count: int, load: Load) -> None:
        self._sinks = [SinkStream(self._address, "grpc", True, self._memory) for _ in range(count)]
        self._all("prepare", load)

    def run(self) -> list[float]:
        return [one for taken in self._all("run") for one in taken]

    def clear(self) -> None:
        self._all("clear")

    def release(self) -> None:
        self._all("release")

    def _all(self, what: str, *arguments: Any) -> list[Any]:
        with ThreadPoolExecutor(len(self._sinks)) as pool:
            return [each.result() for each in [pool.submit(getattr(sink, what), *arguments) for sink in self._sinks]]


def measure_load(options: argparse.Namespace, server: Server, connectors: int, load: Load) -> dict[str, Any]:
    """Medians of the rounds; the first run is not counted. `load` is that of one connector."""
    processes = min(connectors, _SENDERS_MAX)
    senders = Senders("scale", ManySinks, server.address, environment={})
    rounds = []
    try:
        senders.start(processes)
        senders.all("connect", connectors // processes, load)
        senders.all("run")
        senders.all("clear")
        pids = [*senders.pids, server.pid]
        gb = connectors * load.total_bytes / _GB
        for _ in range(options.rounds):
            before = sum(map(tree_cpu_seconds, pids))
            seconds, answers = senders.all("run")
            used = sum(map(tree_cpu_seconds, pids)) - before
            senders.all("clear")
            taken = sorted(1e3 * one for answer in answers for one in answer)
            rounds.append((gb / seconds, used / gb, seconds, taken[len(taken) // 2], taken[int(len(taken) * 0.99)]))
        senders.all("release")
    finally:
        senders.close()
    samples = connectors * load.samples
    speed, cpu, seconds, p50, p99 = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {
        "GB/s": speed,
        "CPU s/GB": cpu,
        "samples/s": samples / seconds,
        "CPU ms a sample": 1e3 * cpu * gb / samples,
        "p50 ms": p50,
        "p99 ms": p99,
        "server MiB": resident_mib(server.pid),
    }


def measure_sizes(options: argparse.Namespace, server: Server) -> list[dict[str, Any]]:
    rows = []
    for name, (chunk_bytes, chunks) in _SIZES.items():
        progress(f"samples of {name}\n")
        samples = min(512, max(2, options.mib * _MIB // (chunk_bytes * chunks)))
        rows.append({"sample": name, **measure_load(options, server, 1, Load(chunk_bytes, 1, samples, chunks))})
    return rows


def measure_connectors(options: argparse.Namespace, server: Server) -> list[dict[str, Any]]:
    rows = []
    chunk_bytes, chunks = _CONNECTOR_SAMPLE
    for connectors in options.connectors:
        progress(f"{connectors} connectors\n")
        samples = max(1, options.mib * _MIB // (chunk_bytes * chunks * connectors))
        load = Load(chunk_bytes, 1, samples, chunks)
        rows.append({"connectors": str(connectors), **measure_load(options, server, connectors, load)})
    return rows


def measure_catalogues(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    rows = []
    for count in options.catalogue:
        progress(f"catalogue of {count}\n")
        data = work / f"catalogue-{count}"
        rows.append(measure_catalogue(count, data))
        shutil.rmtree(data)
    return rows


def report(rows: Sequence[dict[str, Any]]) -> str:
    """One table; the first column says what was varied."""
    if not rows:
        return ""
    heads = list(rows[0])
    widths = [max(len(head), 10) + 2 for head in heads]
    lines = ["", "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    for row in rows:
        cells = map(_shown, row.values())
        lines.append("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    return "\n".join(lines)


def _shown(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def flatness(rows: Sequence[dict[str, Any]]) -> str:
    """What each cost of the largest catalogue is in parts of that of the smallest."""
    if len(rows) < 2:
        return ""
    few, many = rows[0], rows[-1]
    costs = ", ".join(f"{key.removesuffix(' ms')} {many[key] / few[key]:.2f}" for key in few if key.endswith(" ms"))
    return f"with {many['samples'] / few['samples']:g} times as many samples at rest a request costs times: {costs}"


def starts(rows: Sequence[dict[str, Any]]) -> str:
    """How long a start after a kill takes, in parts of one after a clean stop, against the target."""
    lines = []
    for row in rows:
        ratio = row["after a kill / clean"]
        met = (
            ""
            if row["samples"] != _JUDGED
            else f" (at most {_KILLED_RATIO_MAX:g}: {'met' if ratio <= _KILLED_RATIO_MAX else 'MISSED'})"
        )
        lines.append(
            f"with {row['samples']:,} samples a start after a kill takes {ratio:.2f} times as long as after a clean stop{met}"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--full", action="store_true", help="a catalogue of 10^6 samples too")
    add("--parts", type=lambda text: text.split(","), default=list(_PARTS), metavar="NAMES", help=f"of {', '.join(_PARTS)}")
    add("--connectors", type=_numbers, default=[1, 4, 16, 64], metavar="N", help="how many (default: 1,4,16,64)")
    add("--catalogue", type=_numbers, default=[10**4, 10**5], metavar="N", help="samples at rest (default: 10^4 and 10^5)")
    add("--mib", type=int, default=384, metavar="N", help="sent in a run (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="runs to take medians of (default: %(default)s)")
    add("--work-dir", type=Path, default=Path(), metavar="DIR", help="put a temporary data directory here (default: .)")
    add("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    if options.full:
        options.catalogue = [10**4, 10**5, 10**6]
    if unknown := set(options.parts) - set(_PARTS):
        parser.error(f"--parts: unknown {sorted(unknown)}")
    if min(*options.connectors, options.mib, options.rounds) < 1:
        parser.error("--connectors, --mib and --rounds must be at least 1")
    if any(count > _SENDERS_MAX and count % _SENDERS_MAX for count in options.connectors):
        parser.error(f"--connectors above {_SENDERS_MAX} are spread evenly over {_SENDERS_MAX} processes")
    if min(options.catalogue) < 1000:
        parser.error("--catalogue must be at least 1000")
    return options


def _numbers(text: str) -> list[int]:
    return [int(float(part)) for part in text.split(",")]


def run(options: argparse.Namespace, work: Path) -> dict[str, list[dict[str, Any]]]:
    figures: dict[str, list[dict[str, Any]]] = {part: [] for part in _PARTS}
    if {"sizes", "connectors"} & set(options.parts):
        server = Server("127.0.0.1:0", work / "data", "--transport", "grpc")
        try:
            if "sizes" in options.parts:
                figures["sizes"] = measure_sizes(options, server)
            if "connectors" in options.parts:
                figures["connectors"] = measure_connectors(options, server)
        finally:
            server.close()
    if "catalogue" in options.parts:
        figures["catalogue"] = measure_catalogues(options, work)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    host = machine()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: no process and no data directory stays behind.
    with tempfile.TemporaryDirectory(prefix="slotstream-bench-", dir=options.work_dir.absolute()) as work:
        Path(work, ".gitignore").write_text("*\n")  # It may lie in a checkout while this runs.
        disk, date = file_system(Path(work)), f"{datetime.now(UTC):%Y-%m-%d}"
        print(f"{date}: {host['cpus']} CPUs ({host['cpu']}), {host['memory_gib']} GiB, {disk}", flush=True)
        try:
            figures = run(options, Path(work))
        except ChildFailed as error:
            print(f"scale benchmark: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    for part in _PARTS:
        print(report(figures[part]))
    print(flatness(figures["catalogue"]))
    print(starts(figures["catalogue"]))
    if options.json is not None:
        said: dict[str, Any] = {"benchmark": "scale", "date": date, "machine": {**host, "file_system": disk}, **figures}
        options.json.write_text(json.dumps(said, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
