"""What more processes bring a server: `slotstream serve --workers N` beside a server of one process.

    python benchmarks/workers.py [--workers N] [--connector-streams N] [--json FILE]

Every stream comes from a process of its own, over each transport; samples are stored in memory, so that the processes and not
the disk decide. Both servers run in each round, one after the other, never at once. With `--connector-streams`, one sender of N
streams, as a connector has them, is measured beside one of a single stream, and what N processes copy without slotstream.
benchmarks/README.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from children import ChildFailed
from contenders import Server
from copies import Copies, measure_copies, report_copies
from load import SOURCE_BYTES, Load, Senders
from machine import file_system, machine, plain, progress
from transport_contenders import Contender, Round
from transport_ours import SinkStream

from slotstream.connector.options import STREAMS_MAX
from slotstream.wire.nixl import INSTALL, is_installed

_MIB = 1 << 20
_CHUNK_BYTES = 2 << 20  # The connector's default.
_STAGING_BYTES = 512 << 20  # The least that it takes by default.
_NAMES = {"grpc": "gRPC", "nixl": "NIXL"}
_TRANSPORTS = ("grpc", "nixl") if is_installed() else ("grpc",)


@dataclass(slots=True)
class Pair:
    """Both servers under one load: `one` and `many` are the rounds of each, in the same order."""

    transport: str
    streams: int
    one: list[Round] = field(default_factory=list)
    many: list[Round] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """How much faster `many` stored, round by round."""
        return [many.gb_per_s / one.gb_per_s for one, many in zip(self.one, self.many, strict=True)]


@contextmanager
def started(transport: str, workers: int, work: Path, streams: int = 1, staging: int = SOURCE_BYTES) -> Iterator[Contender]:
    """A server of `workers` processes, and senders of `streams` each to it, which send from `staging` bytes."""
    name = f"{transport}, {workers} processes, {streams} streams a sender"
    with ExitStack() as stack:
        data = work / f"{transport}-{workers}-{streams}"
        server = Server("127.0.0.1:0", data, "--transport", transport, "--workers", str(workers))
        stack.callback(server.close)
        senders = Senders(name, SinkStream, server.address, transport, True, None, streams, staging, environment={})
        stack.callback(senders.close)
        yield Contender(name, senders, (server.pid,))


def measure_connectors(options: argparse.Namespace, work: Path) -> list[Pair]:
    """A sender of one stream (`one`), and one of several (`many`), each to a server of as many processes as streams."""
    pairs: list[Pair] = []
    streams = options.connector_streams
    for transport in options.transports if streams > 1 else ():
        few, more = (started(transport, count, work, count, _STAGING_BYTES) for count in (1, streams))
        with few as one, more as many:
            pairs.append(pair := Pair(transport, streams))
            load = Load.of(_CHUNK_BYTES, 1, options.mib * _MIB)
            for number in range(options.rounds):
                progress(f"{_NAMES[transport]}, a sender of {streams} streams, round {number + 1}/{options.rounds}:")
                pair.one.append(one.measure(load))
                pair.many.append(many.measure(load))
                progress(f"  {pair.one[-1].gb_per_s:.2f}  {pair.many[-1].gb_per_s:.2f}\n")
    return pairs


def measure(options: argparse.Namespace, work: Path) -> list[Pair]:
    """All rounds. A new connection goes to a process of the kernel's choice: in each round the streams are dealt out again."""
    pairs: list[Pair] = []
    for transport in options.transports:
        with started(transport, 1, work) as one, started(transport, options.workers, work) as many:
            for streams in options.streams:
                pairs.append(pair := Pair(transport, streams))
                load = Load.of(_CHUNK_BYTES, streams, options.mib * _MIB)
                for number in range(options.rounds):
                    progress(f"{_NAMES[transport]}, {streams} streams, round {number + 1}/{options.rounds}:")
                    pair.one.append(one.measure(load))
                    pair.many.append(many.measure(load))
                    progress(f"  {pair.one[-1].gb_per_s:.2f}  {pair.many[-1].gb_per_s:.2f}\n")
    return pairs


