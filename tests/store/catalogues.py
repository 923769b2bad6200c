"""Every implementation of `Catalogue`, for the suite that all of them pass, and rows to fill them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slotstream.store.catalogue.base import Catalogue
from slotstream.store.catalogue.sqlite.catalogue import SqliteCatalogue
from slotstream.store.records import SampleRecord, State


def _sqlite(place: Path, now: Callable[[], int]) -> Catalogue:
    return SqliteCatalogue(place / "catalog.sqlite", now)


S = 1_000_000_000

# Name -> opens the catalogue of a place (a directory of the test's own); the same place again is the same catalogue.
# `now`: the clock by which its leases end, Unix nanoseconds.
CATALOGUES: dict[str, Callable[[Path, Callable[[], int]], Catalogue]] = {"sqlite": _sqlite}

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


class HandClock:
    """Unix nanoseconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000 * S

    def __call__(self) -> int:
        return self.now


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
