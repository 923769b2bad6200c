"""What the server tells systemd, or another service manager, over NOTIFY_SOCKET."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server.server_kit import Peer, Sample
from server.test_server_process import SERVICES, SERVING, Process, _health


@contextmanager
def _manager(name: str) -> Iterator[socket.socket]:
    """What a service manager listens on; a name that begins with @ is in no directory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name[1:] if name.startswith("@") else name)
        listening.settimeout(60)
        yield listening


def _heard(manager: socket.socket) -> dict[str, str]:
    lines = manager.recv(4096).decode().split("\n")
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ready_is_said_when_the_server_answers_and_stopping_when_it_drains(tmp_path: Path, workers: str) -> None:
    name = str(tmp_path / "notify")
    options = ("--drain-s", "3600", "--workers", workers)
    with _manager(name) as manager, Process(tmp_path / "data", *options, NOTIFY_SOCKET=name) as server:
        assert _heard(manager) == {"READY": "1", "STATUS": f"listening on {server.address}"}
        assert [_health(server.address, service) for service in SERVICES] == [SERVING] * 3
        with Peer(server.address) as peer:
            peer.say(Sample().open(1), Sample().chunk(1, 1, 0, 20))
            peer.hear_until("ack")
            server.signal()
            assert _heard(manager) == {"STOPPING": "1", "STATUS": "draining"}
            assert server.process.poll() is None  # The sample is still open.
            server.signal()
            assert server.wait() == 0
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):  # Nothing was said twice, and nothing by a worker.
            manager.recv(4096)


def test_a_manager_may_listen_in_no_directory(tmp_path: Path) -> None:
    name = f"@slotstream-{tmp_path.name}-{tmp_path.parent.name}"
    with _manager(name) as manager, Process(tmp_path, NOTIFY_SOCKET=name):
        assert _heard(manager)["READY"] == "1"


def test_a_server_that_cannot_start_is_not_ready(tmp_path: Path) -> None:
    name = str(tmp_path / "notify")
    (tmp_path / "data").write_text("no directory")
    command = [
        sys.executable,
        "-m",
        "slotstream.cli.main",
        "serve",
        "--data",
        str(tmp_path / "data"),
        "--listen",
        "127.0.0.1:0",
    ]
    with _manager(name) as manager:
        ended = subprocess.run(command, env={"NOTIFY_SOCKET": name}, capture_output=True, timeout=60, check=False)
        assert ended.returncode == 1, ended.stderr
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(4096)


def test_a_manager_that_is_not_there_stops_nothing(tmp_path: Path) -> None:
    with Process(tmp_path / "data", NOTIFY_SOCKET=str(tmp_path / "nobody")) as server:
        assert _health(server.address) == SERVING
        server.signal(signal.SIGINT)
        assert server.wait() == 0
    assert sum("the service manager at NOTIFY_SOCKET=" in line for line in server.lines) == 2
