"""One seed: a disk, a server in all its lives, clients, a nemesis; and what must be true when it is over."""

from __future__ import annotations

import itertools
import logging
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulation.clients import ANSWER_S, Client
from simulation.disk import SimConnection, SimFiles
from simulation.lanes import ClientWithLanes
from simulation.model import KEPT, POLICY, TRIMMED, Model
from simulation.nemesis import Nemesis
from simulation.scheduler import Scheduler, Stuck, run_with, running
from simulation.server import SimServer
from simulation.threads import SimTime, ThreadPoolExecutor

from slotstream.store.directory.looking import verify_directory
from slotstream.store.records import SampleKey

_RULES_S = 35.0  # A sweep of all namespaces has been done by then.
_START_TRIES = 200


@dataclass
class Result:
    """What became of one seed."""

    seed: int
    wrong: list[str]
    digest: str
    steps: int
    seconds: float  # Of simulated time.
    counts: dict[str, int]
    trace: list[str] = field(default_factory=list)


class World:
    """Everything of one seed. Belongs to the simulation's main thread; clients and the nemesis reach it from theirs."""

    lanes = 1  # Streams that a client may put over at a time.
    trouble_lasts_s = 2.0  # How much longer than what was wrong.
    quiet_s = 600.0  # Everything must have come to rest by then, once nothing goes wrong any more.
    silent_s = ANSWER_S  # For so long a client that is owed an answer hears nothing.
    never: frozenset[str] = frozenset()  # Codes that no client is told here, beside those that none is ever told.

    def __init__(self, scheduler: Scheduler, root: Path) -> None:
        rng = scheduler.rng
        self.model = Model()
        self.keys = [SampleKey(KEPT, name) for name in "abc"[: rng.randint(1, 3)]]
        self.keys += [SampleKey(space, "x") for space in ("acked", TRIMMED) if rng.random() < 0.5]
        self.keys += [SampleKey(TRIMMED, name) for name in "yz" if rng.random() < 0.3]
        self._root = root
        self._lives = itertools.count()
        self._serials = itertools.count()
        self._troubles = 0
        self._trouble_ended_at = -1.0
        self._chunk_threads = rng.choice((1, 1, 3))
        self._options: dict[str, Any] = {
            "retention": POLICY,
            "retention_grace_s": 0.0,  # A loss of the catalogue makes the rules new ones.
            "scrub_every_s": rng.choice((0.0, 30.0)),
            "scrub_bytes_per_s": 4e5,
            "appear_grace_s": 1.0,
            "sample_s_max": 300.0,
        }
        scheduler.preempt = rng.choice((0.0, 0.02, 0.1, 0.3))
        self._begin()

    def _begin(self) -> None:
        """What there is to serve from, and a server."""
        (self._root / "0").mkdir()
        self.files = SimConnection.disk = SimFiles(self._root / "0")
        self._directories = itertools.count(1)
        self.begin_start()

    def pick(self) -> SampleKey:
        return running().rng.choice(self.keys)

    def told_failed(self, key: SampleKey, called_at: float) -> None:
        """A client that began a put then is told now that it failed."""

    def serial(self) -> int:
        return next(self._serials)

    # The server's lives.

    server: SimServer  # What a client's next call goes to.

    def begin_start(self) -> None:
        self.server = SimServer(self.files, next(self._lives), self._options, self._chunk_threads)
        running().note(f"{self.server.process.name} starts")

    def start(self) -> None:
        """As a supervisor does: again, until it is up."""
        for _ in range(_START_TRIES):
            self.begin_start()
            if self.server.wait_until_up():
                running().note("up")
                return
            self.kill()
            running().pause(1.0)
        running().fail(f"the server could not be started: {self.server.refusal}")

    def kill(self) -> None:
        running().note("kill")
        self.model.died(running().now)
        self.files.kill(self.server.kill)

    def cut_power(self) -> None:
        running().note("power cut")
        self.model.died(running().now)
        self.model.leases_in_doubt(running().now)
        after = self._root / str(next(self._directories))
        self.files = SimConnection.disk = self.files.cut_power(self.server.kill, after)
        if not (after / "catalog.sqlite").exists():
            self.model.lost_catalogue(running().now)

    def stop(self, drain_s: float) -> None:
        running().note("stop")
        self.server.stop(drain_s)
        self.model.died(running().now)

    # Trouble.

    @contextmanager
    def trouble(self, what: str) -> Iterator[None]:
        """While the block runs, and a moment longer, calls may be refused."""
        running().note(f"{what} begins")
        self._troubles += 1
        try:
            yield
        finally:
            self._troubles -= 1
            self._trouble_ended_at = running().now
            running().note(f"{what} ends")

    def was_troubled(self, since: float) -> bool:
        """Whether something was wrong at any time from then to now."""
        return self._troubles > 0 or self._trouble_ended_at >= since - self.trouble_lasts_s

    def end(self) -> None:
        """The seed is over."""
        self.server.kill()
        self.files._hang_up()

    # One seed.

    def _nemesis(self) -> Nemesis:
        return Nemesis(self)

    def run(self) -> None:
        scheduler = running()
        assert self.server.wait_until_up(), self.server.refusal
        rng = scheduler.rng
        nemesis = self._nemesis()
        make = Client if self.lanes == 1 else ClientWithLanes
        clients = [make(self, number) for number in range(rng.randint(2, 4))]
        threads = [scheduler.spawn("nemesis", lambda: nemesis.run(rng.randint(2, 5)))]
        for number, client in enumerate(clients):
            operations = rng.randint(3, 8)
            threads.append(scheduler.spawn(f"client {number}", lambda client=client, count=operations: client.run(count)))  # type: ignore[misc]
        for thread in threads:
            if not scheduler.join(thread, self.quiet_s):
                scheduler.fail(f"{thread.name} is not done after {self.quiet_s:g} s")
                return
        self._come_to_rest(clients[0])

    def _come_to_rest(self, client: Client) -> None:
        """Nothing goes wrong any more: everything that is possible must be done, and nothing be left over."""
        scheduler = running()
        scheduler.note("at rest")
        scheduler.pause(5.0)  # The rules were looked at by then, also where the disk refused something before.
        self._accept_rules(client)
        scheduler.pause(_RULES_S)  # What the disk refused is tried again; rules are applied.
        self._check_rules()
        for key in self.keys:
            client.read(key)
            client.put(key)
            client.read(key)
        scheduler.pause(5.0)
        self.stop(10.0)
        if not self.server.process.dead:
            return
        self.start()
        for key in self.keys:
            client.read(key)
        self.stop(10.0)
        for verdict in verify_directory(self.files.root):
            if verdict.damage:
                scheduler.fail(f"in the end {verdict.namespace}/{verdict.sample_id} is {verdict.damage}: {verdict.message}")
        if partials := sorted(path.name for path in self.files.root.rglob("*.partial")):
            scheduler.fail(f"partial files are left: {partials}")

    def _accept_rules(self, client: Client) -> None:
        """As an operator does: what the rules would empty after a loss of the catalogue, they leave alone until then."""
        held = client.accept_rules()
        if held and not self.model.catalogues_lost_at:
            running().fail(f"rules that nobody changed are held in {sorted(held)}")

    def _check_rules(self) -> None:
        """Quotas hold where nobody reads or leases."""
        trimmed = self.server.store.lifetimes.usage(TRIMMED)
        if trimmed.samples > 2:
            running().fail(f"{trimmed.samples} samples are stored where the rule says 2")


