"""Ingest throughput of slotstream, and beside it what this machine's memory, sockets, gRPC and disk do on their own.

    python benchmarks/ingest.py [--streams N]

Everything is measured in one run, in interleaved rounds, because absolute figures do not travel from one machine, or one
minute, to the next; the ratios do. benchmarks/README.md says what each row means.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from children import ChildFailed, tree_cpu_seconds
from contenders import Contender, GrpcFrames, Memcpy, PlainFile, RawSocket, Slotstream
from machine import file_system, machine, plain, progress
from shape import Shape

from slotstream.wire.nixl import INSTALL, is_installed

TARGET = 0.8  # Of the slower of the two that slotstream cannot be faster than.
_MIB = 1 << 20
_GB = 1e9
_TRANSPORTS = ("grpc", "nixl") if is_installed() else ("grpc",)


@dataclass(frozen=True, slots=True)
class Round:
    """One contender's figures of one round. CPU: seconds that each process and its children used, a GB moved."""

    gb_per_s: float
    sender_cpu: float
    receiver_cpu: float


@dataclass(slots=True)
class Result:
    """All rounds of one contender."""

    name: str
    has_receiver: bool
    rounds: list[Round] = field(default_factory=list)

    def median(self, what: str) -> float:
        return float(statistics.median(getattr(one, what) for one in self.rounds))


def measure(contender: Contender, samples: int, shape: Shape) -> Round:
    """Run it twice, and say what the second run took.

    Memory that a virtual machine has not touched for a while is slow to get back from its host; the contender that writes
    files first would pay for the next one. So each contender first finds, or frees, the memory it needs itself.
    """
    contender.run(samples)
    contender.clear()
    pids = [contender.sender_pid, *([contender.receiver_pid] if contender.receiver_pid is not None else [])]
    before = [tree_cpu_seconds(pid) for pid in pids]
    seconds = contender.run(samples)
    used = [tree_cpu_seconds(pid) - then for pid, then in zip(pids, before, strict=True)]
    contender.clear()
    gb = samples * shape.sample_bytes / _GB
    return Round(gb / seconds, used[0] / gb, used[1] / gb if len(used) > 1 else 0.0)


@contextmanager
def all_contenders(options: argparse.Namespace, shape: Shape, work: Path) -> Iterator[list[Contender]]:
    """Every contender, started."""
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="slotstream-") as sockets:

        def address(name: str) -> str:
            return f"unix:{sockets}/{name}" if options.unix else "127.0.0.1:0"

        def started(contender: Contender) -> Contender:
            return stack.enter_context(closing(contender))

        def slotstream(transport: str, streams: int = 1) -> Contender:
            data_dir, staging_bytes = work / f"data-{transport}-{streams}", options.staging_mib * _MIB
            where = address(f"{transport}-{streams}") if streams == 1 else "127.0.0.1:0"  # Several processes share a port.
            sender = Slotstream(shape, where, data_dir, staging_bytes, transport, tuned_sender=tuned, streams=streams)
            return started(sender)

        tuned = options.tuned_sender
        yield [
            started(Memcpy(shape)),
            started(RawSocket(shape, address("raw"))),
            started(GrpcFrames(shape, address("grpc"), tuned_sender=tuned)),
            started(PlainFile(shape, work / "plain")),
            *map(slotstream, options.transports),
            *(slotstream(transport, options.streams) for transport in options.transports if options.streams > 1),
        ]


def run(options: argparse.Namespace, shape: Shape, work: Path) -> list[Result]:
    """All rounds of all contenders, one after the other, never two at once."""
    with all_contenders(options, shape, work) as contenders:
        results = [Result(contender.name, contender.receiver_pid is not None) for contender in contenders]
        for number in range(options.rounds):
            progress(f"round {number + 1}/{options.rounds}:")
            for contender, result in zip(contenders, results, strict=True):
                result.rounds.append(measure(contender, options.samples, shape))
                progress(f"  {contender.name} {result.rounds[-1].gb_per_s:.2f}")
            progress("\n")
    return results


