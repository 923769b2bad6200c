"""The worker half: carries out each step's plan. It reads rows where the device wrote them and hands them to the sender."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from slotstream.connector.counters import SENDER_REASONS, Counters, capture_off
from slotstream.connector.faults import SampleFault
from slotstream.connector.plan import EMPTY_PLAN, RowPlan, SampleAbort, SampleFinish, SampleOpen, StepPlan
from slotstream.connector.reading.located import Part
from slotstream.connector.reading.releases import Releases
from slotstream.connector.reading.row_source import RowSource
from slotstream.connector.reading.staging_memory import StagingMemory
from slotstream.connector.reading.staging_plan import StagingPlan
from slotstream.connector.sending.inbox import FailSample, RowBatch
from slotstream.connector.sending.row_check import Segment
from slotstream.connector.sending.sender import SenderMaker
from slotstream.connector.sending.staging_pool import STEPS, power_of_two
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.logs import connector_logger
from slotstream.transport.targets import Target
from slotstream.wire.address import shown_addresses
from slotstream.wire.errors import InternalFault, SlotMismatch, SlotStreamError

logger = connector_logger(__name__)

_CLOSE_S = 5.0
_ASKED_S = 0.0001  # A lease that takes longer was waited for. Slots that are there already take a few microseconds.
_LINK_GAUGES = {
    "link_up",
    "streams_up",
    *capture_off(SENDER_REASONS, None),
}  # Told when they change, also where nothing is captured.


class WorkerHalf:
    """Runs in the worker process, on its engine thread, and `execute` may run beside it. Every method is called through the
    hook guard but the constructor.

    `source`: where rows lie. `make_sender`: see `sender`. Raises ConfigError when staging cannot be had.
    """

    def __init__(self, config: ConnectorConfig, source: RowSource, make_sender: SenderMaker, staging: StagingPlan) -> None:
        self._config = config
        self._source = source
        # What this engine's samples are made of. Another's rows are left alone, and never read.
        self._is_ours = source.made_for == config.row_kind
        self._staging = staging
        shape = staging.shape
        memory = StagingMemory(shape, source.device, shared=config.sends_in_process)
        source.use_staging(memory)
        self._counters = Counters()
        self._sender = make_sender(memory, shape, self._counters)
        self.begins_every_step = self._sender.looks or source.begins_every_step
        """Whether `bind` has something to do where a plan is empty."""
        self._plan: StepPlan = EMPTY_PLAN
        self._failed_plan: StepPlan | None = None
        self._told_link: dict[str, float] = {}
        self._told_server: Target | None = None
        self._seen: Mapping[str, float] | None = None  # The gauges, when they were last looked at.
        self._begun: set[str] = set()  # Requests whose opens of this step's plan were posted.
        self.releases = Releases()
        if source.device.type != "cpu" and shape.nbytes < staging.wanted_bytes // 2:
            logger.warning(
                "slotstream: staging (%d MiB) does not hold the rows of %g full steps, so the model may wait for it: "
                "connector option staging_bytes should be %d",
                shape.nbytes >> 20,
                STEPS / 2,
                power_of_two(staging.wanted_bytes // 2),
            )
        self._sender.start()
        logger.info(
            "slotstream: layers %s of %s go to %s; staging %d MiB in %d chunks of %d rows",
            list(config.layer_ids),
            config.model,
            shown_addresses(config.options.servers),
            shape.nbytes >> 20,
            shape.num_slots + shape.reserved,
            staging.rows_per_slot,
        )

    # -- hooks, in the order of a step

    def bind(self, plan: StepPlan) -> None:
        """A step begins."""
        self._plan = plan
        self._sender.look()
        self.releases.bind(plan)
        if self._is_ours:
            self._source.begin_step(plan)

    def remember_slot_mapping(self, slot_mapping: torch.Tensor) -> None:
        """This step's slot mapping, int [tokens], on the device: only remembered here."""
        self._source.remember_slot_mapping(slot_mapping)

    def remember_stream(self) -> None:
        """This step's forward pass ran in this thread's current stream. It may be another thread that calls `execute`."""
        self._source.remember_stream()

    def execute(self) -> None:
        """Do the step's plan. After the forward passes: the rows are where the source has them."""
        plan, self._plan = self._plan, EMPTY_PLAN
        if not (plan.opens or plan.rows or plan.finishes or plan.aborts):
            return  # A step with new pages alone has nothing to do here.
        try:
            self._do(plan)
        finally:
            self._sender.hand_over()

    def _do(self, plan: StepPlan) -> None:
        self._begun.clear()
        for opened in plan.opens:
            self._begun.add(opened.req_id)
            self._sender.post(opened)
        finishes = {finish.req_id: finish for finish in plan.finishes}
        if plan.rows:
            self._read(plan.rows, finishes)
        for finish in finishes.values():
            self._sender.post(finish)
        for abort in plan.aborts:
            self._sender.post(abort)

    def take_releases(self) -> set[str]:
        """Requests whose last rows were read in an earlier step: vLLM may free their blocks."""
        return self.releases.take()

    @property
    def has_news(self) -> bool:
        """Whether `take_faults` or `take_server` may have something to tell."""
        return self._sender.has_faults or self._sender.server is not self._told_server

    def take_faults(self) -> list[SampleFault]:
        """Samples that failed since the last call."""
        return self._sender.take_faults()

    def take_server(self) -> Target | None:
        """The server that the stream came up to, where that is another one than at the last call."""
        server, told = self._sender.server, self._told_server
        self._told_server = server
        return None if server == told else server

    @property
    def has_stats(self) -> bool:
        """Whether anything may have changed since the last `take_stats`."""
        return bool(self._counters) or self._sender.gauges() is not self._seen

    def take_stats(self) -> dict[str, float]:
        """Counts since the last call, with the gauges; empty when nothing was counted and the link is as it was."""
        counts, gauges = self._counters.take(), self._sender.gauges()
        self._seen = gauges
        link = {name: value for name, value in gauges.items() if name in _LINK_GAUGES}
        if not counts and link == self._told_link:
            return {}
        self._told_link = link
        return {**counts, **gauges}

    def count_fault(self) -> None:
        """A hook raised."""
        self._counters.add("hook_faults")

    def fail_plan(self, plan: StepPlan) -> None:
        """After a fault: every sample of the step is given up, and blocks that were held for it may go. Once a plan."""
        if plan is self._failed_plan:
            return
        self._failed_plan = plan
        self._plan = EMPTY_PLAN  # Nothing more is to be done of it: its samples would be opened twice.
        self.releases.give_up(plan)
        error = InternalFault("a fault of slotstream's own: the log says which")
        for opened in plan.opens:
            if opened.req_id not in self._begun:  # Its id may be promised: the server has to hear of it.
                self._sender.post(opened)
        for req_id in dict.fromkeys(part.req_id for part in _parts_of(plan)):
            self._sender.post(FailSample(req_id, error))
        self._sender.hand_over()
        self._source.forget()  # Last: it asks the device, which may have failed.

    def wake(self) -> None:
        """The device's memory may have been given away meanwhile: what was there before does not count."""
        self._source.forget()

    def close(self) -> None:
        """Let what is in flight finish, for a few seconds, and stop."""
        self._sender.close(_CLOSE_S)

    # -- reading rows

    def _read(self, rows: tuple[RowPlan, ...], finishes: dict[str, SampleFinish]) -> None:
        """Read the step's rows. A sample is finished, and taken out of `finishes`, behind its last ones: not behind all."""
        if not self._is_ours:
            foreign = SlotMismatch(f"these rows are {self._source.made_for}, and the sample wants {self._config.row_kind}")
            for plan in rows:
                self._sender.post(FailSample(plan.req_id, foreign))
            return
        deadline = time.monotonic() + (self._config.options.wait_s_max if self._config.options.on_full == "wait" else 0.0)
        located = self._source.locate(rows, self._staging.rows_per_part)
        for req_id, error in located.failed:
            self._sender.post(FailSample(req_id, error))
        batches = list(self._batches(located.parts))
        last_batch = {part.req_id: number for number, parts in enumerate(batches) for part in parts} if finishes else {}
        for number, parts in enumerate(batches):
            scratch_count = self._source.scratch_slots()
            leased = self._lease(len(parts) + scratch_count, deadline)
            if leased is None:
                self._fail(parts, self._sender.why_full())
                continue  # What fails is not finished; that of it is said at the end.
            leased.sort()  # Where torch copies, rows for slots next to each other are one copy.
            scratch, slots = leased[:scratch_count], leased[scratch_count:]
            segments = tuple(
                Segment(part.req_id, part.first_row, part.rows, slot) for part, slot in zip(parts, slots, strict=True)
            )
            try:
                read, evidence = self._source.read(located, parts, segments, scratch)
            except Exception:
                self._source.settle()  # A read may be under way into slots that are about to be used again.
                self._sender.release(leased)
                raise
            self._counters.add("gathers")
            self._sender.post(RowBatch(segments, read, evidence, tuple(scratch)))
            for req_id in dict.fromkeys(part.req_id for part in parts) if finishes else ():
                if req_id in finishes and last_batch[req_id] == number:
                    self._sender.post(finishes.pop(req_id))

    def _lease(self, count: int, deadline: float) -> list[int] | None:
        began = time.monotonic()
        leased = self._sender.lease(count, deadline)
        waited = time.monotonic() - began
        if waited > _ASKED_S:
            self._counters.add("stall_seconds", waited)
        return leased

    def _fail(self, parts: Sequence[Part], error: SlotStreamError) -> None:
        for req_id in {part.req_id for part in parts}:
            self._sender.post(FailSample(req_id, error))

    def _batches(self, parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
        """The step's rows, in groups that one read and a part of the pool can hold."""
        first = size = 0
        parts_max = max(1, self._staging.shape.num_slots // 4)
        for at, part in enumerate(parts):
            if size and (size + part.rows > self._staging.rows_per_batch or at - first == parts_max):
                yield parts[first:at]
                first = at
                size = 0
            size += part.rows
        if size:
            yield parts[first:]


def _parts_of(plan: StepPlan) -> tuple[SampleOpen | RowPlan | SampleFinish | SampleAbort, ...]:
    """Everything in a plan that concerns a sample."""
    return (*plan.opens, *plan.rows, *plan.finishes, *plan.aborts)
