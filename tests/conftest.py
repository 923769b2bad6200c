"""For every test directory: one real server a session to send to and read from."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.ingest_client import IngestClient
    from support.server import ServerProcess

_namespaces = (f"test-{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A `slotstream serve` shared by the whole session; tests keep apart by `namespace`, and leave it running."""
    from support.server import ServerProcess

    # A slow machine may take its time between a test's read and its upload: the read waits for it.
    with ServerProcess(tmp_path_factory.mktemp("data"), "--appear-grace-s", "60") as process:
        yield process


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A test that leaves the log switched off fails itself, not one that reads the log after it."""
    before = logging.root.manager.disable
    yield
    left, logging.root.manager.disable = logging.root.manager.disable, before
    assert left == before, "this test left logging.disable() in force"


@pytest.fixture
def ingest(server: ServerProcess) -> Iterator[IngestClient]:
    """A sender to the session's server."""
    from support.ingest_client import IngestClient

    with IngestClient(server.address) as sender:
        yield sender


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test of the session uses."""
    return next(_namespaces)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines first: they take longest, and two processes that share the files then end at about the same time."""
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)
