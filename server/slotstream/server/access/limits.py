"""What one peer may have at a time, and all together: one table. docs/security.md has it in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slotstream.server.access.gate import PEERS_ASSUMED, Shares
from slotstream.server.config import ServerConfig
from slotstream.store.samples import descriptors_allow
from slotstream.store.upkeep.lifetimes import LEASES_MAX

_WAITING_SHARE = 0.75  # Of reads: whoever waits for samples that never come must not keep others from those that are there.


@dataclass(frozen=True, slots=True)
class Limit:
    """`what` there may be, in the plural: `total` at a time, and `of_peer` of one peer, or of one address.

    Of the last quarter of `total` a peer gets one, and only while it holds no other.
    """

    what: str
    total: Callable[[ServerConfig], int]
    of_peer: Callable[[ServerConfig], int]

    def shares(self, config: ServerConfig) -> Shares:
        return Shares(self.what, self.total(config), self.of_peer(config))


INGEST_STREAMS = Limit("ingest streams", lambda c: c.streams_max, lambda c: c.peer_streams_max)
OPEN_SAMPLES = Limit("open samples", lambda c: descriptors_allow(), lambda c: c.peer_open_samples_max)
READS = Limit("reads", lambda c: c.reads_max, lambda c: c.peer_reads_max)
WAITING_READS = Limit(
    "reads that wait for samples",
    lambda c: max(1, int(c.reads_max * _WAITING_SHARE)),
    lambda c: max(1, int(c.peer_reads_max * _WAITING_SHARE)),
)
REQUESTS = Limit("requests", lambda c: PEERS_ASSUMED * c.requests_max, lambda c: c.requests_max)
VERIFICATIONS = Limit("verifications", lambda c: 32, lambda c: 2)
LEASES = Limit("leases", lambda c: LEASES_MAX, lambda c: LEASES_MAX // PEERS_ASSUMED)
HEALTH_WATCHES = Limit("health watches", lambda c: 4096, lambda c: 2048)  # Each connector has one.
HEALTH_CHECKS = Limit("health checks", lambda c: 1024, lambda c: 256)
CONNECTIONS = Limit(
    "connections", lambda c: c.connections_max, lambda c: c.connections_max - c.connections_max // PEERS_ASSUMED
)

LIMITS = (
    INGEST_STREAMS,
    OPEN_SAMPLES,
    READS,
    WAITING_READS,
    REQUESTS,
    VERIFICATIONS,
    LEASES,
    HEALTH_WATCHES,
    HEALTH_CHECKS,
    CONNECTIONS,
)
