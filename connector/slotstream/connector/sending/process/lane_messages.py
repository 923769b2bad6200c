"""What the sender process and a process that carries one of its streams say to each other, pickled.

The sender says `LaneSetup`, then lists of calls; the other one says lists of news. Rows stay in staging, mapped in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from slotstream.connector.options import ConnectorOptions
from slotstream.connector.sending.process.messages import LogLine
from slotstream.connector.sending.staging_pool import StagingShape
from slotstream.transport.base import SinkEvent


@dataclass(frozen=True, slots=True)
class LaneSetup:
    """All that the process is told before it starts. `hello` is a serialized ingest_pb2.Hello."""

    options: ConnectorOptions
    hello: bytes
    shape: StagingShape
    stream: int
    log_level: int


@dataclass(frozen=True, slots=True)
class LaneChunk:
    """A RowChunk, whose bytes are [at, at + nbytes) of staging."""

    sample: int
    chunk: int
    first_row: int
    rows: int
    at: int
    nbytes: int
    xxh3: int


@dataclass(frozen=True, slots=True)
class LaneCall:
    """A call of the sink: the name of its method, and its message, serialized; b"" where it takes none."""

    method: str
    message: bytes = b""


@dataclass(frozen=True, slots=True)
class LaneClose:
    """Stop within `timeout_s` and end."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Met:
    """The stream met this process of a server that has so many. It waits for the `Settled` of this number."""

    number: int
    processes: int
    process: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Whether it stays where it `met`: the number of that."""

    met: int
    stays: bool


@dataclass(frozen=True, slots=True)
class Left:
    """The stream is not up any more."""


@dataclass(frozen=True, slots=True)
class Alive:
    """Calls are still done. Said every HEARTBEAT_S, by the thread that does them."""


ToLane = LaneChunk | LaneCall | LaneClose | Settled
FromLane = SinkEvent | Met | Left | Alive | LogLine
