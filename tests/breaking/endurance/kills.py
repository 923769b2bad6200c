"""Kill rounds: `python tests/breaking/endurance/kills.py [--rounds 200] [--seed N] [--no-spool] [--workers N] [--streams N]`.

A real server and real senders; in each round one of them, chosen by the seed, gets SIGKILL, SIGTERM or SIGSTOP at some moment,
and comes back some moments later. From time to time everything is counted: see `accounts.settle` for what must hold, with a
spool and without one.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2]))

from accounts import Account, settle
from ledger import NAMESPACE
from support.files import files_below
from world import Process, World

from slotstream.client import connect

_SETTLE_EVERY = 20  # Rounds.
_MOMENT_S = 0.4
_ACTIONS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP, signal.SIGTERM)


def run_rounds(
    rounds: int,
    seed: int,
    *,
    senders: int = 2,
    spool: bool = True,
    workers: int = 1,
    streams: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Account:
    """Does the rounds; everything that was found. Raises AssertionError where a process does what it must not.

    With several `workers` each other round that strikes the server kills one of them, and the primary is what is killed else.
    With several `streams` each other round that strikes a sender of which each has a process kills one of those.
    """
    rng = random.Random(seed)
    total = Account()
    with World(senders, rng.randrange(1000), spool=spool, workers=workers, streams=streams) as world:
        for number in range(1, rounds + 1):
            world.wait_for_traffic()
            time.sleep(rng.random() * _MOMENT_S)
            # The server as often as all the senders together.
            victim = world.server if rng.random() < 0.5 else rng.choice(world.senders)
            action = rng.choice(_ACTIONS)
            if workers > 1 and victim is world.server and rng.random() < 0.5 and (pids := world.server_workers()):
                total.cases["rounds: SIGKILL of a worker"] += 1
                os.kill(rng.choice(pids), signal.SIGKILL)
            elif victim is not world.server and (pids := world.stream_processes(victim)) and rng.random() < 0.5:
                total.cases["rounds: SIGKILL of a stream's process"] += 1
                os.kill(rng.choice(pids), signal.SIGKILL)
            else:
                total.cases[f"rounds: {action.name} of the {victim.name.rstrip('0123456789')}"] += 1
                _strike(world, victim, action, rng)
            if number % _SETTLE_EVERY == 0 or number == rounds:
                _settle(world, total, spool)
                say(f"{number} rounds, {sum(total.cases.values()) - number} samples, {len(total.wrong)} wrong")
                if total.wrong or number == rounds:
                    break
                for sender in world.senders:
                    sender.start()
    return total


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
    if victim is world.server:
        world.wait_for_server()


def _settle(world: World, total: Account, spool: bool) -> None:
    """Ends the senders, restarts the server, sends what is spooled, counts, and begins with an empty directory again."""
    for sender in world.senders:
        allowed = world.may_end_with(sender)
        code = sender.end(signal.SIGTERM)
        assert code in allowed, f"{sender.name} ended with {code}:\n{sender.log()[-4000:]}"
    world.server.end(signal.SIGKILL)
    world.server.start()
    world.wait_for_server()
    world.inherit()
    found = settle(world.address, world.promises(), spool=spool, tried=world.tries())
    total.cases += found.cases
    total.wrong += found.wrong
    if found.wrong:
        return
    left = files_below(world.data_dir, ".partial")
    assert not left, f"partial files were left behind: {left}"
    with connect(world.address) as client:
        for info in list(client.list(namespace=NAMESPACE)):
            client.delete(info.sample_id, namespace=NAMESPACE)
    left = files_below(world.data_dir, ".safetensors")
    assert not left, f"files were left behind: {left}"
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
    parser.add_argument("--no-spool", action="store_true", help="senders without a spool: see the rules of accounts.py")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # In order: the processes end with us.
    seed = arguments.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"seed {seed}", flush=True)
    found = run_rounds(
        arguments.rounds,
        seed,
        senders=arguments.senders,
        spool=not arguments.no_spool,
        workers=arguments.workers,
        streams=arguments.streams,
        say=lambda line: print(line, flush=True),
    )
    print(report(found.cases, found.wrong))
    print("FAILED" if found.wrong else "every promised sample is accounted for")
    return int(bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main())
