"""Several real servers that die, drain and come back under one worker half: rows go to one that answers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest
import torch
from support.outage_rig import Engine, Restarting, begin_half, finish_half, half_is_arriving
from support.secure import Authority
from support.server import ServerProcess
from support.waiting import wait_until
from transport.recorder import Recorder

from slotstream.client import SampleState, connect
from slotstream.demo.processes import free_port
from slotstream.transport.base import LinkDown, LinkUp
from slotstream.transport.grpc import GrpcSink
from slotstream.transport.targets import Target, Targets
from slotstream.v1 import ingest_pb2
from slotstream.wire.access import Access
from slotstream.wire.names import PROTOCOL_VERSION

HELLO = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="e")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Restarting]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Restarting(tmp_path / name, "--drain-s", "60")) for name in ("a", "b")]


def _listed(servers: Sequence[Restarting]) -> str:
    return ",".join(server.address for server in servers)


def _up(engine: Engine) -> bool:
    return engine.rig.worker._sender.gauges()["link_up"] > 0 and engine.rig.worker._sender.server is not None


def _used(engine: Engine, servers: Sequence[Restarting]) -> tuple[Restarting, Restarting]:
    """Of two servers the one that the engine's stream is up to, and the other one."""
    wait_until(lambda: _up(engine))
    one, other = servers
    return (one, other) if engine.rig.worker._sender.server.address == one.address else (other, one)


def _assert_stored(servers: Sequence[Restarting], promised: dict[str, bytes | None]) -> None:
    """Each whole sample is committed on one of the servers, or on more, with its rows.

    One that was on its way when its server was killed may have failed there, as interrupted, once that is back.
    """
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server.address)) for server in servers]
        known = [{info.sample_id: info for info in client.list()} for client in clients]
        for sample_id, rows in promised.items():
            if rows is None:
                continue
            having = [(client, infos[sample_id]) for client, infos in zip(clients, known, strict=True) if sample_id in infos]
            stored = [client for client, info in having if info.state is SampleState.COMMITTED]
            assert stored, sample_id
            for client in stored:
                sample = client.get(sample_id)
                assert sample.hidden_states.contiguous().view(torch.uint8).numpy().tobytes() == rows, sample_id
            assert {info.error_code for client, info in having if client not in stored} <= {"INTERRUPTED"}


def test_an_address_where_nobody_is_costs_no_sample(pair: list[Restarting]) -> None:
    alive, dead = pair
    dead.stop()
    for turn in range(4):  # In one order or the other.
        with closing(Engine.start(_listed([dead, alive]), seed=turn, name=f"e{turn}")) as engine:
            engine.work(5)
            assert _used(engine, pair) == (alive, dead)
            wait_until(partial(getattr, engine, "settled"))
            _assert_stored([alive], engine.promised)


@pytest.mark.parametrize("sender", ["thread", "process"])
def test_after_a_kill_amid_samples_the_next_server_gets_all_that_has_no_verdict(pair: list[Restarting], sender: str) -> None:
    engine = Engine.start(_listed(pair), seed=1, sender=sender)
    worker = engine.rig.worker
    try:
        engine.work(20)
        begin_half(engine)
        first, second = _used(engine, pair)
        first.stop(signal.SIGKILL)
        engine.work(20)
        finish_half(engine)
        wait_until(lambda: _up(engine) and worker._sender.server.address == second.address)
        wait_until(lambda: worker._sender.gauges()["samples_in_flight"] == 0)
        assert worker.take_server() == Target(second.address, second.address)  # What the health watch is told.
        assert worker.take_server() is None
        first.start()
        _assert_stored(pair, engine.promised)
        assert set(engine.failed().values()) <= {"ABORTED"}
    finally:
        engine.close()


def test_a_drain_moves_the_stream_once_nothing_is_open_and_fails_no_sample(pair: list[Restarting]) -> None:
    engine = Engine.start(_listed(pair), seed=2)
    pump = engine.rig.worker._sender
    try:
        engine.work(3)
        begin_half(engine)
        first, second = _used(engine, pair)
        wait_until(lambda: half_is_arriving(engine, first.address))
        (lane,) = pump._outbox.lanes
        first.send(signal.SIGTERM)
        wait_until(lambda: lane.sink._open.leaving)
        engine.work(10)
        wait_until(lambda: pump._outbox.samples >= 1 and not pump._inbox)
        assert _used(engine, pair) == (first, second)  # A sample is open there yet.
        finish_half(engine)
        wait_until(lambda: engine.settled and pump.server.address == second.address)
        assert first.process is not None
        assert first.process.process.wait(60) == 0
        first.stop()
        first.start()
        assert set(engine.failed().values()) <= {"ABORTED"}
        _assert_stored(pair, engine.promised)
        with connect(first.address) as client:
            assert client.stat("e-half").state is SampleState.COMMITTED
            assert {info.error_code for info in client.list(state="failed")} <= {"ABORTED"}
    finally:
        engine.close()


def test_with_all_away_samples_wait_for_the_one_that_comes_back(pair: list[Restarting], tmp_path: Path) -> None:
    engine = Engine.start(_listed(pair), seed=3, spool_dir=str(tmp_path / "spool"))
    try:
        engine.work(5)
        wait_until(lambda: engine.settled)
        first, second = _used(engine, pair)
        for server in pair:
            server.stop()
        wait_until(lambda: not engine.rig.worker._sender.link_up)
        engine.work(10)
        second.start()
        wait_until(lambda: engine.settled)
        assert _used(engine, pair) == (second, first)
        _assert_stored([second], dict(list(engine.promised.items())[5:]))
        first.start()
        _assert_stored(pair, engine.promised)
    finally:
        engine.close()


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_a_name_with_two_records_is_two_servers_with_one_certificate(tmp_path: Path, *, secure: bool) -> None:
    port, access, options = free_port(), Access(), list[str]()
    if secure:
        # For the name alone: no number of a server is in it.
        authority = Authority(tmp_path / "tls")
        pair = authority.issue("server", numbers=False)
        access, options = Access(os.fspath(authority.path)), ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    numbers = ["127.0.0.1", "127.0.0.2"]
    targets = Targets((f"localhost:{port}",), resolve=lambda host, port: numbers)
    with ExitStack() as stack:
        # The sink waits for them. No client could: it would look for the number in the certificate.
        servers = {
            f"{number}:{port}": stack.enter_context(
                ServerProcess(tmp_path / number, "--allow-anonymous", *options, address=f"{number}:{port}", wait=False)
            )
            for number in numbers
        }
        sink, recorder = GrpcSink(targets, HELLO, access=access), Recorder()
        stack.callback(sink.close, 10.0)
        sink.start(recorder)
        first = recorder.wait(LinkUp)[0].target
        assert first is not None
        assert first.address in servers
        assert first.name == f"localhost:{port}"
        servers[first.address].stop(signal.SIGKILL)
        recorder.wait(LinkDown)
        sink.reset()
        second = recorder.wait(LinkUp, 2)[1].target
        assert second == Target(next(address for address in servers if address != first.address), first.name)
