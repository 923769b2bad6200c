"""Failures are warnings with fields that a log collector can search, and one that meets every sample is one line a minute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server.server_kit import Peer, RunningServer, Sample, hello
from support.server import ServerProcess
from support.waiting import wait_until

from slotstream.v1 import ingest_pb2 as pb


def _failing(peer: Peer, sample: Sample, number: int) -> None:
    """Sends some rows of a sample and gives it up."""
    peer.say(sample.open(number), sample.chunk(number, number * 10, 0, 8))
    peer.acks(1)
    peer.say(pb.IngestRequest(abort=pb.AbortSample(sample=number, code="ABORTED", message="no")))
    peer.failed()


def test_a_failed_sample_is_a_warning_with_fields(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--log-format", "json") as server:
        with Peer(server.address) as peer:
            _failing(peer, Sample("s", namespace="n"), 1)
            peer.say(Sample("../x").open(2))
            peer.failed()
        lines: list[dict[str, Any]] = []

        def logged() -> bool:
            lines[:] = [json.loads(line) for line in server.log().splitlines()]
            return sum("event" in line for line in lines) == 2

        wait_until(logged)
    aborted, refused = [line for line in lines if "event" in line]
    assert aborted["level"] == refused["level"] == "WARNING"
    assert {key: aborted[key] for key in ("event", "code", "namespace", "sample_id", "engine", "bytes")} == {
        **{"event": "sample_failed", "code": "ABORTED", "namespace": "n", "sample_id": "s"},
        **{"engine": "test", "bytes": 8 * Sample.row_bytes},
    }
    assert aborted["peer"] == "anonymous"
    assert 0 < aborted["ms"] < 60_000
    assert (refused["code"], refused["bytes"]) == ("BAD_SAMPLE_ID", 0)
    assert not {"namespace", "sample_id"} & set(refused)  # What cannot be a name is not repeated.
    assert "message" in aborted


def test_many_failures_of_one_kind_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunningServer(tmp_path / "data") as server, Peer(server.address) as peer:
        for number in range(1, 30):
            _failing(peer, Sample(f"s{number}"), number)
    told = [record for record in caplog.records if getattr(record, "event", "") == "sample_failed"]
    assert [record.levelname for record in told] == ["WARNING"]


def test_a_stream_that_is_ended_says_whose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunningServer(tmp_path / "data") as server, Peer(server.address, greet=False) as peer:
        peer.say(hello(protocol=99))
        peer.ending()
    (told,) = [record for record in caplog.records if getattr(record, "event", "") == "stream_ended"]
    assert (told.levelname, vars(told)["code"]) == ("WARNING", "PROTOCOL")
    assert vars(told)["peer"].startswith("ipv4:127.0.0.1:")
