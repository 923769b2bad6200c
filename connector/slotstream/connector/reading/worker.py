"""The worker half: carries out each step's plan. It reads rows where the device wrote them and hands them to the pump."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from slotstream.connector.counters import Counters
from slotstream.connector.faults import SampleFault
from slotstream.connector.plan import EMPTY_PLAN, RowPlan, SampleAbort, SampleFinish, SampleOpen, StepPlan
from slotstream.connector.reading.gather import INDEX_BYTES, Destination, RowGather
from slotstream.connector.reading.releases import Releases
from slotstream.connector.reading.staging_memory import StagingMemory
from slotstream.connector.sending.copies import Gathered, KvSlots
from slotstream.connector.sending.inbox import FailSample, Segment, StagedBatch
from slotstream.connector.sending.row_check import StepMapping
from slotstream.connector.sending.sender import SenderMaker
from slotstream.connector.sending.staging_pool import STEPS, StagingShape, default_staging_bytes, power_of_two
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.logs import connector_logger
from slotstream.wire.dtypes import row_bytes as row_bytes_of
from slotstream.wire.errors import ConfigError, InternalFault, SlotMismatch, SlotStreamError
from slotstream.wire.names import CHUNK_BYTES_MAX

logger = connector_logger(__name__)

_SLOTS_MIN = 8
_READ_BACK_SLOTS = 8
_BATCH_BYTES_MAX = 64 << 20  # Device memory that one gather may take.
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one plan that go into one staging slot, before it is known which."""

    req_id: str
    first_row: int
    slots: KvSlots
    computed: KvSlots


