"""The Status call: how the server is, and who is connected. What a disk that hangs keeps back is left out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from slotstream.server.access.gate import Gate
from slotstream.server.access.tokens import Principal
from slotstream.server.housekeeping import Housekeeping
from slotstream.server.overview.history import Counted, History, failed_between, hours_until_full
from slotstream.server.parts import ServerParts
from slotstream.server.samples import convert
from slotstream.server.samples.calls import Calls, Context, parsed
from slotstream.server.version import server_version
from slotstream.store.samples import SampleStore
from slotstream.store.shared_state import SharedState
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import SlotStreamError

_NAMESPACES_MAX = 1000
_ENGINES_MAX = 1000
_CATALOGUE_S = 2.0
_MINUTE_S, _HOUR_S = 60.0, 3600.0


@dataclass(frozen=True, slots=True)
class About:
    """What the process that serves knows of itself. `health`: a word of `/readyz`; `processes` and what the disk has, now."""

    history: History
    health: Callable[[], str] = lambda: "ok"
    disk: Callable[[], tuple[int | None, int | None]] = lambda: (None, None)  # Bytes free, and in all.
    processes: Callable[[], int] = lambda: 1
    certificate_expires: Callable[[], float] = lambda: 0.0  # Unix seconds.
    nixl: bool = False


class StatusCall:
    """Belongs to the event loop."""

    def __init__(self, parts: ServerParts[SampleStore], calls: Calls, housekeeping: Housekeeping, about: About | None) -> None:
        """`about`: None where there is no process around the services, in some tests."""
        about = about or About(History(lambda at: parts.metrics.counted(at, None)))
        self._calls, self._housekeeping, self._about = calls, housekeeping, about
        self._config, self._store, self._metrics, self._engines = parts.config, parts.store, parts.metrics, parts.engines
        self._began = time.monotonic()

    async def answer(self, gate: Gate, context: Context) -> pb.StatusReply:
        """Of a caller who may do nothing here, also: version, health and what the token covers."""
        async with self._calls.answering("Status", gate, context) as (session, raw):
            parsed(pb.StatusRequest, raw)
            who = session.principal()
            namespaces = await self._namespaces(who)
            return pb.StatusReply(
                version=server_version(),
                health=self._about.health(),
                now_unix_ns=time.time_ns(),
                rights=sorted(who.rights),
                covers=sorted(who.namespaces or ()),
                namespaces=(namespaces or ())[:_NAMESPACES_MAX],
                namespaces_unknown=namespaces is None,
                namespaces_left_out=len(namespaces or ()) > _NAMESPACES_MAX,
                server=self._server() if "admin" in who.rights and who.namespaces is None else None,
            )

    async def _namespaces(self, who: Principal) -> list[pb.NamespaceUsage] | None:
        """One more than are told, at most; None where the catalogue's disk does not answer."""
        if "read" not in who.rights:
            return []
        if self._about.health() == "disk":
            return None
        try:
            async with asyncio.timeout(_CATALOGUE_S):
                return await self._calls.look_up(self._usages, who.spaces("read"))
        except (SlotStreamError, TimeoutError):
            return None

    def _usages(self, spaces: tuple[str, ...] | None) -> list[pb.NamespaceUsage]:
        lifetimes, policy = self._store.lifetimes, self._housekeeping.policy
        usages = lifetimes.usages("", _NAMESPACES_MAX + 1) if spaces is None else map(lifetimes.usage, spaces)
        return [convert.usage_of(usage, policy) for usage in usages]

    def _server(self) -> pb.ServerStatus:
        config, metrics, about, housekeeping = self._config, self._metrics, self._about, self._housekeeping
        minute_ago, now = about.history.over(_MINUTE_S)
        hour_ago, _ = about.history.over(_HOUR_S, now)
        disk_before, _ = about.history.over(_HOUR_S, now, of_disk=True)
        hours = hours_until_full(disk_before, now, config.free_bytes_min)
        if now.at - disk_before.at < (now.at - hour_ago.at) / 2:  # The disk was away for most of the time: too short to tell.
            hours = None
        engines = self._engines.all()
        free_bytes, disk_bytes = about.disk()
        return pb.ServerStatus(
            uptime_s=time.monotonic() - self._began,
            tls=config.tls_cert is not None,
            certificate_expires_unix_s=int(about.certificate_expires()),
            tokens=config.tokens_file is not None,
            processes=about.processes(),
            processes_wanted=config.workers,
            nixl=about.nixl,
            engines=engines[:_ENGINES_MAX],
            engines_left_out=len(engines[_ENGINES_MAX:]),
            open_samples=int(metrics.total(metrics.open_samples)),
            **_rates(minute_ago, now),
            counted_s=now.at - hour_ago.at,
            failed=failed_between(hour_ago, now),
            hours_until_full=hours,
            free_bytes=free_bytes,
            disk_bytes=disk_bytes,
            free_bytes_min=config.free_bytes_min,
            reads=int(metrics.total(metrics.reads)),
            waiting_reads=int(metrics.total(metrics.waiting_reads)),
            clock=self._store.lifetimes.watch.trouble,
            age_held=sorted(housekeeping.age_held),
            rules_held=sorted(housekeeping.rules.held),
            rules_wait_s=housekeeping.rules.wait_s,
            damaged=self._store.lifetimes.quarantined,
            catalogue_behind=self._store.is_behind,
            shared=_shared(self._store.shared_state()),
        )


def _shared(state: SharedState | None) -> pb.SharedStore | None:
    if state is None:
        return None
    return pb.SharedStore(
        bucket=state.bucket,
        catalogue=state.catalogue,
        trouble=state.trouble,
        leads=state.leads,
        scratch_bytes=state.scratch_bytes,
        attempts_arriving=state.attempts.arriving,
        attempts_ended=state.attempts.ended,
        attempts_late=state.attempts.late,
    )


def _rates(before: Counted, now: Counted) -> dict[str, float]:
    seconds = now.at - before.at
    per_s = 1 / seconds if seconds > 0 else 0.0
    return {
        "rates_s": seconds,
        "samples_per_s": (now.committed - before.committed) * per_s,
        "received_bytes_per_s": (now.received_bytes - before.received_bytes) * per_s,
        "sent_bytes_per_s": (now.sent_bytes - before.sent_bytes) * per_s,
    }
