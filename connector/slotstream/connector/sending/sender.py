"""What becomes of staged rows, as the engine's thread sees it: the pump in this process, or one in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slotstream.connector.counters import Counters
from slotstream.connector.faults import SampleFault
from slotstream.connector.plan import SampleAbort, SampleFinish, SampleOpen
from slotstream.connector.sending.inbox import FailSample, RowBatch
from slotstream.connector.sending.pump import Pump
from slotstream.connector.sending.staging_area import HostMemory
from slotstream.connector.sending.staging_pool import StagingPool, StagingShape
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.base import SampleSink
from slotstream.transport.targets import Target
from slotstream.wire.errors import SlotStreamError

EnginePost = SampleOpen | RowBatch | SampleFinish | SampleAbort | FailSample


class Sender(Protocol):
    """All methods are called from the engine's thread, and at times a step's from the one beside it, which it then waits for.

    None but `start`, `lease` and `close` ever waits.
    """

    looks: bool
    """Whether `look` does anything."""

    def start(self) -> None:
        """Begin. Raises ConfigError where the options cannot work here."""

    def post(self, item: EnginePost) -> None:
        """Have something handed over by `hand_over`; kept in order. The slots of a batch are the last ones that were leased."""

    def hand_over(self) -> None:
        """What was posted goes on its way: once a step, for it wakes a thread, which then wants the interpreter."""

    def look(self) -> None:
        """A step begins: reads of earlier ones may be over."""

    def lease(self, count: int, deadline: float) -> list[int] | None:
        """Staging slots for rows: waits for room until `deadline` (monotonic); None, which `why_full` explains, without."""

    def release(self, slots: list[int]) -> None:
        """Give back slots that were leased last, and not posted."""

    def why_full(self) -> SlotStreamError:
        """What to tell of a sample for which there is no room in staging."""

    @property
    def has_faults(self) -> bool:
        """Whether there are faults to take."""

    def take_faults(self) -> list[SampleFault]:
        """Samples that failed since the last call."""

    @property
    def server(self) -> Target | None:
        """The server that a stream came up to last; None while none has."""

    def gauges(self) -> Mapping[str, float]:
        """The gauges of `counters.METRICS`, now."""

    def close(self, timeout_s: float) -> None:
        """Let what is in flight finish, for at most `timeout_s`; what cannot goes to the spool. Then stop."""


class SenderMaker(Protocol):
    """Makes a worker's sender, which adds its counts to `counters`. Raises ConfigError where it cannot work."""

    def __call__(self, memory: HostMemory, shape: StagingShape, counters: Counters) -> Sender: ...


def in_thread(config: ConnectorConfig, sinks: Sequence[SampleSink]) -> SenderMaker:
    """A pump in this process."""

    def make(memory: HostMemory, shape: StagingShape, counters: Counters) -> Sender:
        area = memory.area
        for sink in sinks:
            sink.use_staging(area.slots, shape.slot_bytes)
        return Pump(config, StagingPool(area.slots, shape), area, sinks, counters)

    return make