class WorkerHalf:
    """Runs in the worker process, on its engine thread. Every method is called through the fence but the constructor.

    `cache` is the hidden-state cache [blocks, layers, block_size, hidden]; `step_tokens_max` bounds a step's slot mapping.
    `make_sender`: see `senders`. Raises ConfigError when the options do not fit the model.
    """

    def __init__(self, config: ConnectorConfig, cache: torch.Tensor, make_sender: SenderMaker, step_tokens_max: int) -> None:
        self._config = config
        expected = (len(config.layer_ids), config.hidden_size)
        if cache.ndim != 4 or (cache.shape[1], cache.shape[3]) != expected:
            raise ConfigError(
                f"the hidden-state cache has shape {list(cache.shape)}, not [blocks, {expected[0]}, block size, {expected[1]}]"
            )
        row_bytes = row_bytes_of(config.dtype, *expected)
        rows_per_slot = max(1, config.options.chunk_bytes // row_bytes)
        slot_bytes = _aligned(max(rows_per_slot * row_bytes, step_tokens_max * INDEX_BYTES))  # Filled by its rows, if possible.
        wanted_bytes = STEPS * step_tokens_max * row_bytes
        staging_bytes = config.options.staging_bytes or default_staging_bytes(wanted_bytes)
        num_slots = staging_bytes // slot_bytes
        if row_bytes > CHUNK_BYTES_MAX or num_slots < _SLOTS_MIN:
            raise ConfigError(
                f"a row takes {row_bytes} bytes: connector option staging_bytes must be at least {_SLOTS_MIN * slot_bytes} "
                f"and a row at most {CHUNK_BYTES_MAX}"
            )
        self._row_bytes = row_bytes
        self._rows_per_slot = rows_per_slot
        # Rows come back from the spool through slots of their own: a part of staging, whatever else is full.
        reserved = min(_READ_BACK_SLOTS, num_slots // _SLOTS_MIN) if config.options.spool_dir is not None else 0
        self._num_slots = num_slots - reserved
        shape = StagingShape(self._num_slots, reserved, slot_bytes, row_bytes)
        memory = StagingMemory(shape, cache.device, shared=config.options.sender == "process")
        self._gather = RowGather(cache, memory)
        self._rows_per_batch = max(1, min(_BATCH_BYTES_MAX // row_bytes, slot_bytes // INDEX_BYTES))
        self._counters = Counters()
        self._sender = make_sender(memory, shape, self._counters)
        self._plan: StepPlan = EMPTY_PLAN
        self._failed_plan: StepPlan | None = None
        self._begun: set[str] = set()  # Requests whose opens of this step's plan were posted.
        self._slot_mapping: torch.Tensor | None = None
        self._first_position: dict[str, int] = {}
        self._releases = Releases()
        if not self._gather.on_cpu and staging_bytes < wanted_bytes // 2:
            logger.warning(
                "slotstream: staging (%d MiB) does not hold the rows of %g full steps, so the model may wait for it: "
                "connector option staging_bytes should be %d",
                staging_bytes >> 20,
                STEPS / 2,
                power_of_two(wanted_bytes // 2),
            )
        self._sender.start()
        logger.info(
            "slotstream: layers %s of %s go to %s; staging %d MiB in %d slots, block size %d",
            list(config.layer_ids),
            config.model,
            config.options.server,
            shape.nbytes >> 20,
            num_slots,
            self._gather.block_size,
        )

    # -- hooks, in the order of a step

    def bind(self, plan: StepPlan) -> None:
        """A step begins."""
        self._plan = plan
        self._slot_mapping = None
        self._releases.bind(plan)

    def remember_slot_mapping(self, slot_mapping: torch.Tensor) -> None:
        """This step's slot mapping, int [tokens], on the device: only remembered here."""
        self._slot_mapping = slot_mapping

    def execute(self) -> None:
        """Do the step's plan. After the draft forward: the rows are in the cache."""
        plan, self._plan = self._plan, EMPTY_PLAN
        if not plan:
            return
        self._begun.clear()
        for opened in plan.opens:
            self._first_position[opened.req_id] = opened.first_position
            self._begun.add(opened.req_id)
            self._sender.post(opened)
        finishes = {finish.req_id: finish for finish in plan.finishes}
        if plan.rows:
            self._read(plan.rows, finishes)
        for finish in finishes.values():
            self._finish(finish)
        for abort in plan.aborts:
            self._first_position.pop(abort.req_id, None)
            self._sender.post(abort)

    def _finish(self, finish: SampleFinish) -> None:
        self._first_position.pop(finish.req_id, None)
        self._sender.post(finish)

    def take_releases(self) -> set[str]:
        """Requests whose last rows were read in an earlier step: vLLM may free their blocks."""
        return self._releases.take()

    def take_faults(self) -> list[SampleFault]:
        """Samples that failed since the last call."""
        return self._sender.take_faults()

    def take_stats(self) -> dict[str, float]:
        """Counts since the last call, with the gauges; empty when nothing changed."""
        counts = self._counters.take()
        return {**counts, **self._sender.gauges()} if counts else {}

    def count_fault(self) -> None:
        """A hook raised."""
        self._counters.add("hook_faults")

    def fail_plan(self, plan: StepPlan) -> None:
        """After a fault: every sample of the step is given up, and blocks that were held for it may go. Once a plan."""
        if plan is self._failed_plan:
            return
        self._failed_plan = plan
        self._plan = EMPTY_PLAN  # Nothing more is to be done of it: its samples would be opened twice.
        self._releases.give_up(plan)
        error = InternalFault("a fault of slotstream's own: the log says which")
        for opened in plan.opens:
            if opened.req_id not in self._begun:  # Its id may be promised: the server has to hear of it.
                self._sender.post(opened)
        for req_id in dict.fromkeys(part.req_id for part in _parts_of(plan)):
            self._first_position.pop(req_id, None)
            self._sender.post(FailSample(req_id, error))

    def close(self) -> None:
        """Let what is in flight finish, for a few seconds, and stop."""
        self._sender.close(_CLOSE_S)

    # -- reading rows

    def _read(self, rows: tuple[RowPlan, ...], finishes: dict[str, SampleFinish]) -> None:
        """Read the step's rows. A sample is finished, and taken out of `finishes`, behind its last ones: not behind all."""
        deadline = time.monotonic() + (self._config.options.wait_s_max if self._config.options.on_full == "wait" else 0.0)
        mapping: StepMapping | None = None
        on_cpu = self._gather.on_cpu
        batches = list(self._batches(rows))
        last_batch = {part.req_id: number for number, parts in enumerate(batches) for part in parts}
        for number, parts in enumerate(batches):
            wants_mapping = mapping is None and self._slot_mapping is not None
            scratch_count = 0 if on_cpu else 1 + wants_mapping
            leased = self._lease(len(parts) + scratch_count, deadline)
            if leased is None:
                self._fail(parts, self._sender.why_full())
                continue  # What fails is not finished; that of it is said at the end.
            leased.sort()  # Rows for slots next to each other are one copy.
            scratch, slots = leased[:scratch_count], leased[scratch_count:]
            try:
                if wants_mapping:
                    assert self._slot_mapping is not None
                    mapping = StepMapping(*self._gather.copy_slot_mapping(self._slot_mapping, None if on_cpu else scratch[1]))
                gathered = self._gather_parts(parts, slots, None if on_cpu else scratch[0])
            except Exception:
                self._gather.settle()  # A copy may be under way into slots that are about to be used again.
                self._sender.release(leased)
                raise
            segments = tuple(
                Segment(part.req_id, part.first_row, part.slots.size, slot, part.computed.size)
                for slot, part in zip(slots, parts, strict=True)
            )
            computed = np.concatenate([part.computed for part in parts])
            self._sender.post(StagedBatch(segments, computed, gathered, mapping, tuple(scratch)))
            for req_id in dict.fromkeys(part.req_id for part in parts):
                if req_id in finishes and last_batch[req_id] == number:
                    self._finish(finishes.pop(req_id))

    def _gather_parts(self, parts: list[_Part], slots: list[int], scratch: int | None) -> Gathered:
        destinations = [Destination(slot, part.slots.size) for slot, part in zip(slots, parts, strict=True)]
        gathered = self._gather.gather(np.concatenate([part.slots for part in parts]), destinations, scratch)
        self._counters.add("gathers")
        return gathered

    def _lease(self, count: int, deadline: float) -> list[int] | None:
        began = time.monotonic()
        leased = self._sender.lease(count, deadline)
        waited = time.monotonic() - began
        if waited > 0.001:
            self._counters.add("stall_seconds", waited)
        return leased

    def _fail(self, parts: list[_Part], error: SlotStreamError) -> None:
        for req_id in {part.req_id for part in parts}:
            self._sender.post(FailSample(req_id, error))

    def _batches(self, rows: tuple[RowPlan, ...]) -> Iterator[list[_Part]]:
        """The step's rows, in groups that one gather and a part of the pool can hold."""
        batch: list[_Part] = []
        size = 0
        parts_max = max(1, self._num_slots // 4)
        for plan in rows:
            for part in self._parts(plan):
                if batch and (size + part.slots.size > self._rows_per_batch or len(batch) == parts_max):
                    yield batch
                    batch, size = [], 0
                batch.append(part)
                size += part.slots.size
        if batch:
            yield batch

    def _parts(self, plan: RowPlan) -> Iterator[_Part]:
        block_size = self._gather.block_size
        first_position = self._first_position.get(plan.req_id)
        if first_position is None:
            return
        if plan.stop > len(plan.block_ids) * block_size:
            self._sender.post(FailSample(plan.req_id, SlotMismatch("the block table is shorter than the rows to be read")))
            return
        table = np.asarray(plan.block_ids, dtype=np.int64)
        positions = np.arange(plan.start, plan.stop, dtype=np.int64)
        slots = table[positions // block_size] * block_size + positions % block_size
        rows_per_part = min(self._rows_per_slot, self._rows_per_batch)
        for start in range(0, slots.size, rows_per_part):
            stop = start + rows_per_part
            computed = slots[max(start, plan.computed_from - plan.start) : stop]
            yield _Part(plan.req_id, plan.start + start - first_position, slots[start:stop], computed)


def _aligned(nbytes: int) -> int:
    """The next multiple of INDEX_BYTES: an index may begin where a slot does."""
    return -(-nbytes // INDEX_BYTES) * INDEX_BYTES


def _parts_of(plan: StepPlan) -> tuple[SampleOpen | RowPlan | SampleFinish | SampleAbort, ...]:
    """Everything in a plan that concerns a sample."""
    return (*plan.opens, *plan.rows, *plan.finishes, *plan.aborts)
