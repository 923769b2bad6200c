"""Which workers of engines are connected, and which were within the last hour; also those of the server's other processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from slotstream.v1 import ingest_pb2, samples_pb2

WORD_CHARS_MAX = 64
GONE_MAX, GONE_OF_PEER_MAX = 256, 64
GONE_S = 3600.0
LAYERS_KEPT_MAX = 256
_Name = tuple[str, str, int]


def word(said: str, most: int = WORD_CHARS_MAX) -> str:
    """What a peer says of itself, as far as it is kept: cut, and only what can be printed."""
    return "".join(c for c in said[:most] if c.isprintable())


class Engine:
    """One worker of an engine: what its Hello said, and what has come of its stream. Belongs to the event loop."""

    def __init__(self, hello: ingest_pb2.Hello, peer: str, address: str, now: float, *, nixl: bool) -> None:
        """`now`: monotonic seconds, when it connected. `nixl`: its chunks may be read over NIXL."""
        self.engine_id = word(hello.engine_id)
        self.rank = hello.worker_rank
        self.peer = word(peer)
        self._address = word(address)
        self._versions = word(hello.vllm_version), word(hello.slotstream_version)
        self._since = now
        self.transport = "nixl" if nixl else "grpc"  # Of its last chunk.
        self.streams = 1
        self.open_samples = 0
        self.last_sample = ""
        self.last_sample_at = 0.0
        self.ended_at: float | None = None
        self.report: ingest_pb2.EngineReport | None = None
        self.report_at = 0.0

    @property
    def name(self) -> _Name:
        return self.peer, self.engine_id, self.rank

    def told(self, now: float) -> samples_pb2.EngineStatus:
        vllm_version, slotstream_version = self._versions
        return samples_pb2.EngineStatus(
            engine_id=self.engine_id,
            rank=self.rank,
            peer=self.peer,
            address=self._address,
            vllm_version=vllm_version,
            slotstream_version=slotstream_version,
            transport=self.transport,
            connected=self.ended_at is None,
            since_s=now - (self._since if self.ended_at is None else self.ended_at),
            streams=self.streams,
            open_samples=self.open_samples,
            last_sample=self.last_sample,
            last_sample_s=now - self.last_sample_at if self.last_sample else 0.0,
            report=self.report,
            report_s=now - self.report_at if self.report is not None else 0.0,
        )


def _kept(report: ingest_pb2.EngineReport) -> ingest_pb2.EngineReport:
    return ingest_pb2.EngineReport(
        host=word(report.host),
        layer_ids=report.layer_ids[:LAYERS_KEPT_MAX],
        has_final=report.has_final,
        staging_bytes=report.staging_bytes,
        staging_bytes_in_use=report.staging_bytes_in_use,
        spool_bytes_in_use=report.spool_bytes_in_use,
        samples_in_flight=report.samples_in_flight,
        links_lost=report.links_lost,
    )


class Engines:
    """Belongs to one event loop. A peer leaves behind at most GONE_OF_PEER_MAX engines, and all peers GONE_MAX."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or (lambda: time.monotonic())  # Looked up when it is asked: the simulation has its own.
        self._connected: dict[Engine, None] = {}
        self._gone: dict[_Name, Engine] = {}  # The one that ended last is last.
        self._of_processes: dict[int, tuple[samples_pb2.EngineStatus, ...]] = {}

    def connect(self, hello: ingest_pb2.Hello, peer: str, address: str, *, nixl: bool) -> Engine:
        """A stream said Hello. `ended` must be called of what this returns."""
        engine = Engine(hello, peer, address, self._clock(), nixl=nixl)
        before = self._gone.pop(engine.name, None)
        if before is not None:
            engine.streams += before.streams
        self._connected[engine] = None
        return engine

    def stored(self, engine: Engine, sample: str) -> None:
        """A sample of its was committed."""
        engine.last_sample, engine.last_sample_at = sample, self._clock()

    def reported(self, engine: Engine, report: ingest_pb2.EngineReport) -> None:
        """It said how it is. What is kept of that is short, however long it was."""
        engine.report, engine.report_at = _kept(report), self._clock()

    def ended(self, engine: Engine) -> None:
        """Its stream is over."""
        del self._connected[engine]
        engine.ended_at, engine.open_samples = self._clock(), 0
        self._gone.pop(engine.name, None)
        self._gone[engine.name] = engine
        self._forget_old()
        mine = [name for name, one in self._gone.items() if one.peer == engine.peer]
        if len(mine) > GONE_OF_PEER_MAX:
            del self._gone[mine[0]]
        elif len(self._gone) > GONE_MAX:  # Of the peer that left most of them behind.
            most = Counter(one.peer for one in self._gone.values()).most_common(1)[0][0]
            del self._gone[next(name for name, one in self._gone.items() if one.peer == most)]

    def _forget_old(self) -> None:
        now = self._clock()
        for name in [name for name, one in self._gone.items() if one.ended_at is not None and now - one.ended_at > GONE_S]:
            del self._gone[name]

    def own(self) -> list[samples_pb2.EngineStatus]:
        """Those of this process."""
        self._forget_old()
        now = self._clock()
        return [engine.told(now) for engine in (*self._connected, *self._gone.values())]

    def merge(self, process: int, engines: Iterable[samples_pb2.EngineStatus]) -> None:
        """What another process of this server knows, in place of what it said before."""
        self._of_processes[process] = tuple(engines)

    def forget(self, process: int) -> None:
        """The process ended, and its streams with it."""
        self._of_processes.pop(process, None)

    def all(self) -> list[samples_pb2.EngineStatus]:
        """Those of every process: the connected ones, then those that are connected nowhere any more, the latest first."""
        known = [*self.own(), *(one for told in self._of_processes.values() for one in told)]
        here = [one for one in known if one.connected]
        names = {(one.peer, one.engine_id, one.rank) for one in here}
        gone: dict[_Name, samples_pb2.EngineStatus] = {}
        for one in sorted((one for one in known if not one.connected), key=lambda one: one.since_s):
            gone.setdefault((one.peer, one.engine_id, one.rank), one)
        here.sort(key=lambda one: (one.engine_id, one.rank, one.since_s))
        return [*here, *(one for name, one in gone.items() if name not in names)]
