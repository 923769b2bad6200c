"""What the engine's worker and its sender process say to each other, pickled: both are of one installation.

On the first connection the worker says `Setup`, then lists of items; the process says `Started` or `Refused`, then `Update`s.
On the second the worker asks for staging (`Want`) where less is lent than it needs, and the process says `Lent` or why not.
Slots themselves go through the staging area's `LeaseRing`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from slotstream.connector.faults import SampleFault
from slotstream.connector.sending.staging_pool import StagingShape
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.targets import Target
from slotstream.wire.errors import SlotStreamError


@dataclass(frozen=True, slots=True)
class Setup:
    """All that the process is told before it starts. `hello` is a serialized ingest_pb2.Hello; `first_turn` the ring's."""

    config: ConnectorConfig
    hello: bytes
    shape: StagingShape
    first_turn: int
    worker_pid: int
    log_level: int


@dataclass(frozen=True, slots=True)
class Started:
    """The pump runs."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The options cannot work here: `message` is a ConfigError's."""

    message: str


@dataclass(frozen=True, slots=True)
class Close:
    """Finish within `timeout_s` and end."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the log, to be said by the worker: its own lines have the process's name in front."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Update:
    """What happened since the last one; also said when nothing did, every HEARTBEAT_S. Gauges and server are those of now.

    `ended`: requests whose samples are durable, or failed as the server knows.
    """

    ended: list[str]
    faults: list[SampleFault]
    counts: Mapping[str, float]
    gauges: Mapping[str, float]
    server: Target | None
    lines: list[LogLine]


@dataclass(frozen=True, slots=True)
class Want:
    """`count` slots are wanted in the ring, those there included, by `deadline` (monotonic, which all processes share)."""

    count: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Lent:
    """The answer to a Want: they are in the ring, or `refusal` says why not."""

    refusal: SlotStreamError | None


HEARTBEAT_S = 1.0


def say(connection: Connection, message: object) -> None:
    """Send one message. Raises OSError when the other end is gone."""
    connection.send_bytes(pickle.dumps(message, protocol=5))


def hear(connection: Connection) -> Any:
    """Receive one message. Raises EOFError or OSError when the other end is gone."""
    return pickle.loads(connection.recv_bytes())
