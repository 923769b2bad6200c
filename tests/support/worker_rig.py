"""A worker half over a cache of our own on the CPU, with a sink that keeps everything: steps without vLLM."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slotstream.connector.options import ConnectorOptions
from slotstream.connector.plan import BlockPlace, RowPlan, SampleFinish, SampleOpen, StepPlan
from slotstream.connector.reading.row_source import CachedRows
from slotstream.connector.reading.staging_plan import StagingPlan
from slotstream.connector.reading.worker import WorkerHalf
from slotstream.connector.sending.process.handle import in_process
from slotstream.connector.sending.sender import in_thread
from slotstream.connector.vllm_config import ConnectorConfig, RowKind
from slotstream.transport.base import Committed, Failed, SampleSink, SinkEvent
from slotstream.transport.loopback import LoopbackSample, LoopbackSink
from slotstream.v1 import ingest_pb2
from slotstream.wire.columns import LateColumns, RowFormat

LAYER_IDS = (1, 2, 5)
HIDDEN = 8
BLOCK_SIZE = 4
BLOCKS = 64
ROW_FORMAT = RowFormat.of("BF16", len(LAYER_IDS), HIDDEN)
ROW_BYTES = ROW_FORMAT.row_bytes


def config(**options: object) -> ConnectorConfig:
    """A connector's configuration as vLLM would have given it."""
    chosen = {"staging_bytes": 4 << 20, "chunk_bytes": 4096, **options}
    return ConnectorConfig(ConnectorOptions.from_extra(chosen), "engine", "model", LAYER_IDS, ROW_FORMAT, {})


def row_kind(layers: int) -> RowKind:
    """So many layers of no engine in particular."""
    return RowKind("", tuple(range(layers)), "BF16")


