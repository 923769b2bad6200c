"""Fixtures of the store's tests. `store/store_kit.py` holds what they build samples and faults with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
