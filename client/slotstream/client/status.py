"""How a server is and which engines are connected to it, as plain data, and what of that is a problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slotstream.client.info import NamespaceUsage
from slotstream.v1 import samples_pb2
from slotstream.wire.names import FINAL

FILLING_HOURS = 24.0
FILLING_COUNTED_S = 600.0  # A rate of a shorter time says little of the next day.
EXPIRY_S = 7 * 86400.0
SILENT_S = 20.0  # Connectors that report do so every five.
STAGING_FULL = 0.95
_NAMED_MAX = 5
# The request ended before its rows were whole, as its caller wanted: nothing is wrong.
_WANTED_ENDS = frozenset({"ABORTED"})


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One worker of an engine, as its ingest stream is, or was within the last hour. What nobody told is None."""

    engine_id: str
    rank: int
    peer: str  # whose token or certificate it has
    address: str
    vllm_version: str
    slotstream_version: str
    transport: str  # grpc or nixl: how its last chunk came
    connected: bool
    since_s: float  # seconds since it connected, or since its stream ended
    streams: int  # that it had so far: more than one is a link that broke
    open_samples: int
    last_sample: str | None  # the last one that was stored on this stream: namespace/sample_id
    last_sample_s: float | None  # how many seconds ago
    # What its connector says every five seconds; None from one of an earlier version.
    report_s: float | None = None  # how many seconds ago it said so
    host: str | None = None
    layers: tuple[str, ...] | None = None  # their names
    staging_bytes: int | None = None
    staging_bytes_in_use: int | None = None
    spool_bytes_in_use: int | None = None
    samples_in_flight: int | None = None
    links_lost: int | None = None  # streams that broke since the worker started

    @classmethod
    def from_wire(cls, told: samples_pb2.EngineStatus) -> EngineStatus:
        return cls(
            engine_id=told.engine_id,
            rank=told.rank,
            peer=told.peer,
            address=told.address,
            vllm_version=told.vllm_version,
            slotstream_version=told.slotstream_version,
            transport=told.transport,
            connected=told.connected,
            since_s=told.since_s,
            streams=told.streams,
            open_samples=told.open_samples,
            last_sample=told.last_sample or None,
            last_sample_s=told.last_sample_s if told.last_sample else None,
            **(_reported(told) if told.HasField("report") else {}),
        )


def _reported(told: samples_pb2.EngineStatus) -> dict[str, Any]:
    report = told.report
    layers = tuple(map(str, report.layer_ids))
    return {
        "report_s": told.report_s,
        "host": report.host,
        "layers": (*layers[:-1], FINAL) if report.has_final and layers else layers,
        "staging_bytes": report.staging_bytes,
        "staging_bytes_in_use": report.staging_bytes_in_use,
        "spool_bytes_in_use": report.spool_bytes_in_use,
        "samples_in_flight": report.samples_in_flight,
        "links_lost": report.links_lost,
    }


