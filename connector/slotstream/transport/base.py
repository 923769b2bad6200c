"""The transport protocol: what a data plane takes from the connector, and what it answers.

Control messages are the protobuf messages of v1/ingest.proto for every way of the bytes; only chunks differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from slotstream.transport.targets import Target
from slotstream.v1 import ingest_pb2


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows [first_row, first_row + rows) of one sample, lying in staging. `xxh3` is the hash of `buffer`."""

    sample: int
    chunk: int
    first_row: int
    rows: int
    buffer: memoryview
    xxh3: int


@dataclass(frozen=True, slots=True)
class Acked:
    """The server took these chunks, none of which is durable before its sample is; the sink needs their buffers no longer."""

    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """The sample is durable. `duplicate`: the same content had been stored before."""

    sample: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The server will not store the sample. `code` is a stable error code."""

    sample: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The server answers. `server_version` for the log; `columns`: what it takes beside hidden states and token ids.

    `target`: which server it is, where there is one.
    """

    server_version: str
    columns: frozenset[str] = frozenset()
    target: Target | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link broke, or the server refused our token: no open sample gets a verdict any more.

    Whether the server has one is not known: it may have stored it. The sink touches no buffer any more and sends nothing
    until `reset`; after the next LinkUp samples may be sent again, under new numbers. `code`: a stable error
    code, where the server, or a look at our own token file, said why; "" otherwise.
    """

    message: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class FellBack:
    """The faster data plane failed: chunks go over gRPC for a while. No sample is lost by it."""

    message: str


SinkEvent = Acked | Committed | Failed | LinkUp | LinkDown | FellBack


class SampleSink(Protocol):
    """One worker's way to the server. All methods are called from one thread, never block on the network, never raise.

    For every opened sample there comes one Committed or Failed, unless a LinkDown comes first.
    """

    def use_staging(self, memory: memoryview, slot_bytes: int) -> None:
        """Before `start`, or never: chunks will lie in this memory, each within one slot of it.

        The sink may let the server read it until `close` returns, and so long it must stay mapped. Raises ConfigError where
        the transport that the operator asked for does not work.
        """

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        """Begin connecting. `on_event` is called from the sink's own threads and must not block."""

    def open_sample(self, request: ingest_pb2.OpenSample) -> None:
        """Announce a sample; goes ahead of chunks that wait."""

    def submit(self, chunk: RowChunk) -> None:
        """Start sending. The sink owns `chunk.buffer` until its Acked or a LinkDown."""

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        """Commit, after every chunk submitted before."""

    def abort(self, request: ingest_pb2.AbortSample) -> None:
        """Give the sample up, after every chunk submitted before."""

    def report(self, report: ingest_pb2.EngineReport) -> None:
        """Tell a server that takes it how this worker is. Nothing comes of it, and where there is none it is dropped."""

    def check_deadlines(self) -> None:
        """Called about once a second: break a link that has not answered for too long."""

    def reset(self) -> None:
        """After a LinkDown: forget what was queued and begin connecting again."""

    def close(self, timeout_s: float) -> None:
        """Stop, after at most `timeout_s`. Nothing is reported afterwards."""
