"""Fixtures of the store's tests. `store/store_kit.py` holds what they build samples and faults with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store.catalogues import CATALOGUES, PARAMETERS, RECORDS, HandClock

from slotstream.store.catalogue.base import Catalogue
from slotstream.store.sample import row_hash
from slotstream.store.samples import SampleStore


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash groups of a few rows, so that small samples have many."""
    monkeypatch.setattr(row_hash, "GROUP_BYTES", 256)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SampleStore]:
    opened = SampleStore.open(tmp_path / "data")
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