class _Faults(logging.Handler):
    """A traceback in the server's log is a fault of ours, on any disk."""

    def emit(self, record: logging.LogRecord) -> None:
        scheduler = running()
        if scheduler.current.process.dead:
            return
        if record.exc_info:
            trace = "".join(traceback.format_exception(*record.exc_info))
            scheduler.fail(f"the server logged a fault: {record.getMessage()}\n{trace}")


def run_seed(seed: int, *, keep_trace: bool = False, kind: type[World] = World) -> Result:
    """Everything that happens under one seed, in a world of this kind."""
    root = Path(tempfile.mkdtemp(prefix="slotstream-simulation-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    scheduler = Scheduler(seed, keep_trace=keep_trace)
    run_with(scheduler)
    SimTime.leapt_ns, ThreadPoolExecutor.slow_s = 0, 0.0
    log = logging.getLogger("slotstream")
    log.handlers, log.propagate = [_Faults(level=logging.WARNING)], False
    world = kind(scheduler, root)
    try:
        world.run()
    except Stuck as error:
        scheduler.fail(f"stuck: {error}")
    except Exception:
        scheduler.fail(f"the simulation failed\n{traceback.format_exc()}")
    if not scheduler.wrong:
        scheduler.wrong += world.model.wrong()
    scheduler.preempt = 0.0
    world.end()
    scheduler.kill(scheduler.world)
    shutil.rmtree(root)
    return Result(
        seed, scheduler.wrong, scheduler.digest, scheduler.steps, scheduler.now, dict(world.model.counts), scheduler.lines
    )
