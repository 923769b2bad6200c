"""For every test directory: one real server a session to send to and read from."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.ingest_client import IngestClient
    from support.server import ServerProcess

# Of what is tested nothing is large: threads of PyTorch's that wait for each other only take the cores from other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).parent
# Files that take longer than ten seconds, the longest first.
LONGEST = (
    "engine/test_direct.py",
    "engine/test_reference.py",
    "engine/test_two_engines.py",
    "engine/test_requests.py",
    "engine/test_dense.py",
    "engine/test_swa.py",
    "engine/test_certify.py",
    "engine/test_examples.py",
    "engine/test_hook_guard.py",
    "engine/test_doctor.py",
    "engine/test_missing_seams.py",
    "engine/test_refused_start.py",
    "client/test_client_rows.py",
    "cli/test_cli_capture.py",
    "packaging/test_version_before.py",
    "breaking/endurance/test_endurance.py",
    "breaking/faults/test_faulty_disk.py",
    "connector/test_sender_process.py",
    "server/test_idle_memory.py",
    "packaging/test_workflow.py",
    "server/test_server_nixl.py",
    "server/test_server_new_rules.py",
    "engine/test_norms_in_place.py",
    "breaking/simulation/test_simulation.py",
    "connector/test_outage.py",
    "connector/test_stream_processes.py",
    "connector/test_stream_troubles.py",
    "connector/test_streams.py",
    "connector/test_lane_process.py",
    "store/test_store_flipped_bits.py",
    "packaging/test_wheel.py",
    "breaking/test_server_attacks.py",
    "server/test_server_process.py",
    "server/test_server_shared_store.py",
    "store/test_cluster_faults.py",
    "store/test_cluster_store.py",
    "store/test_s3_faults.py",
    "store/test_blobs_conformance.py",
    "breaking/fuzz/test_fuzz.py",
    "packaging/test_deploy.py",
    "packaging/test_chart.py",
    "cli/test_cli_help_examples.py",
)
_namespaces = (f"test-{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A `slotstream serve` shared by the whole session; tests keep apart by `namespace`, and leave it running."""
    from support.server import ServerProcess

    # A slow machine may take its time between a test's read and its upload: the read waits for it.
    with ServerProcess(tmp_path_factory.mktemp("data"), "--appear-grace-s", "60", transport="auto") as process:
        yield process


def pytest_sessionfinish() -> None:
    """The engines that some tests started go with the session."""
    if "support.postgres" in sys.modules:
        sys.modules["support.postgres"].stop_cluster()
    if "support.seaweedfs" in sys.modules:
        sys.modules["support.seaweedfs"].stop_object_store()


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
    """What takes longest first: the processes that share the files then end at about the same time."""
    place = {TESTS / name: number for number, name in enumerate(LONGEST)}
    assert all(path.exists() for path in place), "a file of LONGEST has moved"
    items.sort(key=lambda item: place.get(item.path, len(place)))
