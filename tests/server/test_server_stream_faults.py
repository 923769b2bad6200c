"""A fault of the server's own in an ingest stream: it is logged and counted, the peer gets a code, nothing is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from server.server_kit import FAILED, Peer, Reader, RunningServer, Sample
from support.outage_rig import Engine, account
from support.waiting import wait_until

from slotstream.server.ingest.announced import Announced
from slotstream.server.ingest.open_samples import OpenSamples
from slotstream.server.ingest.replies import Replies

INTERNAL = (grpc.StatusCode.INTERNAL, "INTERNAL")
# Where it happens: while a frame is taken, while the event loop looks what the writers did, while replies are sent.
WHERE = [
    pytest.param((OpenSamples, "_take_commit"), id="taking a frame"),
    pytest.param((OpenSamples, "_reply"), id="collecting what is done"),
    pytest.param((Replies, "_message"), id="sending replies"),
]


@pytest.fixture
def break_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[type, str]], None]:
    """Make the next call of a method fail, and none after it."""

    def broken(where: tuple[type, str]) -> None:
        owner, name = where
        method = getattr(owner, name)

        def failing(*arguments: Any) -> Any:
            monkeypatch.setattr(owner, name, method)
            raise ZeroDivisionError("made up")

        monkeypatch.setattr(owner, name, failing)

    return broken


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.exc_info and record.exc_info[0] is ZeroDivisionError]


@pytest.mark.parametrize("where", WHERE)
def test_the_peer_gets_a_code_and_the_log_a_traceback(
    running: RunningServer,
    peer: Peer,
    reader: Reader,
    caplog: pytest.LogCaptureFixture,
    break_once: Callable[[tuple[type, str]], None],
    where: tuple[type, str],
) -> None:
    sample = Sample(rows=40)
    with Peer(running.address) as unlucky:
        unlucky.say(sample.open(1), sample.chunk(1, 1, 0, 20))
        assert unlucky.acks(1) == [1]
        break_once(where)
        unlucky.say(sample.chunk(1, 2, 20, 40), sample.commit(1))
        assert unlucky.ending() == INTERNAL
    assert len(tracebacks(caplog)) == 1
    assert running.metric("refused_streams_total", code="INTERNAL") == 1
    wait_until(lambda: running.metric("ingest_streams") == 1)
    peer.put(Sample("beside"), 1)
    peer.put(sample, 2)
    assert reader.read("s")[1] == sample.data


def test_a_fault_while_chunks_are_being_announced_frees_what_was_held(
    running: RunningServer, reader: Reader, break_once: Callable[[tuple[type, str]], None]
) -> None:
    sample = Sample(rows=40)
    with Peer(running.address) as unlucky:
        unlucky.say(sample.open(1), sample.chunk(1, 1, 0, 20))
        assert unlucky.acks(1) == [1]
        break_once((Announced, "park"))
        unlucky.say(sample.commit(1))
        assert unlucky.ending() == INTERNAL
    wait_until(lambda: running.metric("open_samples") == 0)
    assert reader.state("s") == (FAILED, "INTERRUPTED")


def test_a_fault_that_comes_again_and_again_is_counted_and_not_logged_again(
    running: RunningServer, caplog: pytest.LogCaptureFixture, break_once: Callable[[tuple[type, str]], None]
) -> None:
    for _ in range(3):
        with Peer(running.address) as unlucky:
            break_once((OpenSamples, "_take_open"))
            unlucky.say(Sample().open(1))
            assert unlucky.ending() == INTERNAL
    assert len(tracebacks(caplog)) == 1
    assert running.metric("refused_streams_total", code="INTERNAL") == 3


@pytest.mark.parametrize("where", WHERE)
def test_the_connector_holds_its_samples_and_sends_them_again(
    running: RunningServer, break_once: Callable[[tuple[type, str]], None], where: tuple[type, str]
) -> None:
    engine = Engine.start(running.address, seed=1)
    try:
        wait_until(lambda: engine.rig.worker._sender.link_up)
        break_once(where)
        engine.work(20)
        wait_until(lambda: engine.settled)
        assert running.metric("refused_streams_total", code="INTERNAL") == 1
        failed = account(running.address, engine.promised)
        assert failed == {sample_id: "ABORTED" for sample_id, rows in engine.promised.items() if rows is None}
    finally:
        engine.close()
