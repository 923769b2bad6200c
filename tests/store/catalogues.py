"""Every implementation of `Catalogue`, for the suite that all of them pass, and rows to fill them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.memory_catalogue import MemoryCatalogue, Tables

from slotstream.store.catalogue.base import Catalogue
from slotstream.store.catalogue.postgres.catalogue import PostgresCatalogue
from slotstream.store.catalogue.sqlite.catalogue import SqliteCatalogue
from slotstream.store.records import SampleRecord, State

S = 1_000_000_000


class HandClock:
    """Unix nanoseconds, moved by hand."""

    def __init__(self) -> None:
        self._now = 1_000_000 * S
        self._told: list[Callable[[int], None]] = []

    def __call__(self) -> int:
        return self._now

    @property
    def now(self) -> int:
        return self._now

    @now.setter
    def now(self, now: int) -> None:
        self._now = now
        for tell in self._told:
            tell(now)

    def tell(self, told: Callable[[int], None]) -> None:
        """Whenever it is moved."""
        self._told.append(told)


def _sqlite(place: Path, clock: HandClock) -> Catalogue:
    return SqliteCatalogue(place / "catalog.sqlite", clock)


def _postgres(place: Path, clock: HandClock) -> Catalogue:
    from support.postgres import catalogue_url, set_by_hand

    named = place / "catalogue-url"
    if not named.exists():
        named.write_text(catalogue_url())
        clock.tell(set_by_hand(named.read_text(), clock.now))
    return PostgresCatalogue(named.read_text())


_TABLES: dict[Path, Tables] = {}  # Of the tests' places.


def _memory(place: Path, clock: HandClock) -> Catalogue:
    return MemoryCatalogue(_TABLES.setdefault(place, Tables(clock)))


# Name -> opens the catalogue of a place (a directory of the test's own); the same place again is the same catalogue.
# `clock`: the one by which its leases end.
CATALOGUES: dict[str, Callable[[Path, HandClock], Catalogue]] = {"sqlite": _sqlite, "postgres": _postgres, "memory": _memory}
# As parameters of a fixture: some need an engine.
PARAMETERS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres), "memory"]

RECORDS = [
    SampleRecord(
        namespace=f"n{number % 3}",
        sample_id=f"s{number:03}",
        state=State.FAILED if number % 10 == 0 else State.COMMITTED,
        created_unix_ns=1_000 + number // 2,  # Pairs share a time: the id breaks the tie.
        model=f"m{number % 2}",
        dtype="BF16",
        layer_ids=(1, 2),
        hidden_size=8,
        num_tokens=number,
        file_bytes=number * 10,
        committed_unix_ns=2_000,
        error_code="X" if number % 10 == 0 else "",
        error_message="why" if number % 10 == 0 else "",
        tags={"parity": str(number % 2), "seven": str(number % 7)},
        metadata={"engine": "e"},
        header_xxh3=f"{number:016x}",
    )
    for number in range(60)
]


def committed(sample_id: str = "s", namespace: str = "n", created: int = 10, nbytes: int = 100) -> SampleRecord:
    return SampleRecord(
        namespace,
        sample_id,
        State.COMMITTED,
        created,
        model="m",
        dtype="BF16",
        layer_ids=(1, 2),
        hidden_size=8,
        num_tokens=3,
        file_bytes=nbytes,
        committed_unix_ns=created + 5,
        tags={"split": "train"},
        metadata={"engine": "e"},
        header_xxh3="00ff",
    )


def arriving(sample_id: str = "s", namespace: str = "n", created: int = 10) -> SampleRecord:
    stored = committed(sample_id, namespace, created)
    return replace(stored, state=State.ARRIVING, file_bytes=0, committed_unix_ns=0, header_xxh3="")
