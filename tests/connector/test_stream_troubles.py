"""One stream of several in trouble on its way to a server of several processes: slow, silent, cut, away; or its process dies.

Nothing that is acknowledged is lost, no sample fails that could be sent again, and rows keep their order.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.descendants import descendants
from support.outage_rig import Engine, Restarting, account
from support.ports import free_port
from support.relay import Link, Relay
from support.waiting import wait_until

from slotstream.client import SampleState, connect
from slotstream.wire import nixl

STREAMS = 4
_NIXL = pytest.mark.skipif(not nixl.is_installed(), reason="NIXL is not installed")
# Streams of one process over both transports, and streams that have a process each.
SENDERS = [
    pytest.param("thread", "grpc", id="grpc"),
    pytest.param("thread", "nixl", id="nixl", marks=_NIXL),
    pytest.param("process", "grpc", id="processes"),
]
# The same, with fewer of them in the usual run.
EXTENDED = pytest.mark.extended
MOSTLY_PROCESSES = [
    pytest.param("thread", "grpc", id="grpc", marks=EXTENDED),
    pytest.param("thread", "nixl", id="nixl", marks=[_NIXL, EXTENDED]),
    pytest.param("process", "grpc", id="processes"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restarting]:
    options = ("--workers", str(STREAMS), "--drain-s", "10", "--nixl-readers", "1")
    with Restarting(tmp_path / "data", *options, address=f"127.0.0.1:{free_port()}") as running:
        yield running


@pytest.fixture
def relay(server: Restarting) -> Iterator[Relay]:
    with Relay(server.address) as running:
        yield running


def _start(address: str, sender: str, transport: str, seed: int, **options: Any) -> Engine:
    engine = Engine.start(address, seed, "e", streams=STREAMS, sender=sender, transport=transport, **options)
    wait_until(lambda: _up(engine) == STREAMS, "all streams")
    return engine


def _up(engine: Engine) -> int:
    return int(engine.rig.worker._sender.gauges()["streams_up"])


def _live(relay: Relay) -> list[Link]:
    """One a stream. A stream that found no process of its own on the first try has hung up on others."""
    wait_until(lambda: len(relay.live) == STREAMS, "an end of all other links")
    return relay.live


def _all_is_stored(engine: Engine, server: Restarting, *, silent: bool = False) -> None:
    """Every sample but those that were aborted, with its rows in order; and all of staging is free.

    `silent`: the server believes in streams whose peers are gone. Aborted samples of those are arriving until it hears of that.
    """
    wanted = {sample_id: rows for sample_id, rows in engine.promised.items() if rows is not None or not silent}
    over = (SampleState.COMMITTED, SampleState.FAILED)

    def answered() -> bool:
        return wanted.keys() <= {info.sample_id for info in client.list() if info.state in over}

    with connect(server.address) as client:
        wait_until(answered, "a word on every sample")
    failed = account(server.address, wanted)
    assert not [sample_id for sample_id in failed if engine.promised[sample_id] is not None]
    assert set(engine.failed().values()) <= {"ABORTED"}
    wait_until(lambda: engine.rig.worker._sender.gauges()["staging_bytes_in_use"] == 0, "free staging")


@pytest.mark.parametrize(("sender", "transport"), SENDERS)
def test_a_slow_way_gets_less_and_no_sample_is_sent_twice(
    server: Restarting, relay: Relay, sender: str, transport: str
) -> None:
    with closing(_start(relay.address, sender, transport, 1, chunk_bytes=4096)) as engine:
        links = _live(relay)
        before = [link.carried for link in links]
        links[1].slow_s = 1.0  # Much longer than any other way needs, on a busy machine too.
        engine.work(120)
        links[1].slow_s = 0.05
        _all_is_stored(engine, server)
        carried = [link.carried - then for link, then in zip(links, before, strict=True)]
        assert 0 < carried[1] < max(carried)
        assert _live(relay) == links
        assert engine.stats().get("samples_replayed", 0) == 0


@pytest.mark.parametrize(("sender", "transport"), SENDERS[1:])
def test_a_peer_that_vanishes_without_a_reset_costs_no_sample(
    server: Restarting, relay: Relay, sender: str, transport: str
) -> None:
    """The server goes on believing in that stream, and in what it announced, while its samples go over the others."""
    with closing(_start(relay.address, sender, transport, 2, ack_timeout_s=0.5)) as engine:
        silent = []
        for number in range(2):
            wait_until(lambda: _up(engine) == STREAMS)
            engine.work(10)
            gone = random.Random(number).choice([link for link in relay.live if link not in silent])
            gone.fall_silent()
            silent.append(gone)
            engine.work(20)
            _all_is_stored(engine, server, silent=True)
        for gone in silent:
            gone.cut()  # Now the server hears of it; what came in another way stays.
        engine.work(10)
        _all_is_stored(engine, server)


@pytest.mark.parametrize(("sender", "transport"), MOSTLY_PROCESSES)
def test_a_stream_that_stays_away_is_done_without_and_comes_back(
    server: Restarting, relay: Relay, sender: str, transport: str
) -> None:
    """For longer than it is waited for: its next tries meet a proxy that takes them, and says nothing."""
    with closing(_start(relay.address, sender, transport, 3, ack_timeout_s=0.5)) as engine:
        relay.silent = True
        _live(relay)[2].fall_silent()
        while _up(engine) == STREAMS:  # Until a sample met it.
            engine.work(5)
        engine.work(60)
        _all_is_stored(engine, server, silent=True)
        assert _up(engine) == STREAMS - 1
        relay.silent = False
        for link in relay.live:
            if link.is_silent:
                link.cut()
        wait_until(lambda: _up(engine) == STREAMS, "the stream that was away")
        engine.work(20)
        _all_is_stored(engine, server)


@pytest.mark.parametrize(("sender", "transport"), MOSTLY_PROCESSES)
def test_streams_that_are_cut_and_processes_that_are_killed_cost_no_sample(
    server: Restarting, relay: Relay, sender: str, transport: str
) -> None:
    assert server.process is not None
    rng = random.Random(4)
    with closing(_start(relay.address, sender, transport, 4)) as engine:
        for number in range(4):
            engine.work(10)
            if number % 2:
                rng.choice(relay.live).cut()
            else:
                workers = descendants(server.process.process.pid, "slotstream.server.processes.worker")
                os.kill(rng.choice(workers), signal.SIGKILL)
            engine.work(10)
            wait_until(lambda: _up(engine) == STREAMS, "all streams")
        _all_is_stored(engine, server)