@dataclass(frozen=True, slots=True)
class SharedStore:
    """The bucket and the catalogue that several servers share, as one of them saw them some seconds ago."""

    bucket: str  # their URLs, without passwords
    catalogue: str
    trouble: str | None  # which of both is away, in a sentence
    leads: bool  # this server applies rules, scrubs and sweeps for all
    scratch_bytes: int  # of samples that arrive at this server
    attempts_arriving: int  # uploads of all servers
    attempts_ended: int  # whose objects are removed in time
    attempts_late: int  # of both: the leader should have done with them ten minutes ago

    @classmethod
    def from_wire(cls, told: samples_pb2.SharedStore) -> SharedStore:
        return cls(
            bucket=told.bucket,
            catalogue=told.catalogue,
            trouble=told.trouble or None,
            leads=told.leads,
            scratch_bytes=told.scratch_bytes,
            attempts_arriving=told.attempts_arriving,
            attempts_ended=told.attempts_ended,
            attempts_late=told.attempts_late,
        )


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What only `admin` of every namespace is told. Sizes in bytes, times in seconds unless a name says otherwise."""

    uptime_s: float
    tls: bool
    certificate_expires_unix_s: int | None
    tokens: bool  # callers need one
    processes: int  # that take ingest streams now
    processes_wanted: int
    nixl: bool
    engines: tuple[EngineStatus, ...]  # the connected ones first
    engines_left_out: int
    open_samples: int
    rates_s: float  # for so long the next three were counted
    samples_per_s: float
    received_bytes_per_s: float
    sent_bytes_per_s: float
    counted_s: float  # for so long the next two were counted: at most an hour
    failed: dict[str, int]  # by code
    hours_until_full: float | None  # None: the disk did not fill in that time
    free_bytes: int | None  # None: the disk does not answer
    disk_bytes: int | None
    free_bytes_min: int
    reads: int
    waiting_reads: int
    clock: str | None
    age_held: tuple[str, ...]
    rules_held: tuple[str, ...]
    rules_wait_s: float
    damaged: int  # samples taken out of service since the server started
    catalogue_behind: bool  # the catalogue is older than its bucket: nothing is deleted
    shared: SharedStore | None  # None: it shares nothing with other servers

    @classmethod
    def from_wire(cls, told: samples_pb2.ServerStatus) -> ServerStatus:
        def given(name: str) -> Any:
            return getattr(told, name) if told.HasField(name) else None

        return cls(
            uptime_s=told.uptime_s,
            tls=told.tls,
            certificate_expires_unix_s=told.certificate_expires_unix_s or None,
            tokens=told.tokens,
            processes=told.processes,
            processes_wanted=told.processes_wanted,
            nixl=told.nixl,
            engines=tuple(map(EngineStatus.from_wire, told.engines)),
            engines_left_out=told.engines_left_out,
            open_samples=told.open_samples,
            rates_s=told.rates_s,
            samples_per_s=told.samples_per_s,
            received_bytes_per_s=told.received_bytes_per_s,
            sent_bytes_per_s=told.sent_bytes_per_s,
            counted_s=told.counted_s,
            failed=dict(sorted(told.failed.items())),
            hours_until_full=given("hours_until_full"),
            free_bytes=given("free_bytes"),
            disk_bytes=given("disk_bytes"),
            free_bytes_min=told.free_bytes_min,
            reads=told.reads,
            waiting_reads=told.waiting_reads,
            clock=told.clock or None,
            age_held=tuple(told.age_held),
            rules_held=tuple(told.rules_held),
            rules_wait_s=told.rules_wait_s,
            damaged=told.damaged,
            catalogue_behind=told.catalogue_behind,
            shared=SharedStore.from_wire(told.shared) if told.HasField("shared") else None,
        )


@dataclass(frozen=True, slots=True)
class Status:
    """How a server is. `server` is None where the token is not `admin` of every namespace."""

    version: str
    health: str  # ok, full, disk, starting or draining
    now_unix_ns: int  # by the server's clock
    rights: tuple[str, ...]  # of the token
    covers: tuple[str, ...] | None  # namespaces that it covers; None: every one
    namespaces: tuple[NamespaceUsage, ...] | None  # those of them that it may read, at most 1000; None: the catalogue is slow
    namespaces_left_out: bool  # there are more
    server: ServerStatus | None

    @classmethod
    def from_wire(cls, reply: samples_pb2.StatusReply) -> Status:
        return cls(
            version=reply.version,
            health=reply.health,
            now_unix_ns=reply.now_unix_ns,
            rights=tuple(reply.rights),
            covers=tuple(reply.covers) or None,
            namespaces=None if reply.namespaces_unknown else tuple(map(NamespaceUsage.from_wire, reply.namespaces)),
            namespaces_left_out=reply.namespaces_left_out,
            server=ServerStatus.from_wire(reply.server) if reply.HasField("server") else None,
        )

    @property
    def problems(self) -> dict[str, str]:
        """What is wrong, as far as this token is told: stable names, and a sentence each. docs/status.md lists them."""
        found = dict((_HEALTH[self.health],)) if self.health in _HEALTH else {}
        return found if self.server is None else {**found, **_problems(self.server, self.now_unix_ns)}


_HEALTH = {
    "disk": ("disk_away", "the data directory is away, or its disk does not answer: see the server's log"),
    "full": ("disk_full", "no sample fits any more: make room, or let retention rules do it"),
    "draining": ("draining", "the server is shutting down, and takes no samples"),
}


def _problems(server: ServerStatus, now_unix_ns: int) -> dict[str, str]:
    found = {}
    hours = server.hours_until_full
    if hours is not None and hours < FILLING_HOURS and server.counted_s >= FILLING_COUNTED_S:
        found["disk_filling"] = f"the disk is full in {hours:.1f} hours if it goes on like this"
    if server.processes < server.processes_wanted:
        found["processes_missing"] = f"{server.processes} of {server.processes_wanted} processes take ingest streams"
    if silent := _named(one for one in server.engines if one.connected and (one.report_s or 0.0) > SILENT_S):
        found["engine_silent"] = (
            f"connected, and silent for {SILENT_S:.0f} s or more, stopped or held up by this server: {silent}"
        )
    if full := _named(one for one in server.engines if one.connected and _is_full(one)):
        found["staging_full"] = f"staging is full, for rows come faster than they are stored: {full}"
    failed = {code: count for code, count in server.failed.items() if code not in _WANTED_ENDS}
    if failed:
        counts = ", ".join(f"{count} {code}" for code, count in failed.items())
        found["samples_failed"] = f"samples failed within the last hour: {counts}"
    if server.damaged:
        found["samples_damaged"] = f"{server.damaged} samples were damaged and taken out of service: see slotstream stat"
    if server.catalogue_behind:
        found["catalogue_behind"] = (
            "the catalogue is older than its bucket, and nothing is deleted: slotstream rebuild compares both"
        )
    if server.shared is not None and server.shared.trouble:
        found["engine_away"] = f"{server.shared.trouble}: see the logs of the bucket's store and of the database"
    if server.shared is not None and server.shared.attempts_late:
        left = server.shared.attempts_late
        found["uploads_left"] = f"{left} uploads ended long ago, and what is left of them is not removed: see the servers' logs"
    if server.clock:
        found["clock_in_doubt"] = f"{server.clock}; if the clock is right, start the server with --accept-clock"
    if server.age_held:
        found["age_held"] = f"nothing is deleted by age in {', '.join(server.age_held)}, for the clock is in doubt"
    if server.rules_held:
        held = ", ".join(server.rules_held)
        found["rules_held"] = f"new rules would delete more than half of {held}: slotstream retention, then --accept"
    expires = server.certificate_expires_unix_s
    if expires is not None and (left_s := expires - now_unix_ns / 1e9) < EXPIRY_S:
        found["certificate_expires"] = f"the server's certificate expires in {max(0.0, left_s / 3600):.0f} hours"
    return found


def _is_full(engine: EngineStatus) -> bool:
    limit, in_use = engine.staging_bytes, engine.staging_bytes_in_use
    return bool(limit) and in_use is not None and limit is not None and in_use >= STAGING_FULL * limit


def _named(engines: Iterable[EngineStatus]) -> str:
    """The first few of them, by engine and rank."""
    names = [f"{one.engine_id} rank {one.rank}" for one in engines]
    return ", ".join(names[:_NAMED_MAX]) + (f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else "")
