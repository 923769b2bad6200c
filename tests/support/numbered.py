"""Samples whose every row is a number that no other row has, made fast enough for a hundred thousand of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from support.ingest_client import IngestClient
from support.synthetic import SyntheticSample


@dataclass(frozen=True)
class NumberedSample(SyntheticSample):
    """F32 rows [layers, 2]: the row's number, counted from `first`, and the layer's id."""

    first: int = 0
    dtype: str = "F32"
    layer_ids: tuple[int, ...] = (1, 4)
    hidden_size: int = 2

    def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
        assert layers is None
        stop = self.num_tokens if stop is None else stop
        numbers = (x for row in range(start, stop) for layer in self.layer_ids for x in (self.first + row, layer))
        return array("f", numbers).tobytes()


def numbered(namespace: str, lengths: Iterable[int], first: int = 0) -> list[NumberedSample]:
    """Samples of so many rows, numbered on from `first`."""
    made = []
    for length in lengths:
        made.append(NumberedSample(f"n{first:07}", namespace=namespace, num_tokens=length, first=first))
        first += length
    return made


def store(ingest: IngestClient, namespace: str, lengths: Iterable[int], first: int = 0) -> list[NumberedSample]:
    """The same, committed."""
    samples = numbered(namespace, lengths, first)
    ingest.store(*samples, rows_per_chunk=4096)
    return samples
