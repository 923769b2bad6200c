"""Kill rounds: `kills.py [--rounds 200] [--seed N] [--no-spool] [--workers N] [--streams N] [--store cluster]`.

A real server and real senders; in each round one of them, chosen by the seed, gets SIGKILL, SIGTERM or SIGSTOP at some moment,
and comes back some moments later. From time to time everything is counted: see `accounts.settle` for what must hold, with a
spool and without one. With `--store cluster` there are two servers over a bucket and a PostgreSQL, which are killed, stopped
and cut off too; then the bucket must hold the objects of committed samples, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2]))

from accounts import Account, settle
from ledger import NAMESPACE
from pair import Pair
from support.files import files_below
from world import Process, World

from slotstream.client import connect

_SETTLE_EVERY = 20  # Rounds.
_MOMENT_S = 0.4
_PAUSE_MS = 10.0  # Of a sender, between two steps.
_PAIR_PAUSE_MS = 100.0  # Each sample is read, verified and deleted in the end, which takes a store of objects longer.
_DECK = ("object store", "database", "database", *["process"] * 5)
_ACTIONS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP, signal.SIGTERM)


def run_rounds(
    rounds: int,
    seed: int,
    *,
    senders: int = 2,
    spool: bool = True,
    workers: int = 1,
    streams: int | None = None,
    pair: Pair | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Account:
    """Does the rounds; everything that was found. Raises AssertionError where a process does what it must not.

    With several `workers` each other round that strikes the server kills one of them, and the primary is what is killed else.
    With several `streams` each other round that strikes a sender of which each has a process kills one of those.
    """
    rng = random.Random(seed)
    total = Account()
    pause_ms = _PAUSE_MS if pair is None else _PAIR_PAUSE_MS
    with World(
        senders, rng.randrange(1000), pause_ms=pause_ms, spool=spool, workers=workers, streams=streams, pair=pair
    ) as world:
        deck = _deal(rng)
        for number in range(1, rounds + 1):
            world.wait_for_traffic()
            time.sleep(rng.random() * _MOMENT_S)
            struck = next(deck) if pair is not None else "process"
            total.cases[f"rounds: {_round(world, rng, struck)}"] += 1
            if number % _SETTLE_EVERY == 0 or number == rounds:
                _settle(world, total, spool)
                say(f"{number} rounds, {sum(total.cases.values()) - number} samples, {len(total.wrong)} wrong")
                if total.wrong or number == rounds:
                    break
                for sender in world.senders:
                    sender.start()
    return total


def _deal(rng: random.Random) -> Iterator[str]:
    """What a round strikes: each card once in eight rounds, again and again."""
    while True:
        yield from rng.sample(_DECK, len(_DECK))


def _round(world: World, rng: random.Random, struck: str) -> str:
    """One strike; what it was."""
    if world.pair is not None and struck == "object store":
        return f"{world.pair.strike_objects(rng, _MOMENT_S)} of the object store"
    if world.pair is not None and struck == "database":
        return f"{world.pair.strike_database(rng, _MOMENT_S)} of the database"
    # The servers as often as all the senders together.
    victim = rng.choice(world.senders) if rng.random() >= 0.5 else world.any_server(rng)
    action = rng.choice(_ACTIONS)
    is_server = victim in world.servers
    if is_server and (pids := world.server_workers()) and rng.random() < 0.5:
        os.kill(rng.choice(pids), signal.SIGKILL)
        return "SIGKILL of a worker"
    if not is_server and (pids := world.stream_processes(victim)) and rng.random() < 0.5:
        os.kill(rng.choice(pids), signal.SIGKILL)
        return "SIGKILL of a stream's process"
    _strike(world, victim, action, rng)
    return f"{action.name} of the {victim.name.rstrip('0123456789')}"


def _strike(world: World, victim: Process, action: signal.Signals, rng: random.Random) -> None:
    pause_s = rng.random() * _MOMENT_S
    if action is signal.SIGSTOP:
        victim.send(signal.SIGSTOP)
        # Now and then for so long that the other end gives the stream up.
        time.sleep(pause_s if rng.random() < 0.85 else 7.0)
        victim.send(signal.SIGCONT)
        return
    allowed = world.may_end_with(victim)
    code = victim.end(action)
    if action is signal.SIGTERM:
        assert code in allowed, f"{victim.name} ended with {code} after SIGTERM:\n{victim.log()[-4000:]}"
    time.sleep(pause_s)
    victim.start()
    if victim in world.servers:
        world.wait_for(victim)


def _settle(world: World, total: Account, spool: bool) -> None:
    """Ends the senders, restarts the servers, sends what is spooled, counts, and begins with an empty store again."""
    for sender in world.senders:
        allowed = world.may_end_with(sender)
        code = sender.end(signal.SIGTERM)
        assert code in allowed, f"{sender.name} ended with {code}:\n{sender.log()[-4000:]}"
    for server in world.servers:
        server.end(signal.SIGKILL)
        server.start()
    for server in world.servers:
        world.wait_for(server)
    world.inherit()
    if world.pair is not None:
        world.pair.sweep()
        total.wrong += world.pair.left_over()
    found = settle(world.address, world.promises(), spool=spool, tried=world.tries())
    total.cases += found.cases
    total.wrong += found.wrong
    if total.wrong:
        return
    left = files_below(world.data_dir, ".partial")
    assert not left, f"partial files were left behind: {left}"
    with connect(world.address) as client:
        for info in list(client.list(namespace=NAMESPACE)):
            client.delete(info.sample_id, namespace=NAMESPACE)
    left = files_below(world.data_dir, ".safetensors")
    assert not left, f"files were left behind: {left}"
    if world.pair is not None:
        world.pair.sweep()
        total.wrong += world.pair.left_over()
    world.forget()


def report(cases: Counter[str], wrong: Sequence[str]) -> str:
    lines = [f"{count:>8}  {case}" for case, count in sorted(cases.items())]
    lines += [f"   WRONG  {one}" for one in wrong]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="0: any, and it is printed")
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="processes of the server, and some of the rounds kill one")
    parser.add_argument("--streams", type=int, help="of each sender (default: as many as workers)")
    parser.add_argument("--store", choices=["files", "cluster"], default="files", help="what the samples are kept in")
    parser.add_argument("--no-spool", action="store_true", help="senders without a spool: see the rules of accounts.py")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # In order: the processes end with us.
    seed = arguments.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"seed {seed}", flush=True)
    with Pair() if arguments.store == "cluster" else nullcontext() as pair:
        found = run_rounds(
            arguments.rounds,
            seed,
            senders=arguments.senders,
            spool=not arguments.no_spool,
            workers=arguments.workers,
            streams=arguments.streams,
            pair=pair,
            say=lambda line: print(line, flush=True),
        )
    print(report(found.cases, found.wrong))
    print("FAILED" if found.wrong else "every promised sample is accounted for")
    return int(bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main())
