"""Failures that the server has not heard of: samples that a response promised and that ended while the server was away."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slotstream.connector.counters import Counters
from slotstream.connector.faults import Faults, SampleFault
from slotstream.connector.sending.lane import Lane
from slotstream.connector.sending.sample_state import numbered
from slotstream.connector.sending.spool.files import SpoolFile
from slotstream.transport.base import Failed
from slotstream.v1 import ingest_pb2

REPORTS_MAX = 1 << 16
_AT_ONCE = 64
_PAUSE_S = 5.0
_WRITE_S = 5.0  # How long the spool may take with one before the engine hears of it all the same: its disk may hang.


@dataclass(slots=True, eq=False)
class Report:
    """A failed sample: its OpenSample without what only a stored sample needs, serialized, for there may be many."""

    opened: bytes
    serial: int
    fault: SampleFault
    file: SpoolFile | None
    said: bool = False  # To this engine.

    @classmethod
    def of(cls, opened: ingest_pb2.OpenSample, serial: int, fault: SampleFault, file: SpoolFile | None) -> Report:
        request = numbered(opened, 0)
        request.rows_exact = False  # Nothing is to be preallocated for a sample that will not come.
        request.ClearField("tags")
        request.ClearField("metadata")
        request.ClearField("columns")  # Those that the server does not take may be why it failed.
        return cls(request.SerializeToString(), serial, fault, file)


class Reports:
    """At most REPORTS_MAX of them, the oldest dropped first. Each is told as an open and an abort. For the pump's thread.

    All are `put` into the spool too, if it can hold them, until they are done with, and `drop` gets their files: this engine
    may end before the server has heard of them. So it is told of a failure once that is `written`, or cannot be.
    `on_end` gets the request of each that is done with. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        counters: Counters,
        faults: Faults,
        put: Callable[[Report], SpoolFile | None],
        drop: Callable[[SpoolFile], None],
        on_end: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters = counters
        self._faults = faults
        self._put = put
        self._drop = drop
        self._on_end = on_end
        self._clock = clock
        self._waiting: deque[Report] = deque()
        self._told: dict[tuple[Lane, int], Report] = {}  # by lane, and its number there
        self._unsaid: deque[tuple[float, Report]] = deque()  # With when each is due by the clock, unless it was said before.
        self._paused_until = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._told)

    def add(self, report: Report) -> None:
        """One more."""
        if len(self) >= REPORTS_MAX:
            self._counters.add("reports_dropped")
            if self._waiting:
                self._done(self._waiting.popleft())
        self._waiting.append(report)
        if report.file is None:
            report.file = self._put(report)
            if report.file is not None:
                self._unsaid.append((self._clock() + _WRITE_S, report))
                return
        self._say(report)

    def written(self, report: Report, *, refused: bool) -> None:
        """A record of it lies in the spool; or cannot (`refused`): then `put_again` writes all of it again."""
        if refused and report.file is not None:
            self._drop(report.file)
            report.file = None
        self._say(report)

    def _say(self, report: Report) -> None:
        """Tell the engine, once."""
        if not report.said:
            report.said = True
            sample_id = ingest_pb2.OpenSample.FromString(report.opened).sample_id
            self._faults.add(sample_id, report.fault)

    def tick(self) -> None:
        """Called about once a second."""
        while self._unsaid and (self._unsaid[0][1].said or self._unsaid[0][0] <= self._clock()):
            self._say(self._unsaid.popleft()[1])

    def put_again(self) -> bool:
        """Into the spool with some of those that it did not take when they came; whether there are more of them."""
        left = (report for report in (*self._told.values(), *self._waiting) if report.file is None)
        for report in itertools.islice(left, _AT_ONCE):
            report.file = self._put(report)
        return next(left, None) is not None

    def _done(self, report: Report) -> None:
        self._say(report)
        self._on_end(report.fault.req_id)
        if report.file is not None:
            self._drop(report.file)

    def send(self, lane: Lane) -> None:
        """Tell the next ones, on a lane that is up."""
        if self._clock() < self._paused_until:
            return
        while self._waiting and len(self._told) < _AT_ONCE:
            report = self._waiting.popleft()
            number = lane.next_number()
            self._told[lane, number] = report
            lane.sink.open_sample(numbered(ingest_pb2.OpenSample.FromString(report.opened), number))
            lane.sink.abort(ingest_pb2.AbortSample(sample=number, code=report.fault.code, message=report.fault.message))

    def answered(self, lane: Lane, event: Failed, *, again: bool) -> bool:
        """The server has heard of one, unless it could not do anything now (`again`). False when it is none of these."""
        report = self._told.pop((lane, event.sample), None)
        if report is None:
            return False
        if again and event.code != report.fault.code:
            self._waiting.append(report)
            self._paused_until = self._clock() + _PAUSE_S
        else:
            self._counters.add("failures_reported")
            self._done(report)
        return True

    def link_down(self, lane: Lane) -> None:
        """What was told on a lane and not answered is told again."""
        told = [key for key in self._told if key[0] is lane]
        self._waiting.extendleft(reversed([self._told.pop(key) for key in told]))
        self._paused_until = 0.0
