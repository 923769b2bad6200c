"""Fixtures of the store's tests. `store_kit` holds what they build samples and faults with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from slotstream.store.sample import row_hash  # noqa: E402
from slotstream.store.samples import SampleStore  # noqa: E402


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash groups of a few rows, so that small samples have many."""
    monkeypatch.setattr(row_hash, "GROUP_BYTES", 256)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SampleStore]:
    opened = SampleStore.open(tmp_path / "data")
    yield opened
    opened.close()
