"""Real vLLM engines on the CPU, each started once for all the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stack import Stack, stack
from support.workload import LAYER_IDS

from slotstream.client import Client, connect
from slotstream.truth import model as truth_model


@pytest.fixture(scope="session")
def truth_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The truth checkpoints that run on a CPU, by kind."""
    root = tmp_path_factory.mktemp("models")
    return {kind: truth_model.make(root / kind, kind) for kind in ("dense", "swa", "mla")}


@pytest.fixture(scope="module")
def dense(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    work, model = tmp_path_factory.mktemp("dense"), truth_models["dense"]
    with stack(work, model, LAYER_IDS, extract=True, one_process=True, outage_s_max=0) as running:
        yield running


@pytest.fixture(scope="module")
def swa(truth_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    work = tmp_path_factory.mktemp("swa")
    with stack(work, truth_models["swa"], LAYER_IDS, serve=False, extract=True, one_process=True, sender="process") as running:
        yield running


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of the stack that the test uses."""
    name = "swa" if "swa" in request.fixturenames else "dense"
    with connect(request.getfixturevalue(name).address) as connected:
        yield connected
