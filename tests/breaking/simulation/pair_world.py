"""One seed of two servers that share a catalogue and a bucket; and what must be true when it is over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulation.disk import SimFiles
from simulation.engines import SimBlobs, SimBucket, SimCatalogue, SimTables
from simulation.nemesis import Nemesis
from simulation.pair_nemesis import PairNemesis
from simulation.scheduler import Scheduler, running
from simulation.server import SimServer
from simulation.threads import START_UNIX_NS
from simulation.world import World

from slotstream.server.config import ServerConfig
from slotstream.store.catalogue.attempts import EXPIRED_S, LIFE_S, REMOVED_AFTER_S
from slotstream.store.catalogue.holds import Holds
from slotstream.store.cluster.generation import is_own
from slotstream.store.cluster.keeping import SWEEP_S
from slotstream.store.cluster.opening import open_store
from slotstream.store.cluster.reading import object_key
from slotstream.store.records import SampleKey, State
from slotstream.store.samples import SampleStore

if TYPE_CHECKING:
    from simulation.clients import Client

_SERVERS = 2
_START_TRIES = 200
# What was left of servers and requests that are gone is decided, and swept, by then: an attempt expires, then ends, then goes.
_SWEPT_S = LIFE_S + EXPIRED_S + 2 * REMOVED_AFTER_S + 3 * SWEEP_S + 60.0


class PairServer(SimServer):
    """One of several."""

    def __init__(self, world: PairWorld, place: Path, files: SimFiles, name: str, *others: Any) -> None:
        self._world, self._place = world, place
        self.catalogue: SimCatalogue
        super().__init__(files, *others)
        self.process.name = name

    def _config(self) -> ServerConfig:
        return ServerConfig(
            store="s3://bucket/prefix",
            catalogue="postgresql://somebody@somewhere/slotstream",
            scratch=self._place,
            listen="127.0.0.1:0",
            **self._options,
        )

    def _open(self, config: ServerConfig) -> SampleStore:
        self.catalogue = SimCatalogue(self._world.tables)
        return open_store(
            "s3://bucket/prefix",
            "postgresql://somebody@somewhere/slotstream",
            self._place,
            free_bytes_min=config.free_bytes_min,
            files=self._files,
            uploads_max=64,
            blobs=SimBlobs(self._world.bucket, self._world.part_bytes),
            catalogue=self.catalogue,
        )

    def serve_news(self) -> None:
        """As `app.Server` does it."""

        def told(key: SampleKey | None) -> None:
            call = self.waiters.notify_all if key is None else lambda: self.waiters.notify(key)
            self.loop.call_soon_threadsafe(call)

        self.store.watch(told)

    def _tell(self) -> None:
        if self.is_up:
            self.serve_news()
        super()._tell()

    def _held(self) -> Holds:
        return self.catalogue._reading

    def kill(self) -> None:
        super().kill()
        if hasattr(self, "catalogue"):
            self.catalogue.hang_up()


class PairWorld(World):
    """Two servers. A call goes to either."""

    trouble_lasts_s = 60.0  # What was sent late arrives; a server that doubts an engine asks it again.
    quiet_s = 3000.0  # Servers stand still, or are away, for minutes.
    silent_s = 30.0  # A connector's ack_timeout_s, unless it says another.
    never = frozenset({"INTERNAL"})  # It is final to a connector, and an engine that is away comes back.

    def __init__(self, scheduler: Scheduler, root: Path) -> None:
        self.tables, self.bucket = SimTables(), SimBucket()
        self.part_bytes = scheduler.rng.choice((1 << 20, 6000, 5000))
        self.servers: list[PairServer] = []
        self._asked: PairServer | None = None  # In place of either.
        super().__init__(scheduler, root)

    def _begin(self) -> None:
        self._disks = []
        for number in range(_SERVERS):
            (self._root / str(number)).mkdir()
            self._disks.append(SimFiles(self._root / str(number)))
        self.servers = [self._server(number) for number in range(_SERVERS)]

    def _server(self, number: int) -> PairServer:
        running().note(f"server {number} starts")
        files = self._disks[number]
        name = f"server {number}/{next(self._lives)}"
        return PairServer(self, files.root, files, name, next(self._serials), self._options, self._chunk_threads)

    @property
    def server(self) -> PairServer:  # type: ignore[override]
        up = [server for server in self.servers if server.is_up]
        return self._asked or running().rng.choice(up or self.servers)

    def told_failed(self, key: SampleKey, called_at: float) -> None:
        """The catalogue knows of every sample that failed: no other server could tell of it otherwise."""
        if key not in self.tables.rows and not self.model.may_be_gone(key, called_at):
            running().fail(f"the server said that {key} failed, and the catalogue never heard of it")

    # The servers' lives.

    def kill_one(self, number: int) -> None:
        running().note(f"kill {number}")
        self._disks[number].kill(self.servers[number].kill)

    def stop_one(self, number: int, drain_s: float) -> None:
        running().note(f"stop {number}")
        self.servers[number].stop(drain_s)
        self.servers[number].catalogue.hang_up()

    def start_one(self, number: int) -> None:
        """As a supervisor does: again, until it is up."""
        for _ in range(_START_TRIES):
            self.servers[number] = self._server(number)
            if self.servers[number].wait_until_up():
                running().note(f"server {number} is up")
                return
            self.kill_one(number)
            running().pause(1.0)
        running().fail(f"the server could not be started: {self.servers[number].refusal}")

    def end(self) -> None:
        for server in self.servers:
            server.kill()
        for engine in (self.tables.engine, self.bucket.engine):
            running().kill(engine.process)
        for files in self._disks:
            files._hang_up()

    # One seed.

    def _nemesis(self) -> Nemesis:
        return PairNemesis(self)

    def run(self) -> None:
        for server in self.servers:
            assert server.wait_until_up(), server.refusal
        super().run()

    def _come_to_rest(self, client: Client) -> None:
        scheduler = running()
        scheduler.note("at rest")
        scheduler.pause(self.trouble_lasts_s)
        for server in self.servers:  # Whoever led first may have met samples, and rules that nobody knew yet.
            self._asked = server
            client.accept_rules()
        self._asked = None
        for key in self.keys:
            client.read(key)
        scheduler.pause(_SWEPT_S)
        self._check_bucket()
        self._check_rules()
        for key in self.keys:
            client.read(key)
            client.put(key)
            client.read(key)
        scheduler.pause(_SWEPT_S)
        self._check_bucket()
        for number in range(_SERVERS):
            self.stop_one(number, 10.0)
            if not self.servers[number].process.dead:
                return
            self.start_one(number)
            for key in self.keys:
                client.read(key)
        for number in range(_SERVERS):
            self.stop_one(number, 10.0)
        for files in self._disks:
            if partials := sorted(path.name for path in files.root.rglob("*.partial")):
                scheduler.fail(f"scratch files are left: {partials}")

    def _check_bucket(self) -> None:
        """It holds the committed samples' objects, and nothing else."""
        records = [row.record for row in self.tables.rows.values()]
        wanted = {object_key(one.key, one.attempt) for one in records if one.state is State.COMMITTED}
        there = {name for name in self.bucket.objects if not is_own(name)}
        if left := sorted(there - wanted):
            running().fail(f"objects of nothing are left: {left}")
        if gone := sorted(wanted - there):
            running().fail(f"objects of committed samples are gone: {gone}")
        latest = self.tables.clock() + 10**9
        if strange := [str(one.key) for one in records if not START_UNIX_NS <= one.created_unix_ns <= latest]:
            running().fail(f"stamps are not of the catalogue's clock: {strange}")
        if self.bucket.uploads:
            running().fail(f"parts of uploads are left: {sorted(self.bucket.uploads)}")
        if self.tables.attempts:
            running().fail(f"attempts are left: {self.tables.attempts}")
        if arriving := [str(one.key) for one in records if one.state is State.ARRIVING]:
            running().fail(f"samples are arriving for ever: {arriving}")
