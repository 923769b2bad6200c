"""Several streams of one worker half to a real server with as many processes: samples are dealt out, and move."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.descendants import descendants
from support.outage_rig import Engine, Restarting, account, assert_only_aborted
from support.ports import free_port
from support.waiting import wait_until

from slotstream.client import Client, connect
from slotstream.transport.grpc import Frames, GrpcSink
from slotstream.transport.nixl import NixlPlane
from slotstream.wire import nixl
from slotstream.wire.names import WINDOW_BYTES

STREAMS = 4
TRANSPORTS = ["grpc", pytest.param("nixl", marks=pytest.mark.skipif(not nixl.is_installed(), reason="NIXL is not installed"))]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restarting]:
    options = ("--workers", str(STREAMS), "--drain-s", "10", "--nixl-readers", "1")
    with Restarting(tmp_path / "data", *options, address=f"127.0.0.1:{free_port()}") as running:
        yield running


def _up(engine: Engine) -> int:
    return int(engine.rig.worker._sender.gauges()["streams_up"])


def _lanes(engine: Engine) -> list[Any]:
    pump: Any = engine.rig.worker._sender
    return list(pump._outbox.lanes)


def _watch_sent(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks that each stream is given from here on."""
    sent = [0] * len(_lanes(engine))
    for lane in _lanes(engine):
        submit = lane.sink.submit

        def counted(chunk: Any, index: int = lane.index, submit: Any = submit) -> None:
            sent[index] += 1
            submit(chunk)

        monkeypatch.setattr(lane.sink, "submit", counted)
    return sent


def _told(client: Client) -> list[tuple[bool, int | None]]:
    """Whether each stream is connected, and how often it was cut, as the server says."""
    told = client.status().server
    assert told is not None
    return [(one.connected, one.links_lost) for one in told.engines if one.engine_id == "e"]


