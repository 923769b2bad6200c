"""Fixtures of the server's tests. `server_kit` holds the server under test and its raw peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

if TYPE_CHECKING:
    from server_kit import Peer, Reader, RunningServer


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    """A server of this test's own, in this process."""
    from server_kit import RunningServer

    with RunningServer(tmp_path / "data") as server:
        yield server


@pytest.fixture
def peer(running: RunningServer) -> Iterator[Peer]:
    """A stream to it that has said Hello."""
    from server_kit import Peer

    with Peer(running.address) as connected:
        yield connected


@pytest.fixture
def reader(running: RunningServer) -> Iterator[Reader]:
    from server_kit import Reader

    with Reader(running.address) as connected:
        yield connected
