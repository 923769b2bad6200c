"""The sender of the ingest benchmark: the connector's own staging pool, pump and sinks, without an engine before them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import torch
from children import questions
from shape import Shape
from transport_ours import streams_for

from slotstream.client import connect
from slotstream.connector.counters import Counters
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.plan import SampleFinish, SampleOpen
from slotstream.connector.reading.staging_memory import StagingMemory
from slotstream.connector.sending.inbox import RowBatch
from slotstream.connector.sending.pump import Pump
from slotstream.connector.sending.row_check import MappedRows, Segment
from slotstream.connector.sending.staging_pool import StagingPool, StagingShape
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.base import Committed, Failed, LinkDown, LinkUp, SampleSink, SinkEvent
from slotstream.wire.columns import RowFormat

_BATCH_SLOTS = 16  # Frames that one gather would stage.
_CHECKED = 4  # Samples of a run that are read back and compared.


@dataclass
class _Outcome:
    """What the server answered to a run."""

    committed: int = 0
    up: int = 0  # Streams.
    problem: str = ""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, event: SinkEvent) -> None:
        with self.changed:
            if isinstance(event, Committed):
                self.committed += 1
            elif isinstance(event, LinkUp):
                self.up += 1
            elif isinstance(event, Failed | LinkDown):
                self.problem = event.message
            self.changed.notify_all()

    def fail(self, problem: str) -> None:
        with self.changed:
            self.problem = problem
            self.changed.notify_all()

    def wait(self, committed: int, up: int = 0) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.problem or (self.committed >= committed and self.up >= up))
        if self.problem:
            raise RuntimeError(self.problem)


class _Watched:
    """A sink, with somebody who listens in."""

    def __init__(self, sink: SampleSink, outcome: _Outcome) -> None:
        self._sink = sink
        self._outcome = outcome
        self.use_staging, self.open_sample, self.submit, self.commit = (
            sink.use_staging,
            sink.open_sample,
            sink.submit,
            sink.commit,
        )
        self.abort, self.report, self.check_deadlines, self.reset, self.close = (
            sink.abort,
            sink.report,
            sink.check_deadlines,
            sink.reset,
            sink.close,
        )

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        def both(event: SinkEvent) -> None:
            on_event(event)
            if isinstance(event, Committed | Failed | LinkDown | LinkUp):
                self._outcome.take(event)

        self._sink.start(both)


class Sender:
    """Sends samples whose rows lie in staging already, as fast as staging comes free."""

    def __init__(self, shape: Shape, address: str, staging_bytes: int, transport: str, streams: int) -> None:
        self._shape = shape
        self._address = address
        config = ConnectorConfig(
            options=ConnectorOptions(server=address, staging_bytes=staging_bytes, chunk_bytes=shape.frame_bytes),
            engine_id="benchmark",
            model="benchmark",
            layer_ids=tuple(range(shape.layers)),
            row_format=RowFormat.of("BF16", shape.layers, shape.hidden),
            metadata={},
        )
        slots = staging_bytes // shape.frame_bytes
        staging = StagingShape(slots, 0, shape.frame_bytes, shape.row_bytes)
        memory = StagingMemory(staging, torch.device("cpu"), shared=streams > 1)
        self._pool = StagingPool(memory.area.slots, staging)
        # Written once, and different in every slot: a sample is what its slots hold.
        memory.memory.random_(generator=torch.Generator().manual_seed(0))
        self._outcome = _Outcome()
        sinks = streams_for(address, transport, streams, self._outcome.fail, staging, memory.fd)
        for sink in sinks:
            sink.use_staging(memory.area.slots, shape.frame_bytes)
        watched = [_Watched(sink, self._outcome) for sink in sinks]
        self._pump = Pump(config, self._pool, memory.area, watched, Counters())
        self._pump.start()
        self._outcome.wait(0, up=streams)
        self._runs = 0
        self._sent: dict[str, list[tuple[int, int]]] = {}  # sample id -> (slot, bytes) of its rows, in order

    def run(self, samples: int) -> None:
        """Send, and return once all of them are durable."""
        self._runs += 1
        self._sent.clear()
        committed = self._outcome.committed
        for number in range(samples):
            self._send(f"run-{self._runs}-{number}")
        self._outcome.wait(committed + samples)

    def _send(self, sample_id: str) -> None:
        rows = self._shape.rows
        self._pump.post(SampleOpen(sample_id, "default", sample_id, 0, rows, True))
        frames = list(self._shape.frames())
        sent = self._sent[sample_id] = []
        for at in range(0, len(frames), _BATCH_SLOTS):
            part = frames[at : at + _BATCH_SLOTS]
            slots = self._pool.acquire(
                len(part), deadline=time.monotonic() + 60, keep_waiting=lambda: not self._outcome.problem
            )
            if slots is None:
                raise RuntimeError(self._outcome.problem or "staging did not come free within a minute")
            segments = tuple(
                Segment(sample_id, first_row, count, slot) for (first_row, count), slot in zip(part, slots, strict=True)
            )
            sent += [(slot, count * self._shape.row_bytes) for (_, count), slot in zip(part, slots, strict=True)]
            # A device would have written the slots, and found the rows' peaks, without this CPU.
            ones = np.ones(sum(rows for _, rows in part), dtype=np.int64)
            self._pump.post(RowBatch(segments, 0, MappedRows(-ones, ones, None)))
        self._pump.post(SampleFinish(sample_id, tuple(range(rows)), {}))

    def check(self) -> None:
        """Read some of the last run's samples back and compare them; then delete all of them."""
        every = max(1, len(self._sent) // _CHECKED)
        with connect(self._address) as client:
            for index, (sample_id, sent) in enumerate(self._sent.items()):
                if index % every == 0:
                    with client.read(sample_id) as reader:
                        stored = b"".join(block.data for block in reader)
                    if stored != b"".join(self._pool.buffer(slot, nbytes) for slot, nbytes in sent):
                        raise RuntimeError(f"sample {sample_id} was stored with other bytes than were sent")
                client.delete(sample_id)

    def close(self) -> None:
        self._pump.close(5.0)


def send_samples(connection: Connection, shape: Shape, address: str, staging_bytes: int, transport: str, streams: int) -> None:
    """Main function of the sending process: answers ("run", samples) with the seconds it took, and ("check",) with 0."""
    sender = Sender(shape, address, staging_bytes, transport, streams)
    connection.send("ready")
    for what, *arguments in questions(connection):
        began = time.perf_counter()
        getattr(sender, what)(*arguments)
        connection.send(time.perf_counter() - began)
    sender.close()
