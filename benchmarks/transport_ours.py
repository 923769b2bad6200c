"""Senders of the transport benchmark: slotstream's own sinks, without the connector before them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from time import perf_counter

from load import HIDDEN, LAYERS, ROW_BYTES, SOURCE_BYTES, Load, fill, slots, source

from slotstream.client import connect
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.sending.process.lane import LaneProcess
from slotstream.connector.sending.process.lane_messages import LaneSetup
from slotstream.connector.sending.staging_area import control_bytes, control_offset, map_staging
from slotstream.connector.sending.staging_pool import StagingShape
from slotstream.transport.base import Acked, Committed, LinkUp, RowChunk, SampleSink, SinkEvent
from slotstream.transport.grpc import GrpcSink
from slotstream.transport.nixl import NixlPlane, OfferedStaging
from slotstream.transport.spread import Spread
from slotstream.v1 import ingest_pb2
from slotstream.wire.hashing import xxh3
from slotstream.wire.names import PROTOCOL_VERSION

_ANSWER_S = 60.0


class NixlOnly(NixlPlane):
    """NIXL, and a word where the server would take chunks as frames instead."""

    def __init__(self, complain: Callable[[str], None], offered: OfferedStaging | None = None) -> None:
        super().__init__(required=True, offered=offered)
        self._complain = complain

    def welcomed(self, welcome: ingest_pb2.Welcome) -> None:
        super().welcomed(welcome)
        if not welcome.nixl:
            self._complain("the server does not take NIXL")


def streams_for(
    address: str, transport: str, streams: int, fail: Callable[[str], None], shape: StagingShape, memory_fd: int
) -> list[SampleSink]:
    """The sinks of one connector, as a sender process has them: several that send frames have a process each.

    `fail` is told where NIXL is not used. `shape` and `memory_fd`: of the memory that those processes map.
    """
    hello = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="benchmark")
    spread = Spread(streams)
    if transport == "nixl":
        offered = OfferedStaging(required=True)
        planes = [NixlOnly(fail, offered) for _ in range(streams)]
        return [GrpcSink(address, hello, plane=plane, spread=spread, stream=n) for n, plane in enumerate(planes)]
    if streams == 1:
        return [GrpcSink(address, hello)]
    options = ConnectorOptions(server=address, transport="grpc", streams=streams)
    setups = [LaneSetup(options, hello.SerializeToString(), shape, n, logging.WARNING) for n in range(streams)]
    return [LaneProcess(setup, memory_fd, spread) for setup in setups]


class SinkStream:
    """A `load.Stream` over one or more sinks, with frames or NIXL, to a server that may store what it sends."""

    def __init__(
        self,
        address: str,
        transport: str,
        stored: bool,
        memory: memoryview | None = None,
        streams: int = 1,
        staging_bytes: int = SOURCE_BYTES,
    ) -> None:
        """`memory`: what to send from, where several share it. `streams`: of this sender; each sample goes over one.

        `staging_bytes`: else what it has to send from. As with a connector that is ahead, all of it waits to be acked.
        """
        self._address = address
        self._transport = transport
        self._stored = stored
        self._shape = StagingShape(1, 0, staging_bytes, ROW_BYTES)
        self._memory_fd = -1
        if streams > 1:
            self._memory_fd = os.memfd_create("slotstream-source")
            os.ftruncate(self._memory_fd, control_offset(self._shape) + control_bytes(self._shape))
            memory = fill(map_staging(self._shape, self._memory_fd).slots)
        self._memory = memory or source(staging_bytes)  # For good: what was registered with NIXL must stay mapped.
        self._streams = streams
        self._changed = threading.Condition()  # Guards what events change.
        self._problem = ""
        self._up = 0
        self._unacked: dict[int, tuple[float, int]] = {}  # Chunk -> when it was submitted, and over which stream.
        self._owed = [0] * streams  # Chunks of each stream that are not acked.
        self._resume_at = 0
        self._taken: list[float] = []
        self._committed = 0
        self._chunks = self._samples = 0
        self._names: list[str] = []

    def prepare(self, load: Load) -> None:
        self._load = load
        self._slots = slots(self._memory, load.chunk_bytes)
        self._hashes = [xxh3(slot) for slot in self._slots]
        self._up = 0
        self._sinks = streams_for(self._address, self._transport, self._streams, self._fail, self._shape, self._memory_fd)
        for sink in self._sinks:
            sink.use_staging(self._memory, load.chunk_bytes)
            sink.start(self._take)
        self._wait(lambda: self._up == self._streams)

    def _take(self, event: SinkEvent) -> None:
        with self._changed:
            if isinstance(event, Acked):
                now = perf_counter()
                for chunk in event.chunks:
                    submitted, stream = self._unacked.pop(chunk)
                    self._taken.append(now - submitted)
                    self._owed[stream] -= 1
                if len(self._unacked) > self._resume_at:  # Nobody waits for this one.
                    return
            elif isinstance(event, Committed):
                self._committed += 1
            elif isinstance(event, LinkUp):
                self._up += 1
            else:
                self._problem = event.message
            self._changed.notify_all()

    def _fail(self, problem: str) -> None:
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._problem or until(), _ANSWER_S):
                raise RuntimeError("the server does not answer")
        if self._problem:
            raise RuntimeError(self._problem)

    def run(self) -> list[float]:
        return self._send([self._load.sample_chunks] * self._load.samples, len(self._slots))

    def alone(self, chunks: int) -> list[float]:
        return self._send([chunks], 1)

    def _send(self, samples: list[int], unacked_max: int) -> list[float]:
        """Send samples of so many chunks, and wait until all are committed. Seconds from submit to Acked."""
        self._taken = []
        committed = self._committed + len(samples)
        for chunks in samples:
            self._send_sample(chunks, unacked_max)
        self._wait(lambda: self._committed >= committed)
        return self._taken

    def _send_sample(self, chunks: int, unacked_max: int) -> None:
        self._samples += 1
        stream = self._owed.index(min(self._owed))
        sink = self._sinks[stream]
        rows = self._load.chunk_bytes // ROW_BYTES
        name = f"{threading.get_native_id()}-{perf_counter():.9f}-{self._samples}"
        self._names.append(name)
        sink.open_sample(
            ingest_pb2.OpenSample(
                sample=self._samples,
                namespace="default",
                sample_id=name,
                model="benchmark",
                dtype="BF16",
                layer_ids=range(LAYERS),
                hidden_size=HIDDEN,
                rows_max=chunks * rows,
                rows_exact=True,
            )
        )
        for number in range(chunks):
            if len(self._unacked) >= unacked_max:
                self._resume_at = unacked_max * 3 // 4
                self._wait(lambda: len(self._unacked) <= self._resume_at)
            self._chunks += 1
            slot = self._chunks % len(self._slots)
            chunk = RowChunk(self._samples, self._chunks, number * rows, rows, self._slots[slot], self._hashes[slot])
            with self._changed:
                self._unacked[chunk.chunk] = (perf_counter(), stream)
                self._owed[stream] += 1
            sink.submit(chunk)
        commit = ingest_pb2.CommitSample(sample=self._samples, row_count=chunks * rows, token_ids=range(chunks * rows))
        sink.commit(commit)

    def clear(self) -> None:
        names, self._names = self._names, []
        if not self._stored or not names:
            return
        with connect(self._address) as client:
            with client.read(names[-1]) as reader:  # The server checks every hash.
                if sum(block.data.nbytes for block in reader) != reader.nbytes:
                    raise RuntimeError(f"sample {names[-1]} was not stored as it was sent")
            for name in names:
                client.delete(name)

    def release(self) -> None:
        for sink in self._sinks:
            sink.close(5.0)
        self._chunks = self._samples = 0
