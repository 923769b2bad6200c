"""Whether the server counts as there: an outage is waited out, a server that never was there is not."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import closing
from functools import partial
from pathlib import Path

from support.outage_rig import Engine, begin_half, half_is_arriving
from support.server import ServerProcess
from support.waiting import wait_until

from slotstream.connector.planning.server_health import ServerHealth
from slotstream.transport.targets import Target, Targets

LONG_S = 3600.0


def _watching(watch: ServerHealth, server: ServerProcess) -> bool:
    return watch.watched == Target(server.address, server.address) and watch.problem() is None


def nobody() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_server_that_was_never_there_is_a_problem_at_once() -> None:
    with closing(ServerHealth(nobody())) as watch, closing(ServerHealth(nobody(), patient=True)) as patient:
        wait_until(lambda: watch.problem() is not None and patient.problem() is not None)
        assert watch.problem(LONG_S) is not None
        assert patient.problem(LONG_S) is None


def test_a_server_that_was_there_may_be_away_for_a_while(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, closing(ServerHealth(server.address)) as watch:
        wait_until(lambda: watch._reached)
        server.stop()
        wait_until(lambda: watch.problem() is not None)
        assert watch.problem(LONG_S) is None


def test_a_server_that_takes_a_moment_to_answer_is_there(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        server.process.send_signal(signal.SIGSTOP)
        try:
            with closing(ServerHealth(server.address)) as watch:
                time.sleep(1.0)  # As an engine that loads a model leaves the processor to nobody else.
                assert watch.problem() is None
                server.process.send_signal(signal.SIGCONT)
                wait_until(lambda: watch._reached)
        finally:
            server.process.send_signal(signal.SIGCONT)


def test_of_several_servers_the_one_that_the_stream_uses_is_watched(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "a") as one, ServerProcess(tmp_path / "b") as two:
        targets = Targets((nobody(), one.address, two.address))
        with closing(ServerHealth(targets)) as watch:
            wait_until(lambda: watch._reached)
            for server in (one, two, one):
                watch.follow(Target(server.address, server.address))
                wait_until(partial(_watching, watch, server))
            one.stop(signal.SIGKILL)
            wait_until(lambda: _watching(watch, two))  # The stream goes there too, and will say so.
            assert watch.problem() is None


def test_there_is_a_problem_only_while_none_of_several_takes_samples(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "a") as one,
        ServerProcess(tmp_path / "b") as two,
        closing(ServerHealth(Targets((one.address, two.address)))) as watch,
    ):
        wait_until(lambda: watch._reached)
        one.stop()
        wait_until(lambda: _watching(watch, two))
        two.stop()
        wait_until(lambda: watch.problem() is not None)
        for address in (one.address, two.address):
            assert address in str(watch.problem())
        with ServerProcess(tmp_path / "a", address=one.address) as again:
            wait_until(lambda: _watching(watch, again))


def test_a_server_that_drains_is_no_problem_while_another_takes_samples(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "a", "--drain-s", "60") as one,
        ServerProcess(tmp_path / "b") as two,
        closing(ServerHealth(Targets((one.address, two.address)))) as watch,
        closing(Engine.start(one.address)) as engine,
    ):
        begin_half(engine)
        wait_until(lambda: half_is_arriving(engine, one.address))
        watch.follow(Target(one.address, one.address))
        wait_until(lambda: _watching(watch, one))
        one.process.send_signal(signal.SIGTERM)
        wait_until(lambda: _watching(watch, two))
        assert one.process.poll() is None
        one.stop(signal.SIGKILL)
