"""What the pump has to do next: what the engine said, in its order, and what happened elsewhere, at once.

vLLM prepares a step while the device computes the one before, so a batch is posted long before its rows exist. Answers of the
server must not wait behind it: they free the staging that the next step's rows want.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from slotstream.connector.plan import SampleAbort, SampleFinish, SampleOpen
from slotstream.connector.sending.row_check import RowEvidence, Segment
from slotstream.wire.errors import SlotStreamError


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Segments of one read, and what the device says of their rows. `scratch`: staging slots that the read needed for itself.

    `number`: the read is over once the device has written it, or a later one, into `StagingArea.done`.
    """

    segments: tuple[Segment, ...]
    number: int
    evidence: RowEvidence
    scratch: tuple[int, ...] = ()

    @property
    def slots(self) -> list[int]:
        """All staging slots that were leased for it."""
        return [*self.scratch, *(segment.staging_slot for segment in self.segments)]


@dataclass(frozen=True, slots=True)
class FailSample:
    """The engine's thread gives a sample up."""

    req_id: str
    error: SlotStreamError


@dataclass(frozen=True, slots=True)
class Stop:
    """`patience`: until when (monotonic) the server is waited for; what it has not answered goes to the spool then."""

    patience: float
    deadline: float


EngineItem = SampleOpen | RowBatch | SampleFinish | SampleAbort | FailSample | Stop
Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class Looks:
    """How often a read under way is looked at: for the first time after `first_s`, then after `growth` times as long each."""

    first_s: float
    growth: float


# A look is cheap, but in the engine's process it takes the interpreter: there the engine's thread looks too, once a step.
BESIDE_THE_ENGINE = Looks(0.003, 4.0)
IN_A_PROCESS_OF_ITS_OWN = Looks(0.0005, 1.0)


@dataclass(frozen=True, slots=True)
class _Look:
    """It is worth while."""


class Inbox(Generic[Event]):
    """Anybody puts, one thread gets. Bounded by what the items refer to: leased staging slots, samples, unacked chunks.

    `done`: the number of the last read that is over. Batches, and what the engine said behind them, wait for theirs.
    """

    def __init__(self, done: Callable[[], int], looks: Looks) -> None:
        self._arrived: queue.SimpleQueue[EngineItem | Event | _Look] = queue.SimpleQueue()
        self._said: deque[EngineItem] = deque()  # By the engine, in order.
        self._done = done
        self._looks = looks
        self._awaited = 0  # The number of the read that what was said first waits for; 0: of none.
        self._waits = True

    def __len__(self) -> int:
        return self._arrived.qsize() + len(self._said)

    def put(self, item: EngineItem | Event) -> None:
        """Adds work. Never blocks."""
        self._arrived.put(item)

    def look(self) -> None:
        """From the engine's thread: have the read that is waited for looked at, if it is over."""
        if self._awaited and self._done() >= self._awaited:
            self._awaited = 0
            self._arrived.put(_Look())

    def wait_no_more(self) -> None:
        """No read that is not over will ever be: batches come as they are."""
        self._waits = False
        self._arrived.put(_Look())

    def get(self, timeout_s: float) -> EngineItem | Event | None:
        """What to do next: events before what the engine said. None when there is nothing to be done for `timeout_s`."""
        until = time.monotonic() + timeout_s
        look_s = self._looks.first_s
        while True:
            self._awaited = self._awaits()
            ready = bool(self._said) and not self._awaited
            left_s = 0.0 if ready else max(0.0, until - time.monotonic())
            try:
                item = self._arrived.get(timeout=min(left_s, look_s) if self._said else left_s)
            except queue.Empty:
                if ready:
                    return self._said.popleft()
                if not left_s:
                    return None
                look_s *= self._looks.growth
                continue
            if isinstance(item, EngineItem):
                self._said.append(item)
            elif not isinstance(item, _Look):
                return item

    def _awaits(self) -> int:
        first = self._said[0] if self._said else None
        if not isinstance(first, RowBatch) or not self._waits or first.number <= self._done():
            return 0
        return first.number