def _all_is_stored(engine: Engine, server: Restarting, *, cut: bool = False) -> None:
    """Every sample but those that were aborted, with its rows; no staging stays in use. `cut`: see `assert_only_aborted`."""
    wait_until(lambda: engine.settled)
    assert set(engine.failed().values()) <= {"ABORTED"}
    assert_only_aborted(account(server.address, engine.promised), engine.promised, cut=cut)
    wait_until(lambda: engine.rig.worker._sender.gauges()["staging_bytes_in_use"] == 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_stream_finds_a_process_of_its_own_and_all_rows_arrive(
    server: Restarting, transport: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slotstream.transport.spread._TRIES_MAX", 500)  # The kernel deals: 16 miss the last one in 1 of 100.
    with (
        caplog.at_level(logging.INFO, "vllm"),
        closing(Engine.start(server.address, 1, "e", streams=STREAMS, transport=transport)) as engine,
    ):
        wait_until(lambda: _up(engine) == STREAMS)
        lanes = _lanes(engine)
        (spread,) = {lane.sink._spread for lane in lanes}
        assert len({spread._at[lane.index] for lane in lanes}) == STREAMS
        sent = _watch_sent(engine, monkeypatch)
        engine.work(80)
        _all_is_stored(engine, server)
        assert min(sent) > 0
        if transport == "nixl":
            (offered,) = {lane.sink._plane._offered for lane in lanes}  # One agent and one registration.
            assert isinstance(lanes[0].sink._plane, NixlPlane)
            assert sum(offered._generations) >= sum(sent)
        with connect(server.address) as client:
            wait_until(lambda: _told(client) == [(True, 0)] * STREAMS)  # Each process tells the primary in its own time.
    assert [line for line in caplog.messages if "4 of 4 streams are up" in line] != []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_process_that_is_killed_costs_no_sample(server: Restarting, transport: str, caplog: pytest.LogCaptureFixture) -> None:
    assert server.process is not None
    with (
        caplog.at_level(logging.INFO, "vllm"),
        closing(Engine.start(server.address, 2, "e", streams=STREAMS, transport=transport)) as engine,
    ):
        wait_until(lambda: _up(engine) == STREAMS)
        for _ in range(3):
            engine.work(20)
            workers = descendants(server.process.process.pid, "slotstream.server.processes.worker")
            os.kill(workers[0], signal.SIGKILL)
            engine.work(20)
            wait_until(lambda: _up(engine) == STREAMS)
        _all_is_stored(engine, server, cut=True)
    assert [line for line in caplog.messages if "a stream to the server ended" in line and "of 4 streams are up" in line]
    assert not [line for line in caplog.messages if "no link to the server" in line]


def test_a_stream_that_is_cut_gives_its_samples_to_the_others(server: Restarting, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Engine.start(server.address, 3, "e", streams=STREAMS)) as engine:
        for number in range(6):
            wait_until(lambda: _up(engine) == STREAMS)
            engine.work(5)
            _lanes(engine)[number % STREAMS].sink._call.cancel()
            engine.work(5)
        _all_is_stored(engine, server, cut=True)
        wait_until(lambda: _up(engine) == STREAMS)
        sent = _watch_sent(engine, monkeypatch)
        engine.work(40)
        _all_is_stored(engine, server, cut=True)
        assert min(sent) > 0  # A stream that came back gets its share.


def _only_to(lanes: Sequence[Any], numbers: Sequence[int], address: str) -> None:
    """The next streams of these lanes go there: a way that one of them cannot take, as through a proxy that is broken."""
    for number in numbers:
        lanes[number].sink._targets.servers = (address,)


def test_a_stream_that_never_comes_back_is_done_without(server: Restarting) -> None:
    with closing(Engine.start(server.address, 4, "e", streams=STREAMS)) as engine:
        wait_until(lambda: _up(engine) == STREAMS)
        lanes = _lanes(engine)
        _only_to(lanes, [0, 2], f"127.0.0.1:{free_port()}")
        engine.work(10)
        for number in (0, 2):
            lanes[number].sink._call.cancel()
        engine.work(30)
        wait_until(lambda: _up(engine) == 2)
        _all_is_stored(engine, server, cut=True)
        _only_to(lanes, [0, 2], server.address)
        wait_until(lambda: _up(engine) == STREAMS)
        engine.work(10)
        _all_is_stored(engine, server, cut=True)


def test_a_slow_stream_gets_fewer_samples(server: Restarting, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Engine.start(server.address, 5, "e", streams=2, chunk_bytes=4096)) as engine:
        wait_until(lambda: _up(engine) == 2)
        slow, encode = _lanes(engine)[1].sink._plane, Frames.encode

        def slowly(plane: Frames, chunks: Any) -> Any:
            if plane is slow:
                time.sleep(0.05)
            return encode(plane, chunks)

        monkeypatch.setattr(Frames, "encode", slowly)
        sent = _watch_sent(engine, monkeypatch)
        engine.work(150)
        _all_is_stored(engine, server)
        assert 0 < sent[1] < sent[0]


def test_with_all_streams_down_the_server_is_away(server: Restarting) -> None:
    with closing(Engine.start(server.address, 6, "e", streams=STREAMS)) as engine:
        wait_until(lambda: _up(engine) == STREAMS)
        server.stop()
        wait_until(lambda: _up(engine) == 0)
        assert engine.rig.worker._sender.gauges()["link_up"] == 0
        engine.work(5)
        server.start()
        wait_until(lambda: _up(engine) == STREAMS)
        _all_is_stored(engine, server, cut=True)


def test_with_one_stream_everything_is_as_it_was(server: Restarting) -> None:
    """One sink, which has the server's whole window to itself, and no thread but those it always had."""
    before = set(threading.enumerate())
    with closing(Engine.start(server.address, 7, "e")) as engine:
        engine.work(20)
        _all_is_stored(engine, server)
        (lane,) = _lanes(engine)
        assert type(lane.sink) is GrpcSink
        assert type(lane.sink._plane) is Frames
        assert lane.sink._window_bytes == WINDOW_BYTES
        ours = {thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("slotstream")}
        assert ours == {"slotstream-pump", "slotstream-grpc"}
