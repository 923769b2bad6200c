"""What the pump has to do next: what the engine said, in its order, and what happened elsewhere, at once.

vLLM prepares a step while the device computes the one before, so a batch is posted long before its rows exist. Answers of the
server must not wait behind it: they free the staging that the next step's rows want.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from slotstream.connector.plan import SampleAbort, SampleFinish, SampleOpen
from slotstream.connector.sending.copies import Gathered
from slotstream.connector.sending.row_check import RowEvidence
from slotstream.wire.errors import SlotStreamError

# How often a copy under way is looked at. To wait for a CUDA event instead keeps a core busy for the whole step.
_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one sample in one staging slot."""

    req_id: str
    first_row: int
    rows: int
    staging_slot: int


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Segments of one gather, and what the device says of their rows. `scratch`: staging slots that the copies went through.

    `copied_unix_ns`: when they were over; 0 where that is still to be seen.
    """

    segments: tuple[Segment, ...]
    gathered: Gathered
    evidence: RowEvidence
    scratch: tuple[int, ...] = ()
    copied_unix_ns: int = 0

    @property
    def is_copied(self) -> bool:
        """Whether looking at the rows does not wait; they are to be looked at also where the copy failed."""
        try:
            return self.gathered.is_done
        except Exception:  # Whoever waits for the copy meets it again, and fails the samples.
            return True


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


EngineItem = SampleOpen | StagedBatch | SampleFinish | SampleAbort | FailSample | Stop
Event = TypeVar("Event")


class Inbox(Generic[Event]):
    """Anybody puts, one thread gets. Bounded by what the items refer to: leased staging slots, samples, unacked chunks."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[EngineItem | Event] = queue.SimpleQueue()
        self._said: deque[EngineItem] = deque()  # By the engine, in order.

    def __len__(self) -> int:
        return self._arrived.qsize() + len(self._said)

    def put(self, item: EngineItem | Event) -> None:
        """Add what is to be done; never blocks."""
        self._arrived.put(item)

    def get(self, timeout_s: float) -> EngineItem | Event | None:
        """What to do next: events before what the engine said. None when there is nothing to be done for `timeout_s`."""
        until = time.monotonic() + timeout_s
        while True:
            ready = bool(self._said) and _is_ready(self._said[0])
            left_s = 0.0 if ready else max(0.0, until - time.monotonic())
            try:
                item = self._arrived.get(timeout=min(left_s, _POLL_S) if self._said else left_s)
            except queue.Empty:
                if ready:
                    return self._said.popleft()
                if not left_s:
                    return None
                continue
            if not isinstance(item, EngineItem):
                return item
            self._said.append(item)


def _is_ready(item: EngineItem) -> bool:
    return not isinstance(item, StagedBatch) or item.is_copied