def report(results: Sequence[Result], verdicts: Sequence[dict[str, Any]], several: Sequence[dict[str, Any]]) -> str:
    """The table, how slotstream stands to its target, and what several streams bring it."""
    lines = [f"{'':20}{'GB/s':>7}{'min':>8}{'max':>7}{'CPU s/GB:':>13}{'sender':>9}{'receiver':>10}"]
    for result in results:
        speeds = [one.gb_per_s for one in result.rounds]
        receiver = f"{result.median('receiver_cpu'):>10.2f}" if result.has_receiver else f"{'-':>10}"
        lines.append(
            f"{result.name:20}{result.median('gb_per_s'):>7.2f}{min(speeds):>8.2f}{max(speeds):>7.2f}"
            f"{'':13}{result.median('sender_cpu'):>9.2f}{receiver}"
        )
    lines.append("")
    for verdict in verdicts:
        met = "met" if verdict["ratio"] >= TARGET else "NOT met"
        lines.append(
            f"{verdict['name']} / {verdict['slower']}, the slower of the two that bound it: {verdict['ratio']:.2f}, the median "
            f"of {', '.join(f'{ratio:.2f}' for ratio in verdict['ratio_of_rounds'])} "
            f"(of the medians: {verdict['ratio_of_medians']:.2f}); target {TARGET}: {met}"
        )
    for one in several:
        ratios = one["ratio_of_rounds"]
        lines.append(f"{one['name']} / {one['to']}: {one['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return "\n".join(lines)


def compare(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Each sender of several streams beside the one of one stream, round by round."""
    found = []
    for result in results:
        alone = next((one for one in results if result.name.startswith(f"{one.name} x")), None)
        if alone is not None:
            pairs = zip(result.rounds, alone.rounds, strict=True)
            ratios = [several.gb_per_s / one.gb_per_s for several, one in pairs]
            found.append({"name": result.name, "to": alone.name, "ratio": statistics.median(ratios), "ratio_of_rounds": ratios})
    return found


def judge(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Each slotstream's ratio to the slower of gRPC alone and a plain file write: round by round, and of the medians.

    The rounds decide: what ran within seconds of each other met the same machine, which is never quite the same for long.
    """
    bounds = [result for result in results if result.name in (GrpcFrames.name, PlainFile.name)]
    return [_judge(result, bounds) for result in results if result.name.startswith("slotstream")]


def _judge(ours: Result, bounds: Sequence[Result]) -> dict[str, Any]:
    slower = min(bounds, key=lambda result: result.median("gb_per_s"))
    by_round = zip(ours.rounds, *(bound.rounds for bound in bounds), strict=True)
    of_rounds = [one.gb_per_s / min(other.gb_per_s for other in others) for one, *others in by_round]
    return {
        "name": ours.name,
        "slower": slower.name,
        "ratio": statistics.median(of_rounds),
        "ratio_of_rounds": of_rounds,
        "ratio_of_medians": ours.median("gb_per_s") / slower.median("gb_per_s"),
        "target": TARGET,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sample-mib", type=_positive, default=12, metavar="N", help="size of a sample (default: %(default)s)")
    add("--samples", type=_positive, default=64, metavar="N", help="samples of each run (default: %(default)s)")
    add("--frame-mib", type=float, default=2.0, metavar="N", help="rows in a message (default: %(default)s)")
    add("--rounds", type=_positive, default=5, metavar="N", help="interleaved rounds to take medians of (default: %(default)s)")
    add("--layers", type=_positive, default=4, metavar="N", help="captured layers (default: %(default)s)")
    add("--hidden", type=_positive, default=4096, metavar="N", help="bf16 elements a layer (default: %(default)s)")
    add("--staging-mib", type=_positive, default=512, metavar="N", help="the connector's staging (default: %(default)s)")
    add(
        "--transports", nargs="+", choices=("grpc", "nixl"), default=_TRANSPORTS, help="what rows take (default: all installed)"
    )
    add(
        "--streams",
        type=_positive,
        default=1,
        metavar="N",
        help="also measure a sender of N streams, to a server of N processes (default: none)",
    )
    add("--unix", action="store_true", help="Unix sockets instead of TCP on the loopback interface")
    add(
        "--tuned-sender",
        action="store_true",
        help="start the senders with the server's malloc settings too; vLLM is usually started without",
    )
    add("--work-dir", type=Path, default=Path(), metavar="DIR", help="put a temporary data directory here (default: .)")
    add("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    row_bytes = options.layers * options.hidden * 2
    if not row_bytes <= options.frame_mib * _MIB <= 8 * _MIB:
        parser.error(f"--frame-mib must hold a row of {row_bytes} bytes, and be at most 8")
    if options.sample_mib * _MIB < row_bytes:
        parser.error(f"--sample-mib must hold a row of {row_bytes} bytes")
    if options.staging_mib < 4 * options.frame_mib:
        parser.error("--staging-mib must hold at least four frames")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    row_bytes = options.layers * options.hidden * 2
    shape = Shape(
        options.layers,
        options.hidden,
        rows=options.sample_mib * _MIB // row_bytes,
        frame_rows=int(options.frame_mib * _MIB) // row_bytes,
    )
    host = machine()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: no process and no data directory stays behind.
    with tempfile.TemporaryDirectory(prefix="slotstream-bench-", dir=options.work_dir.absolute()) as work:
        Path(work, ".gitignore").write_text("*\n")  # It may lie in a checkout while this runs.
        disk = file_system(Path(work))
        print(
            f"{datetime.now(UTC):%Y-%m-%d}: {host['cpus']} CPUs ({host['cpu']}), {host['memory_gib']} GiB, {disk}; "
            f"{options.samples} samples of {shape.rows} rows of {row_bytes} bytes, {shape.frame_bytes / _MIB:g} MiB a frame, "
            f"over {'a Unix socket' if options.unix else 'loopback TCP'}; medians of {options.rounds} rounds",
            flush=True,
        )
        try:
            results = run(options, shape, Path(work))
        except ChildFailed as error:
            print(f"ingest benchmark: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    verdicts, several = judge(results), compare(results)
    print(report(results, verdicts, several))
    if not is_installed():
        print(f"without NIXL, which a server on the same host would use: {INSTALL}")
    if options.json is not None:
        figures = {
            "machine": {**host, "file_system": disk},
            "options": plain(options),
            "shape": asdict(shape),
            "results": [asdict(result) for result in results],
            "verdicts": verdicts,
            "streams": several,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
