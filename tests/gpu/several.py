"""All that is asked of several GPUs of one host, in one call: rows of every engine, and what capturing costs.

usage: python tests/gpu/several.py --gpus {2,4} --out DIR [--part rows|cost] [--for-s 570] [--only SUBSTRING ...] [--again]
           [--list]

First tests/gpu/parallel.py runs its engines over so many GPUs. Their rows go into DIR/compatibility.md, a copy of
docs/records/compatibility.md where DIR has none yet; engines that have a row of that many GPUs there are left out, unless
--again. Then benchmarks/gpu.py compares capture over NIXL and gRPC with no capture, for the 8B shape at tensor parallel of all
GPUs, in DIR/cost.json. Both write what they have as they go, and end within --for-s seconds together.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "records" / "compatibility.md"
_ROWS_SHARE = 0.55  # Of the time, where both parts run.
_STOP_S = 25.0  # That a part has to stop its engines in.
_START_S = 110.0  # Until three engines of the benchmark are up.
_RANKS_S = 60.0  # For what each rank pays, at the benchmark's end.
_LOADS = 3
LEAST_S = 240.0


class Part(NamedTuple):
    """One of the two: its command, and by when it has ended."""

    name: str
    command: list[str]
    seconds: float


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=int, choices=(2, 4), required=True)
    add("--out", type=Path, required=True, metavar="DIR", help="what is found goes here")
    add("--part", choices=("rows", "cost"), help="only this (default: both)")
    add("--for-s", type=float, default=570.0, metavar="SECONDS", help="for all of it (default: %(default)s)")
    add("--only", action="append", default=[], metavar="TEXT", help="only engines whose name contains TEXT")
    add("--again", action="store_true", help="also engines that the record has a row of")
    add("--at-once", type=int, help="engines that run at a time (default: 6, over four GPUs 9)")
    add("--list", action="store_true", help="only say what would run")
    found = parser.parse_args(arguments)
    found.at_once = found.at_once or {2: 6, 4: 9}[found.gpus]
    if found.for_s < LEAST_S:
        parser.error(f"--for-s must be at least {LEAST_S:.0f}: engines take minutes to start")
    return found


def parts(options: argparse.Namespace) -> list[Part]:
    """What is run, in this order."""
    both = options.part is None
    rows_s = options.for_s * (_ROWS_SHARE if both else 1)
    cost_s = options.for_s - rows_s if both else options.for_s
    out = options.out.absolute()
    rows = [sys.executable, str(ROOT / "tests" / "gpu" / "parallel.py"), f"--gpus={options.gpus}", f"--logs={out / 'logs'}"]
    rows += [f"--write={out / RECORD.name}", f"--for-s={rows_s - 2 * _STOP_S:.0f}", f"--at-once={options.at_once}"]
    rows += [f"--only={text}" for text in options.only] + ([] if options.again else ["--missing"])
    load_s = max(10.0, (cost_s - _START_S - _RANKS_S - _STOP_S) / _LOADS)
    cost = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--layers=2,18,33,36", "--engines=none,nixl,grpc"]
    cost += ["--prompts=96", "--alone=0", "--kv-cache-gib=4", f"--tensor-parallel={options.gpus}", "--rounds=15"]
    cost += [f"--load-s={load_s:.0f}", f"--json={out / 'cost.json'}", f"--logs={out / 'cost-logs'}"]
    found = [Part("rows", rows, rows_s), Part("cost", cost, cost_s)]
    return [part for part in found if options.part in (None, part.name)]


def run(part: Part, out: Path) -> bool:
    """Whether it ended well, in its time. What it says goes to a file too."""
    print(f"== {part.name}: {shlex.join(part.command)}", flush=True)
    began = time.monotonic()
    with (out / f"{part.name}.txt").open("w") as log:
        process = subprocess.Popen(part.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            process.wait(part.seconds - _STOP_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.send_signal(signal.SIGTERM)  # It stops its engines, and writes what it has.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    print((out / f"{part.name}.txt").read_text()[-6000:], flush=True)
    print(f"== {part.name}: exit {process.wait()} after {time.monotonic() - began:.0f} s", flush=True)
    return process.returncode == 0


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / RECORD.name).exists():
        (options.out / RECORD.name).write_text(RECORD.read_text())
    chosen = parts(options)
    if options.list:
        for part in chosen:
            print(f"{part.name}, {part.seconds:.0f} s: {shlex.join(part.command)}", flush=True)
            if part.name == "rows":
                subprocess.run([*part.command, "--list"], check=True, cwd=ROOT)
        return 0
    import engines

    if not engines.has_gpus(options.gpus):
        return 0
    ended = [run(part, options.out) for part in chosen]  # The second too where the first did not end well.
    return 0 if all(ended) else 1


if __name__ == "__main__":
    sys.exit(main())