class WatchedSink(LoopbackSink):
    """A LoopbackSink whose verdicts can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._verdicts: dict[int, Committed | Failed] = {}

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        def watched(event: SinkEvent) -> None:
            on_event(event)
            if isinstance(event, Committed | Failed):
                with self._changed:
                    self._verdicts[event.sample] = event
                    self._changed.notify_all()

        super().start(watched)

    def verdict(self, number: int) -> Committed | Failed:
        """The verdict on a sample, once there is one; samples are numbered from 1 in the order of their opens."""
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._verdicts, timeout=30.0), f"no verdict on sample {number}"
            return self._verdicts[number]


class OpenWorker(WorkerHalf):
    """A worker half whose sender tests may look into: a `Pump`, or the handle of a process."""

    _sender: Any


@dataclass
class Rig:
    """A cache [blocks, layers, block size, hidden] of random rows, a worker over it, and the block tables of requests."""

    worker: OpenWorker
    sink: Any  # A WatchedSink, unless make_rig was given another.
    cache: torch.Tensor
    rng: random.Random
    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _unused: list[int] = field(default_factory=list)

    def table(self, req_id: str, tokens: int) -> tuple[int, ...]:
        """A block table of random blocks for a request of `tokens` tokens."""
        blocks = tuple(self._unused.pop() for _ in range(-(-tokens // BLOCK_SIZE)))
        self.tables[req_id] = blocks
        return blocks

    def free(self, req_id: str) -> None:
        """The request is done: its blocks may be another's."""
        self._unused.extend(self.tables.pop(req_id))

    def slots(self, req_id: str, start: int, stop: int) -> list[int]:
        """Where positions [start, stop) of a request lie."""
        table = self.tables[req_id]
        return [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, stop)]

    def write(self, slots: list[int]) -> None:
        """The device writes new rows at these slots."""
        for slot in slots:
            rows = torch.randn(len(LAYER_IDS), HIDDEN, generator=torch.Generator().manual_seed(self.rng.randrange(1 << 30)))
            self.cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = rows.to(torch.bfloat16)

    def rows(self, req_id: str, start: int, stop: int) -> bytes:
        """What the cache holds for positions [start, stop)."""
        picked = [self.cache[s // BLOCK_SIZE, :, s % BLOCK_SIZE] for s in self.slots(req_id, start, stop)]
        return torch.stack(picked).contiguous().view(torch.uint8).numpy().tobytes()

    def step(self, plan: StepPlan, slot_mapping: list[int] | None) -> None:
        """One engine step: bind, the device's writes, wait_for_save."""
        self.worker.bind(plan)
        if slot_mapping is not None:
            self.worker.remember_slot_mapping(torch.tensor(slot_mapping, dtype=torch.int64))
        self.worker.execute()

    def capture_with(self, req_id: str, tokens: int, columns: Mapping[str, bytes], rows_max: int = 0) -> bytes:
        """A prompt of `tokens` tokens in one step, opened and finished with these columns; its rows. Its blocks go back."""
        table = self.table(req_id, tokens)
        written = self.slots(req_id, 0, tokens)
        self.write(written)
        opening = SampleOpen(req_id, "default", req_id, 0, rows_max or tokens, not rows_max, columns=tuple(columns))
        finish = SampleFinish(req_id, tuple(range(tokens)), columns=LateColumns(columns))
        self.step(StepPlan((opening,), (cached_rows(req_id, 0, tokens, 0, table),), (finish,)), written)
        rows = self.rows(req_id, 0, tokens)
        self.free(req_id)
        return rows

    def capture(self, req_id: str, tokens: int, slot_mapping: list[int] | None = None) -> None:
        """A prompt of `tokens` tokens in one step, opened and finished; `slot_mapping` other than the truth on request."""
        table = self.table(req_id, tokens)
        written = self.slots(req_id, 0, tokens)
        self.write(written)
        plan = StepPlan(
            (opened(req_id, tokens),),
            (cached_rows(req_id, 0, tokens, 0, table),),
            (SampleFinish(req_id, tuple(range(tokens))),),
        )
        self.step(plan, written if slot_mapping is None else slot_mapping)

    def stored(self, number: int) -> bytes:
        """The rows of a sample as the sink got them, joined in order."""
        sample: LoopbackSample = self.sink.samples[number]
        return b"".join(sample.rows[i] for i in sorted(sample.rows))


def cached_rows(
    req_id: str, start: int, stop: int, computed_from: int, block_ids: tuple[int, ...], first_position: int = 0
) -> RowPlan:
    """Positions [start, stop) of a sample that begins at `first_position`, out of the hidden states' own cache layer."""
    return RowPlan(req_id, start, stop, start - first_position, BlockPlace(block_ids, computed_from))


def opened(req_id: str, tokens: int, first_position: int = 0) -> SampleOpen:
    return SampleOpen(req_id, "default", req_id, first_position, tokens, True)


def make_rig(
    seed: int = 0,
    sink: SampleSink | None = None,
    hello: ingest_pb2.Hello | None = None,
    more: Sequence[SampleSink] = (),
    **options: object,
) -> Rig:
    """A rig; close its worker when done. With a `hello` its pump is in a process of its own, and has no sink of ours.

    `more`: sinks of further lanes.
    """
    rng = random.Random(seed)
    # Permuted on purpose: platforms differ in strides, and rows must be indexed, never reshaped.
    cache = torch.zeros(BLOCKS, BLOCK_SIZE, len(LAYER_IDS), HIDDEN, dtype=torch.bfloat16).permute(0, 2, 1, 3)
    sink = sink or WatchedSink()
    chosen = config(**options)
    make_sender = in_thread(chosen, [sink, *more]) if hello is None else in_process(chosen, hello)
    rig = Rig(
        OpenWorker(chosen, CachedRows(cache, chosen.row_kind, HIDDEN), make_sender, StagingPlan.of(chosen, 256)),
        sink,
        cache,
        rng,
    )
    rig._unused = rng.sample(range(BLOCKS), BLOCKS)
    return rig
