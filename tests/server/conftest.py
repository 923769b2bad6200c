"""Fixtures of the server's tests. `server/server_kit.py` holds the server under test and its raw peers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from server.server_kit import Peer, Reader, RunningServer


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    """A server of this test's own, in this process."""
    from server.server_kit import RunningServer

    with RunningServer(tmp_path / "data") as server:
        yield server


@pytest.fixture
def peer(running: RunningServer) -> Iterator[Peer]:
    """A stream to it that has said Hello."""
    from server.server_kit import Peer

    with Peer(running.address) as connected:
        yield connected


@pytest.fixture
def reader(running: RunningServer) -> Iterator[Reader]:
    from server.server_kit import Reader

    with Reader(running.address) as connected:
        yield connected
