"""What the services of one process share, in one object: a seventh thing is one line here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from slotstream.server.access.gate import Gate
from slotstream.server.config import ServerConfig
from slotstream.server.disk_threads import DiskThreads
from slotstream.server.metrics import Metrics
from slotstream.server.overview.engines import Engines
from slotstream.server.waiters import Waiters

_Store = TypeVar("_Store", covariant=True)


@dataclass(frozen=True, slots=True)
class ServerParts(Generic[_Store]):
    """Made once a process. `store`: a SampleStore in the primary process, a RemoteStore in a worker."""

    config: ServerConfig
    store: _Store
    disk_threads: DiskThreads
    metrics: Metrics
    waiters: Waiters
    gate: Gate
    engines: Engines = field(default_factory=Engines)
