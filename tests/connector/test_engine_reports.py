"""What a worker says of itself every five seconds, and what `status` shows of it: the pump as a thread and as a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.outage_rig import Engine, Restarting
from support.waiting import wait_until
from support.worker_rig import LAYER_IDS, config

from slotstream.client import EngineStatus, connect
from slotstream.connector.sending.engine_reports import REPORT_S, EngineReports
from slotstream.connector.sending.lane import Lanes
from slotstream.transport.loopback import LoopbackSink
from slotstream.v1 import ingest_pb2

GAUGES = {"staging_bytes_limit": 100.0, "staging_bytes_in_use": 40.0, "spool_bytes_in_use": 7.0, "samples_in_flight": 3.0}


class _Sink(LoopbackSink):
    def __init__(self) -> None:
        super().__init__()
        self.reports: list[ingest_pb2.EngineReport] = []

    def report(self, report: ingest_pb2.EngineReport) -> None:
        self.reports.append(report)


def test_a_report_comes_with_each_link_and_every_five_seconds_while_it_is_up() -> None:
    now, asked = 100.0, 0
    sink = _Sink()

    def gauges() -> dict[str, float]:
        nonlocal asked
        asked += 1
        return GAUGES

    lanes = Lanes([sink])
    (lane,) = lanes
    reports = EngineReports(config(layers=[1, "final"]), lanes, gauges, lambda: now)
    reports.tick()
    reports.link_is_down(lane)  # Refused before it ever was up: nothing was lost.
    assert sink.reports == []
    lane.up = True
    reports.link_is_up()
    for _ in range(10):
        now += 1
        reports.tick()
    reports.link_is_down(lane)
    lane.up = False
    reports.link_is_down(lane)
    now += 2 * REPORT_S
    reports.tick()
    lane.up = True
    reports.link_is_up()
    assert [report.links_lost for report in sink.reports] == [0, 0, 0, 1]
    assert asked == 4  # Nothing is looked at for a report that is not sent.
    said = sink.reports[0]
    assert (said.host, list(said.layer_ids), said.has_final) == (os.uname().nodename, list(LAYER_IDS), True)
    assert (said.staging_bytes, said.staging_bytes_in_use, said.spool_bytes_in_use, said.samples_in_flight) == (100, 40, 7, 3)


def test_a_fault_of_a_report_stops_no_pump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(reports: EngineReports) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(EngineReports, "_say", faulty)
    server = Restarting(tmp_path / "data")
    try:
        engine = Engine.start(server.address)
        engine.work(3)
        wait_until(lambda: engine.settled)
        assert engine.stats()["hook_faults"] >= 1
        engine.close()
        with connect(server.address) as client:
            (told,) = _engines(client)
            assert (told.host, told.layers, told.staging_bytes, told.links_lost, told.report_s) == (None,) * 5
            assert len(list(client.list())) == len(engine.promised)
    finally:
        server.stop()


def _engines(client: Any) -> tuple[EngineStatus, ...]:
    server = client.status().server
    assert server is not None
    engines: tuple[EngineStatus, ...] = server.engines
    return engines


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restarting]:
    restarting = Restarting(tmp_path / "data")
    yield restarting
    restarting.stop()


@pytest.mark.parametrize("sender", ["thread", "process"])
def test_status_shows_what_a_worker_says_of_itself(server: Restarting, sender: str) -> None:
    options: dict[str, Any] = {"staging_bytes": 1 << 20, "chunk_bytes": 64 << 10, "transport": "grpc"}
    engine = Engine.start(server.address, name="an-engine", sender=sender, **options)

    def reported(lost: int) -> EngineStatus:
        found: list[EngineStatus] = []

        def there() -> bool:
            with connect(server.address) as client:
                found[:] = [one for one in _engines(client) if one.connected and one.links_lost == lost]
            return len(found) == 1

        wait_until(there)
        return found[0]

    try:
        told = reported(0)
        assert (told.engine_id, told.host, told.transport) == ("an-engine", os.uname().nodename, "grpc")
        assert told.layers == tuple(map(str, LAYER_IDS))
        assert told.staging_bytes == engine.rig.worker._sender.gauges()["staging_bytes_limit"] > 1 << 19
        assert told.staging_bytes_in_use == 0
        assert (told.spool_bytes_in_use, told.samples_in_flight) == (0, 0)
        server.stop()
        server.start()
        assert reported(1).engine_id == "an-engine"
    finally:
        engine.close()
