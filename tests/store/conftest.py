"""Fixtures of the store's tests. `store/store_kit.py` holds what they build samples and faults with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store.catalogues import CATALOGUES, PARAMETERS, RECORDS, HandClock
from support.memory_blobs import Bucket, MemoryBlobs
from support.memory_catalogue import MemoryCatalogue, Tables

from slotstream.store.catalogue.base import Catalogue
from slotstream.store.cluster.opening import open_store
from slotstream.store.sample import row_hash
from slotstream.store.samples import SampleStore


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash groups of a few rows, so that small samples have many."""
    monkeypatch.setattr(row_hash, "GROUP_BYTES", 256)


def open_files(place: Path) -> SampleStore:
    return SampleStore.open(place / "data")


def open_cluster(place: Path) -> SampleStore:
    """One server of a pair whose catalogue and bucket are models in memory."""
    return open_store(
        "s3://bucket",
        "postgresql://somewhere/slotstream",
        place / "scratch",
        blobs=MemoryBlobs(Bucket()),
        catalogue=MemoryCatalogue(Tables(time.time_ns)),
    )


STORES = {"files": open_files, "cluster": open_cluster}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What asks for `store` gets each kind, one after the other; marked `files_only`, it is about files and SQLite."""
    if "store" in metafunc.fixturenames:
        is_of_files = metafunc.definition.get_closest_marker("files_only") is not None
        metafunc.parametrize("store", ["files"] if is_of_files else list(STORES), indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SampleStore]:
    opened = STORES[request.param](tmp_path)
    yield opened
    opened.close()


# Of the suites that every catalogue passes.


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture(params=PARAMETERS)
def reopen(request: pytest.FixtureRequest, tmp_path: Path, clock: HandClock) -> Callable[[], Catalogue]:
    """Opens the test's catalogue, with what is in it."""
    return lambda: CATALOGUES[request.param](tmp_path, clock)


@pytest.fixture
def empty(reopen: Callable[[], Catalogue]) -> Iterator[Catalogue]:
    opened = reopen()
    yield opened
    opened.close()


@pytest.fixture
def catalogue(empty: Catalogue) -> Catalogue:
    """With RECORDS in it."""
    for written in [empty.commit(record) for record in RECORDS]:
        written.result()
    return empty
