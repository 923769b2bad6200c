"""Whether the server counts as there: an outage is waited out, a server that never was there is not."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import closing
from pathlib import Path

from support.server import ServerProcess
from support.waiting import wait_until

from slotstream.connector.planning.server_health import ServerHealth

LONG_S = 3600.0


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
