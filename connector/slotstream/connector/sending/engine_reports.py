"""Tells the server how this worker is: what `slotstream status` shows of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from slotstream.connector.sending.lane import Lane, Lanes
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.v1 import ingest_pb2

REPORT_S = 5.0


class EngineReports:
    """For the pump's thread. `gauges` are the pump's; `clock`: monotonic seconds."""

    def __init__(
        self,
        config: ConnectorConfig,
        lanes: Lanes,
        gauges: Callable[[], Mapping[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._layer_ids, self._has_final = os.uname().nodename, config.layer_ids, config.wants_final
        self._lanes = lanes
        self._gauges = gauges
        self._clock = clock
        self._due: float | None = None  # None: no lane is up.
        self._links_lost = 0

    def link_is_up(self) -> None:
        """A lane came up: the server hears of this worker at once."""
        self._say()

    def link_is_down(self, lane: Lane) -> None:
        """Before the lane is marked as down. May be called again and again while it is."""
        self._links_lost += lane.up
        if self._lanes.up in ([], [lane]):
            self._due = None

    def tick(self) -> None:
        """Called about once a second."""
        if self._due is not None and self._clock() >= self._due:
            self._say()

    def _say(self) -> None:
        self._due = self._clock() + REPORT_S
        gauges = self._gauges()
        report = ingest_pb2.EngineReport(
            host=self._host,
            layer_ids=self._layer_ids,
            has_final=self._has_final,
            staging_bytes=int(gauges["staging_bytes_limit"]),
            staging_bytes_in_use=max(0, int(gauges["staging_bytes_in_use"])),
            spool_bytes_in_use=int(gauges["spool_bytes_in_use"]),
            samples_in_flight=int(gauges["samples_in_flight"]),
            links_lost=self._links_lost,
        )
        for lane in self._lanes.up:
            lane.sink.report(report)
