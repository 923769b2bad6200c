"""The simulation: `python tests/breaking/simulation/run.py --seed N [--trace]` replays one seed, `--seeds 0:1000` runs many.

The executor, the event loop, the clock and the disk of a server are simulated, under one seed. CONTRIBUTING.md says what is
real and what is left out.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[2]


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last)) if last else range(int(first))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="one seed")
    which.add_argument("--seeds", type=_seeds, help="many: COUNT, or FIRST:LAST+1")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--digests", action="store_true", help="print the hash of each seed's trace")
    parser.add_argument("--plant", default="", help="a fault to put into the server first (see plants.py)")
    parser.add_argument("--lanes", type=int, default=1, help="streams that a client may put over at a time")
    parser.add_argument("--store", choices=["files", "cluster"], default="files", help="cluster: two servers with one bucket")
    parser.add_argument("--most", type=int, default=5, help="end after so many seeds that failed")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # Sets of names are walked in the same order in every process.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    # One core: the baton then goes from thread to thread without waking another one, which takes five times as long.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    # In place of this folder, whose names others have too.
    sys.path[:1] = [str(_TESTS / name) for name in ("", "breaking", "breaking/endurance")]
    warnings.simplefilter("ignore")  # Tasks of servers that were killed.
    from simulation import seams
    from simulation.pair_plants import PAIR_PLANTS
    from simulation.pair_world import PairWorld
    from simulation.plants import PLANTS
    from simulation.world import World, run_seed

    World.lanes = arguments.lanes
    is_pair = arguments.store == "cluster"
    seams.install()
    if arguments.plant:
        (PAIR_PLANTS if is_pair else PLANTS)[arguments.plant]()
    gc.collect()
    gc.freeze()
    gc.disable()  # Between seeds alone: what it closes would otherwise depend on the seeds before.
    began = time.monotonic()
    failed: list[int] = []
    counts: Counter[str] = Counter()
    seeds = range(arguments.seed, arguments.seed + 1) if arguments.seeds is None else arguments.seeds
    done = 0
    for seed in seeds:
        result = run_seed(seed, keep_trace=arguments.trace, kind=PairWorld if is_pair else World)
        done += 1
        counts.update(result.counts)
        if arguments.trace:
            print("\n".join(result.trace))
        if arguments.digests:
            print(f"{seed} {result.digest}")
        if result.wrong:
            failed.append(seed)
            print(f"seed {seed} failed after {result.seconds:.0f} simulated seconds:")
            print("\n".join(result.wrong[:3]))
            plant = f" --plant {arguments.plant}" if arguments.plant else ""
            lanes = f" --lanes {arguments.lanes}" if arguments.lanes > 1 else ""
            store = " --store cluster" if is_pair else ""
            print(f"replay: python tests/breaking/simulation/run.py --seed {seed}{store}{plant}{lanes} --trace", flush=True)
            if len(failed) >= arguments.most:
                break
        gc.collect()
    took = time.monotonic() - began
    if not arguments.digests:
        print("\n".join(f"{count:>8}  {what}" for what, count in sorted(counts.items())))
    print(f"{done} seeds in {took:.1f} s, {len(failed)} failed{': ' + str(failed) if failed else ''}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
