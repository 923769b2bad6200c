"""Failures that the server has not heard of: samples that a response promised and that ended while the server was away."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slotstream.connector.counters import Counters
from slotstream.connector.held import numbered
from slotstream.connector.spool_files import SpoolFile
from slotstream.transport.base import Failed, SampleSink
from slotstream.v1 import ingest_pb2

REPORTS_MAX = 1 << 16
_AT_ONCE = 64
_PAUSE_S = 5.0


@dataclass(slots=True, eq=False)
class Report:
    """A failed sample: its OpenSample without what only a stored sample needs, serialized, for there may be many."""

    opened: bytes
    serial: int
    code: str
    message: str
    file: SpoolFile | None

    @classmethod
    def of(cls, opened: ingest_pb2.OpenSample, serial: int, code: str, message: str, file: SpoolFile | None) -> Report:
        request = numbered(opened, 0)
        request.rows_exact = False  # Nothing is to be preallocated for a sample that will not come.
        request.ClearField("tags")
        request.ClearField("metadata")
        return cls(request.SerializeToString(), serial, code, message, file)


class Reports:
    """At most REPORTS_MAX of them, the oldest dropped first. Each is told as an open and an abort. For the pump's thread.

    `numbers` gives sample numbers; `drop` gets the file of a report that is done with.
    """

    def __init__(self, sink: SampleSink, counters: Counters, numbers: Iterator[int], drop: Callable[[SpoolFile], None]) -> None:
        self._sink = sink
        self._counters = counters
        self._numbers = numbers
        self._drop = drop
        self._waiting: deque[Report] = deque()
        self._told: dict[int, Report] = {}
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

    def _done(self, report: Report) -> None:
        if report.file is not None:
            self._drop(report.file)

    def send(self) -> None:
        """Tell the next ones. The link is up."""
        if time.monotonic() < self._paused_until:
            return
        while self._waiting and len(self._told) < _AT_ONCE:
            report = self._waiting.popleft()
            number = next(self._numbers)
            self._told[number] = report
            self._sink.open_sample(numbered(ingest_pb2.OpenSample.FromString(report.opened), number))
            self._sink.abort(ingest_pb2.AbortSample(sample=number, code=report.code, message=report.message))

    def answered(self, event: Failed, *, again: bool) -> bool:
        """The server has heard of one, unless it could not do anything now (`again`). False when it is none of these."""
        report = self._told.pop(event.sample, None)
        if report is None:
            return False
        if again and event.code != report.code:
            self._waiting.append(report)
            self._paused_until = time.monotonic() + _PAUSE_S
        else:
            self._counters.add("failures_reported")
            self._done(report)
        return True

    def link_down(self, spooled: Callable[[Report], SpoolFile | None]) -> None:
        """What was told and not answered is told again. All is `spooled`, if it can be, for this engine may end before."""
        self._waiting.extendleft(reversed(self._told.values()))
        self._told.clear()
        self._paused_until = 0.0
        for report in self._waiting:
            if report.file is None:
                report.file = spooled(report)
                if report.file is None:
                    return
