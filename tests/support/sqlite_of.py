"""The catalogue of a store, for tests that look behind its Protocol."""

from __future__ import annotations

from slotstream.store.catalogue.sqlite.catalogue import SqliteCatalogue
from slotstream.store.samples import SampleStore


def sqlite_of(store: SampleStore) -> SqliteCatalogue:
    """A data directory's is the one in SQLite."""
    assert isinstance(store._catalogue, SqliteCatalogue)
    return store._catalogue
