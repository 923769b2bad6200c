"""Stores of several servers in one world: a bucket and a catalogue of the test's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from store.store_kit import crash_server
from support.postgres import catalogue_url
from support.seaweedfs import object_store
from support.waiting import wait_until

from slotstream.store.blobs.base import Blobs
from slotstream.store.blobs.s3.bucket import S3Blobs
from slotstream.store.cluster.generation import KEY
from slotstream.store.cluster.opening import open_store
from slotstream.store.cluster.store import ObjectStore


class World:
    """One bucket's prefix, one database, and as many servers as are opened."""

    def __init__(self, place: Path, endpoint: str = "") -> None:
        self._place = place
        self._numbers = itertools.count()
        self.environment = object_store().environment(endpoint=endpoint)
        self.store_url, self.catalogue_url = object_store().bucket(), catalogue_url()
        self.stores: list[ObjectStore] = []

    def open(self, blobs: Blobs | None = None) -> ObjectStore:
        with pytest.MonkeyPatch.context() as patched:
            for name, value in self.environment.items():
                patched.setenv(name, value)
            scratch = self._place / f"scratch-{next(self._numbers)}"
            self.stores.append(open_store(self.store_url, self.catalogue_url, scratch, blobs=blobs))
        return self.stores[-1]

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def blobs(self) -> S3Blobs:
        with pytest.MonkeyPatch.context() as patched:
            for name, value in self.environment.items():
                patched.setenv(name, value)
            return S3Blobs(self.store_url)

    def objects(self) -> list[str]:
        blobs = self.blobs()
        try:
            return [one.key for one in blobs.list() if one.key != KEY]
        finally:
            blobs.close()

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.catalogue_url, autocommit=True) as db:
            db.execute("SET search_path = slotstream")
            done = db.execute(statement.encode())
            return done.fetchall() if done.description else []

    def let_pass(self) -> None:
        """All attempts are due: what ended did so long ago, and what is open was not renewed for as long."""
        self.sql("UPDATE attempts SET due_unix_ns = 0")

    def sweep(self) -> int:
        """By the server that leads; one does soon after the one before it is gone."""
        wait_until(lambda: any(store._shared.lead() for store in self.stores))
        return next(store for store in self.stores if store._shared.lead())._keeper.sweep()

    def die(self, store: ObjectStore) -> None:
        """As a server that is killed."""
        self.stores.remove(store)
        crash_server(store)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    opened = World(tmp_path)
    yield opened
    opened.close()
