"""Several streams that send frames have a process each, beside the sender's: what becomes of samples where one of them dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.descendants import descendants
from support.outage_rig import Engine, Restarting, account, assert_only_aborted
from support.ports import free_port
from support.waiting import wait_until

from slotstream.client import SampleState, connect

STREAMS = 4
LANE, SENDER = "slotstream.connector.sending.process.lane_main", "slotstream.connector.sending.process.main"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restarting]:
    with Restarting(tmp_path / "data", "--workers", "4", "--drain-s", "10", address=f"127.0.0.1:{free_port()}") as running:
        yield running


def _start(server: Restarting, seed: int, **options: Any) -> Engine:
    return Engine.start(server.address, seed, "e", streams=STREAMS, transport="grpc", sender="process", **options)


def _up(engine: Engine) -> int:
    """As the sender told it last, which may be a second ago; 0 while a process is missing."""
    return int(engine.rig.worker._sender.gauges().get("streams_up", 0)) if len(_lanes()) == STREAMS else 0


def _lanes() -> list[int]:
    return descendants(os.getpid(), LANE)


def _senders() -> list[int]:
    return [pid for pid in descendants(os.getpid(), f"{SENDER} ") if pid not in _lanes()]


def _sockets(pid: int) -> set[str]:
    """Of a process, beyond standard input and output."""
    links = {int(entry.name): str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return {name for number, name in links.items() if number > 2 and name.startswith("socket:")}


def _settle(engine: Engine, server: Restarting, *, cut: bool = False) -> None:
    """Every sample has its verdict, and those that were not aborted are stored. `cut`: see `assert_only_aborted`."""

    def answered() -> bool:
        over = (SampleState.COMMITTED, SampleState.FAILED)
        known = {info.sample_id for info in client.list() if info.state in over}
        return engine.promised.keys() <= known

    with connect(server.address) as client:
        wait_until(answered)
    assert_only_aborted(account(server.address, engine.promised), engine.promised, cut=cut)
    assert set(engine.failed().values()) <= {"ABORTED"}


def test_each_stream_has_a_process_and_all_rows_arrive(server: Restarting) -> None:
    with closing(_start(server, 1)) as engine:
        wait_until(lambda: _up(engine) == STREAMS)
        (sender,) = _senders()
        sockets = [_sockets(pid) for pid in (sender, *_lanes())]
        assert all(sockets)
        assert len(set().union(*sockets)) == sum(map(len, sockets))  # None has inherited another's.
        engine.work(80)
        _settle(engine, server)
    wait_until(lambda: not _lanes())


def test_a_process_of_a_stream_that_is_killed_costs_no_sample(server: Restarting) -> None:
    with closing(_start(server, 2)) as engine:
        for number in range(4):
            wait_until(lambda: _up(engine) == STREAMS)
            engine.work(15)
            os.kill(_lanes()[number], signal.SIGKILL)
            engine.work(15)
        wait_until(lambda: _up(engine) == STREAMS)
        engine.work(10)
        _settle(engine, server, cut=True)


def test_all_of_them_killed_at_once_is_an_outage(server: Restarting) -> None:
    with closing(_start(server, 3)) as engine:
        wait_until(lambda: _up(engine) == STREAMS)
        engine.work(10)
        for lane in _lanes():
            os.kill(lane, signal.SIGKILL)
        engine.work(10)
        wait_until(lambda: _up(engine) == STREAMS)
        _settle(engine, server, cut=True)


@pytest.mark.extended  # Half a minute; test_lane_process.py has the same of one stream alone.
def test_a_process_that_stands_still_is_replaced(server: Restarting) -> None:
    with closing(_start(server, 4)) as engine:
        wait_until(lambda: _up(engine) == STREAMS)
        still = _lanes()[1]
        os.kill(still, signal.SIGSTOP)
        engine.work(20)
        wait_until(lambda: still not in _lanes())
        wait_until(lambda: _up(engine) == STREAMS)
        _settle(engine, server, cut=True)


def test_a_sender_that_is_killed_takes_its_streams_processes_along(server: Restarting) -> None:
    with closing(_start(server, 5)) as engine:
        wait_until(lambda: _up(engine) == STREAMS)
        lanes = _lanes()
        (sender,) = _senders()
        os.kill(sender, signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in lanes))
        wait_until(lambda: _up(engine) == STREAMS)  # Of the next one.
        engine.work(10)
        _settle(engine, server, cut=True)


def test_with_one_stream_there_is_no_process_more(server: Restarting) -> None:
    with closing(Engine.start(server.address, 6, "e", transport="grpc", sender="process")) as engine:
        wait_until(lambda: engine.rig.worker._sender.gauges()["streams_up"] == 1)
        engine.work(10)
        _settle(engine, server)
        (sender,) = _senders()
        assert descendants(sender, "") == []
