"""A sender as a process: the connector's worker half, pump, staging and sink over a cache on the CPU, without vLLM.

`python sender.py ADDRESS LEDGER NAME SEED [--transport NAME] [--streams N] [--pause-ms N] [--spool DIR] [--heir]`: begins
samples, each in a few engine steps, until SIGTERM or until its standard input ends. Writes every promise to the ledger before
it is made, and every outcome when it is heard. An heir begins nothing: it sends what others left in the spool. Several streams
over gRPC have a process each, as beside a sender that is a process.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from ledger import HIDDEN, LAYER_IDS, NAMESPACE, Ledger, row_data, token_ids

from slotstream.connector.counters import Counters
from slotstream.connector.options import STREAMS_MAX, ConnectorOptions
from slotstream.connector.plan import BlockPlace, RowPlan, SampleAbort, SampleFinish, SampleOpen, StepPlan
from slotstream.connector.planning.server_health import ServerHealth
from slotstream.connector.reading.row_source import CachedRows
from slotstream.connector.reading.staging_plan import StagingPlan
from slotstream.connector.reading.worker import WorkerHalf
from slotstream.connector.sending.process.lane import LaneProcess
from slotstream.connector.sending.process.lane_messages import LaneSetup
from slotstream.connector.sending.sender import Sender as PumpOrProcess
from slotstream.connector.sending.sender import in_thread
from slotstream.connector.sending.sinks import sinks_for
from slotstream.connector.sending.staging_area import HostMemory
from slotstream.connector.sending.staging_pool import StagingShape
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.base import Committed, Failed, SampleSink, SinkEvent
from slotstream.transport.spread import Spread
from slotstream.v1 import ingest_pb2
from slotstream.wire.columns import RowFormat
from slotstream.wire.names import PROTOCOL_VERSION

_BLOCK_SIZE = 16
_BLOCKS = 4096
_STEP_TOKENS_MAX = 2048
_RUNNING_MAX = 8
_LONG_EVERY = 40  # One sample in so many is long.


class _Noted:
    """A `SampleSink`, with a ledger of what was tried and said, and somebody who learns which samples were committed.

    The engine itself never asks.
    """

    def __init__(self, sink: SampleSink, stream: int, ledger: Ledger, committed: Callable[[str], None]) -> None:
        self._stream = stream
        self._ledger = ledger
        self._committed = committed
        self._ids: dict[int, str] = {}
        self._sink = sink
        self.use_staging, self.submit, self.commit, self.report = sink.use_staging, sink.submit, sink.commit, sink.report
        self.check_deadlines, self.reset, self.close = sink.check_deadlines, sink.reset, sink.close

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        def both(event: SinkEvent) -> None:
            if isinstance(event, Committed | Failed):
                what = event.code if isinstance(event, Failed) else "duplicate" if event.duplicate else "committed"
                self._ledger.write("said", number=self._number(event.sample), what=what)
            if isinstance(event, Committed):
                self._committed(self._ids[event.sample])
            on_event(event)

        self._sink.start(both)

    def open_sample(self, request: ingest_pb2.OpenSample) -> None:
        self._ids[request.sample] = request.sample_id
        self._ledger.write("opened", number=self._number(request.sample), id=request.sample_id)
        self._sink.open_sample(request)

    def abort(self, request: ingest_pb2.AbortSample) -> None:
        self._ledger.write("gave_up", number=self._number(request.sample), code=request.code)
        self._sink.abort(request)

    def _number(self, sample: int) -> int:
        """Of a sample, among those of all streams."""
        return sample * STREAMS_MAX + self._stream


def _sinks(options: ConnectorOptions, hello: ingest_pb2.Hello, shape: StagingShape, memory_fd: int) -> list[SampleSink]:
    """One a stream. `memory_fd`: of memory that processes can map; -1 where they stay in this process."""
    if memory_fd < 0:
        return sinks_for(options, hello)
    spread = Spread(options.streams)
    setups = [LaneSetup(options, hello.SerializeToString(), shape, n, logging.INFO) for n in range(options.streams)]
    return [LaneProcess(setup, memory_fd, spread) for setup in setups]


@dataclass
class _Request:
    sample_id: str
    rows: int
    table: tuple[int, ...]
    done: int = 0


class Sender:
    """An engine that runs nothing: each step writes rows into the cache, as a device would, and has them captured."""

    def __init__(
        self,
        address: str,
        transport: str,
        streams: int,
        ledger: Ledger,
        name: str,
        seed: int,
        spool: Path | None,
        running_max: int,
    ) -> None:
        self._rng = random.Random(seed)
        self._running_max = running_max
        self._ledger = ledger
        self._numbers = itertools.count()
        self._prefix = f"{name}-{seed}"
        self._cache = torch.zeros(_BLOCKS, len(LAYER_IDS), _BLOCK_SIZE, HIDDEN, dtype=torch.bfloat16)
        self._free = list(range(_BLOCKS))
        self._running: list[_Request] = []
        self._unanswered: set[str] = set()
        self._lock = threading.Lock()  # Outcomes come from the sink's thread, and from the pump by way of ours.
        options = ConnectorOptions(
            server=address,
            transport=transport,
            streams=streams,
            namespace=NAMESPACE,
            staging_bytes=4 << 20,
            chunk_bytes=16 << 10,
            wait_s_max=0.2,
            ack_timeout_s=5.0,
            spool_dir=None if spool is None else str(spool),
            sender="process" if streams > 1 and transport == "grpc" else "thread",  # What staging is made for.
        )
        row_format = RowFormat.of("BF16", len(LAYER_IDS), HIDDEN)
        config = ConnectorConfig(options, self._prefix, "synthetic", LAYER_IDS, row_format, {"engine_id": self._prefix})
        hello = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id=self._prefix)
        self._watch = ServerHealth(address, patient=spool is not None)
        source = CachedRows(self._cache, config.row_kind, HIDDEN)

        def make_sender(memory: HostMemory, shape: StagingShape, counters: Counters) -> PumpOrProcess:
            sinks = [
                _Noted(sink, stream, ledger, lambda sample_id: self._ended(sample_id, "committed"))
                for stream, sink in enumerate(_sinks(options, hello, shape, memory.fd))
            ]
            return in_thread(config, sinks)(memory, shape, counters)

        self._worker = WorkerHalf(config, source, make_sender, StagingPlan.of(config, _STEP_TOKENS_MAX))

    def step(self) -> None:
        """One engine step: some requests begin, some go on, some are aborted."""
        opens: list[SampleOpen] = []
        while len(self._running) < self._running_max and self._rng.random() < 0.5 and (opened := self._begin()):
            opens.append(opened)
        rows: list[RowPlan] = []
        finishes: list[SampleFinish] = []
        aborts: list[SampleAbort] = []
        slots: list[int] = []
        for request in list(self._running):
            if request.done and self._rng.random() < 0.03:
                aborts.append(SampleAbort(request.sample_id, "ABORTED", "the request was aborted"))
                self._leave(request)
                continue
            stop = min(request.rows, request.done + self._rng.randint(1, 200))
            slots += self._write(request, stop)
            place = BlockPlace(request.table, request.done)
            rows.append(RowPlan(request.sample_id, request.done, stop, request.done, place))
            request.done = stop
            if stop == request.rows:
                finishes.append(SampleFinish(request.sample_id, tuple(token_ids(request.sample_id, request.rows))))
                self._leave(request)
        self._worker.bind(StepPlan(tuple(opens), tuple(rows), tuple(finishes), tuple(aborts)))
        self._worker.remember_slot_mapping(torch.tensor(slots, dtype=torch.int64))
        self._worker.execute()
        self._take_faults()

    def _begin(self) -> SampleOpen | None:
        if self._watch.problem() is not None:
            return None  # The caller hears SERVER_UNAVAILABLE at once: nothing is promised.
        rows = self._rng.randint(1000, 3000) if self._rng.randrange(_LONG_EVERY) == 0 else self._rng.randint(1, 120)
        blocks = -(-rows // _BLOCK_SIZE)
        sample_id = f"{self._prefix}-{next(self._numbers)}"
        request = _Request(sample_id, rows, tuple(self._free.pop() for _ in range(blocks)))
        self._ledger.write("promised", id=sample_id, rows=rows)
        with self._lock:
            self._unanswered.add(sample_id)
        self._running.append(request)
        return SampleOpen(sample_id, NAMESPACE, sample_id, 0, rows, self._rng.random() < 0.7)

    def _write(self, request: _Request, stop: int) -> list[int]:
        """The device writes rows [done, stop) of a request; the slots it wrote."""
        data = row_data(request.sample_id, request.rows)
        rows = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(request.rows, len(LAYER_IDS), HIDDEN)
        slots = [request.table[p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE for p in range(request.done, stop)]
        at = torch.tensor(slots)
        self._cache[at // _BLOCK_SIZE, :, at % _BLOCK_SIZE] = rows[request.done : stop]
        return slots

    def _leave(self, request: _Request) -> None:
        self._running.remove(request)
        self._free += request.table  # Reused by the next step: the gather came before.

    def _ended(self, sample_id: str, outcome: str, code: str = "") -> None:
        with self._lock:
            if sample_id not in self._unanswered:
                return
            self._unanswered.discard(sample_id)
            self._ledger.write("ended", id=sample_id, outcome=outcome, code=code)

    def _take_faults(self) -> None:
        for fault in self._worker.take_faults():
            self._ended(fault.req_id, "failed", fault.code)

    @property
    def unanswered(self) -> int:
        """Samples promised of which nothing was heard yet."""
        with self._lock:
            return len(self._unanswered)

    def close(self) -> None:
        """As vLLM shuts its connector down: what is under way may finish."""
        for request in list(self._running):
            self._leave(request)
        self._worker.close()
        self._take_faults()
        self._watch.close()
        self._ledger.write("closed", unanswered=self.unanswered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("ledger", type=Path)
    parser.add_argument("name")
    parser.add_argument("seed", type=int)
    parser.add_argument("--transport", choices=["grpc", "nixl"], default="grpc")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--pause-ms", type=float, default=10.0)
    parser.add_argument("--spool", type=Path)
    parser.add_argument("--heir", action="store_true")
    arguments = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def end_with_parent() -> None:  # Nobody else would end us.
        sys.stdin.read()
        stop.set()

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    ledger = Ledger(arguments.ledger)
    ledger.write("started", seed=arguments.seed, pid=os.getpid())  # From here on SIGTERM ends us in order.
    running_max = 0 if arguments.heir else _RUNNING_MAX
    sender = Sender(
        arguments.address,
        arguments.transport,
        arguments.streams,
        ledger,
        arguments.name,
        arguments.seed,
        arguments.spool,
        running_max,
    )
    while not stop.is_set():
        sender.step()
        time.sleep(arguments.pause_ms / 1000)
    sender.close()
    os._exit(0)  # NIXL's libraries crash in what they do at an exit where the system has libibverbs.


if __name__ == "__main__":
    main()
