"""What goes wrong with two servers and what they share, by the seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.clients import Client
from simulation.nemesis import Nemesis
from simulation.scheduler import running
from simulation.threads import SimTime, ThreadPoolExecutor

from slotstream.store.catalogue.attempts import REMOVED_AFTER_S

if TYPE_CHECKING:
    from simulation.engines import Engine
    from simulation.pair_world import PairServer, PairWorld

_SILENT_S = 20.0
_RIVALS = 5
_HOUR_NS = 3600 * 10**9
KINDS = ("kill", "restart", "freeze", "database", "sessions", "commits", "bucket", "requests", "stalls", "leap", "slow", "cut")


class PairNemesis(Nemesis):
    """Strikes so many times."""

    def __init__(self, world: PairWorld) -> None:
        super().__init__(world)
        self._pair = world
        self._weights = [self._rng.choice((0, 1, 1, 4)) for _ in KINDS]
        self._weights[self._rng.randrange(len(KINDS))] = 4

    def run(self, strikes: int) -> None:
        for _ in range(strikes):
            running().pause(self._rng.random())
            kind = self._rng.choices(KINDS, self._weights)[0]
            self._pair.model.counts[f"nemesis {kind}"] += 1
            getattr(self, kind)()

    def _which(self) -> int:
        return self._rng.randrange(len(self._pair.servers))

    def kill(self) -> None:
        number = self._which()
        with self._pair.trouble("down"):
            self._pair.kill_one(number)
            running().pause(self._rng.choice((0.0, 1.0, 30.0, 300.0)))
            self._pair.start_one(number)

    def restart(self) -> None:
        number = self._which()
        with self._pair.trouble("restart"):
            self._pair.stop_one(number, self._rng.choice((0.0, 0.5, 10.0)))
            self._pair.start_one(number)

    def freeze(self) -> None:
        """A server stops, and goes on later, as if nothing had happened: perhaps after all have taken it for dead."""
        seconds = self._rng.choice((1.0, 20.0, 140.0, 700.0, 700.0)) * self._rng.random()
        with self._pair.trouble("one stands still"):
            server = self._frozen(seconds)
            running().pause(min(_SILENT_S, seconds))
            if seconds > _SILENT_S:  # Its clients give it up.
                server.is_up = False
                for call in list(server.calls):
                    call.cut("UNAVAILABLE")
                running().pause(seconds - _SILENT_S)
                server.is_up = True
            running().pause(self._rng.random())

    def _frozen(self, seconds: float) -> PairServer:
        """One that stands still from now on: most often where it is about to ask an engine for something."""
        scheduler = running()
        if self._rng.random() < 0.7:
            engine = self._rng.choice((self._pair.tables.engine, self._pair.bucket.engine))
            requests, whose = self._rng.choice(((30, ""), (3, "commit")))
            engine.freeze_before(self._rng.randrange(requests), whose, seconds, scheduler.current)
            scheduler.block(10.0)
            engine.freeze_nobody()
        stopped = [server for server in self._pair.servers if server.process.frozen_until > scheduler.now]
        server = stopped[0] if stopped else self._pair.servers[self._which()]
        server.process.frozen_until = scheduler.now + seconds
        scheduler.note(f"{server.process.name} stands still for {seconds:.0f} s")
        return server

    # The engines.

    def database(self) -> None:
        with self._pair.trouble("database away"):
            self._away(self._pair.tables.engine)
            self._pair.tables.cut()
            self._pair.tables.mend()

    def bucket(self) -> None:
        with self._pair.trouble("bucket away"):
            self._away(self._pair.bucket.engine)

    def _away(self, engine: Engine) -> None:
        engine.is_away = True
        if self._rng.random() < 0.5:
            engine.kill()
        running().pause(self._rng.choice((1.0, 30.0, 60.0)) * self._rng.random())
        engine.is_away = False

    def sessions(self) -> None:
        with self._pair.trouble("sessions cut"):
            self._pair.tables.cut()
            running().pause(self._rng.random() * 3)
            self._pair.tables.mend()

    def commits(self) -> None:
        """Answers to COMMIT are lost, and now and then the database is away until servers have given up."""
        engine = self._pair.tables.engine
        with self._pair.trouble("commits not answered"):
            engine.loses = self._rng.choice((0.1, 0.5, 0.9))
            running().pause(self._rng.random() * 5)
            if self._rng.random() < 0.7:
                engine.is_away = True
                running().pause(self._rng.choice((5.0, 40.0)))
                engine.is_away = False
            engine.loses = 0.0

    def requests(self) -> None:
        with self._pair.trouble("requests not answered"):
            if self._rng.random() < 0.3:
                self._leave_objects()
            self._pair.bucket.engine.loses = self._rng.choice((0.1, 0.5, 0.9))
            if self._rng.random() < 0.5:
                self._contest()
            running().pause(self._rng.random() * 20)
            self._pair.bucket.engine.loses = 0.0

    def stalls(self) -> None:
        """What is sent to the bucket takes long, and arrives: a commit takes longer than a peer waits for a word."""
        with self._pair.trouble("bucket stalls"):
            self._pair.bucket.engine.stalls_s = self._rng.choice((10.0, 25.0))
            running().pause(self._rng.random() * 40)
            self._pair.bucket.engine.stalls_s = 0.0

    def _leave_objects(self) -> None:
        """Those of deleted samples, which the leader is about to remove."""
        client = Client(self._pair, _RIVALS)
        for key in self._pair.keys:
            client.delete(key)
        running().pause(REMOVED_AFTER_S - 1.0)

    def _contest(self) -> None:
        """Several bring one id at once, which is free."""
        key = self._pair.pick()
        rivals = [Client(self._pair, number) for number in range(_RIVALS, 2 * _RIVALS)]
        rivals[0].delete(key)
        threads = [running().spawn(f"rival {n}", lambda rival=rival: rival.put(key)) for n, rival in enumerate(rivals)]  # type: ignore[misc]
        for thread in threads:
            running().join(thread, self._pair.quiet_s)

    # The rest.

    def leap(self) -> None:
        """The servers' clock is another one than the database's, which counts."""
        SimTime.leapt_ns += self._rng.choice((-30, -2, -1, 1, 2, 30)) * _HOUR_NS // self._rng.choice((1, 60, 3600))

    def slow(self) -> None:
        engines = self._pair.tables.engine, self._pair.bucket.engine
        for engine in engines:
            engine.slow = self._rng.choice((1.0, 10.0, 100.0))
        ThreadPoolExecutor.slow_s = self._rng.choice((0.0, 0.1, 1.0))
        running().pause(self._rng.random() * 3)
        for engine in engines:
            engine.slow = 1.0
        ThreadPoolExecutor.slow_s = 0.0

    def cut(self) -> None:
        with self._pair.trouble("cut"):
            for server in self._pair.servers:
                for call in list(server.calls):
                    if self._rng.random() < 0.6:
                        call.cut("UNAVAILABLE")