def report(pairs: Sequence[Pair], first: str, second: str) -> str:
    """The table: medians of the rounds of both, under these names."""

    def shown(rounds: Sequence[Round]) -> str:
        speed = statistics.median(one.gb_per_s for one in rounds)
        return f"{speed:>10.2f}{statistics.median(one.cpu_s_per_gb for one in rounds):>10.2f}"

    columns = f"{'GB/s':>10}{'CPU s/GB':>10}"
    lines = [f"{'':18}{first + ':':>20}{second + ':':>20}", f"{'':18}{columns}{columns}{'ratio':>8}"]
    for pair in pairs:
        what = f"{_NAMES[pair.transport]}, {pair.streams} {'stream' if pair.streams == 1 else 'streams'}"
        span = f"({min(pair.ratios):.2f} to {max(pair.ratios):.2f})"
        lines.append(f"{what:18}{shown(pair.one)}{shown(pair.many)}{statistics.median(pair.ratios):>8.2f} {span}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    cores = len(os.sched_getaffinity(0))
    workers = min(8, max(2, cores // 2))
    add("--workers", type=int, default=workers, metavar="N", help="processes of the larger server (default here: %(default)s)")
    add("--streams", type=_numbers, default=[1, 2, 4], metavar="N", help="senders at a time (default: 1,2,4)")
    add(
        "--transports", nargs="+", choices=("grpc", "nixl"), default=_TRANSPORTS, help="what rows take (default: all installed)"
    )
    add("--connector-streams", type=int, default=1, metavar="N", help="also measure one sender of N streams (default: none)")
    add("--mib", type=int, default=1024, metavar="N", help="stored in a run, all streams together (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="interleaved rounds to take medians of (default: %(default)s)")
    add("--work-dir", type=Path, default=Path("/dev/shm"), metavar="DIR", help="put the data here (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    if options.workers < 2 or min(*options.streams, options.mib, options.rounds) < 1:
        parser.error("--workers must be at least 2; --streams, --mib and --rounds at least 1")
    if not 1 <= options.connector_streams <= STREAMS_MAX:
        parser.error(f"--connector-streams must be 1 to {STREAMS_MAX}")
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    host = machine()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: no process and no data directory stays behind.
    with tempfile.TemporaryDirectory(prefix="slotstream-bench-", dir=options.work_dir.absolute()) as work:
        disk, date = file_system(Path(work)), f"{datetime.now(UTC):%Y-%m-%d}"
        print(
            f"{date}: {host['cpus']} CPUs ({host['cpu']}), {host['memory_gib']} GiB, {disk}; "
            f"{options.mib} MiB a run; medians of {options.rounds} rounds",
            flush=True,
        )
        try:
            pairs, connectors = measure(options, Path(work)), measure_connectors(options, Path(work))
            copies: list[Copies] = []
            if options.connector_streams > 1:
                copies = measure_copies(options.connector_streams, options.mib, options.rounds, Path(work))
        except ChildFailed as error:
            print(f"workers benchmark: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    print(report(pairs, "1 process", f"{options.workers} processes"))
    if connectors:
        print(report(connectors, "one stream", "one sender"))
    if copies:
        print(report_copies(copies))
    if not is_installed():
        print(f"without NIXL: {INSTALL}")
    if options.json is not None:
        figures: dict[str, Any] = {
            "benchmark": "workers",
            "date": date,
            "machine": {**host, "file_system": disk},
            "options": plain(options),
            "pairs": [asdict(pair) | {"ratios": pair.ratios} for pair in pairs],
            "connectors": [asdict(pair) | {"ratios": pair.ratios} for pair in connectors],
            "copies": [asdict(case) | {"name": case.name} for case in copies],
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
