"""The cluster benchmark's catalogues: what a question costs in PostgreSQL with few samples at rest and with many."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import perf_counter, time_ns
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # It runs without being installed.

from machine import progress
from support.postgres import Cluster

from slotstream.store.catalogue.postgres.catalogue import PostgresCatalogue
from slotstream.store.catalogue.postgres.migrating import migrate
from slotstream.store.catalogue.queries import ListQuery, Queue
from slotstream.store.records import SampleKey, SampleRecord, State

_BATCH = 250  # Commits that are asked for before one is waited for: a transaction of the thread that writes.
_PAGE = 100
_OLDEST = 64  # As many as retention looks at together.
_NAMESPACES = 4
_TAGGED = 1000  # Every so many samples carry the tag that is looked for.
_FAILED = 100


def measure_catalogue(count: int, questions: int) -> dict[str, Any]:
    """Medians in milliseconds over `questions` of each kind, and what filling costs; in a database of its own."""
    cluster = Cluster(fsync="off")
    try:
        url = cluster.database()
        migrate(url)
        catalogue = PostgresCatalogue(url)
        began, start = perf_counter(), time_ns()
        _fill(catalogue, count, start)
        filled_s = perf_counter() - began
        costs = _costs(catalogue, count, start, questions)
        catalogue.close()
        return {"samples": count, **costs, "commits a second, filling": count / filled_s}
    finally:
        cluster.stop()


def _fill(catalogue: PostgresCatalogue, count: int, start_ns: int) -> None:
    for first in range(0, count, _BATCH):
        asked = [catalogue.commit(_record(number, start_ns)) for number in range(first, min(first + _BATCH, count))]
        asked[-1].result()
        if first % 100_000 == 0 and first:
            progress(".")


def _record(number: int, start_ns: int) -> SampleRecord:
    failed = number % _FAILED == 7
    return SampleRecord(
        namespace=f"n{number % _NAMESPACES}",
        sample_id=f"cmpl-{number:024x}",
        state=State.FAILED if failed else State.COMMITTED,
        created_unix_ns=start_ns + number,
        model="benchmark",
        dtype="BF16",
        layer_ids=(2, 18, 33, 36),
        hidden_size=4096,
        num_tokens=1024,
        file_bytes=0 if failed else 32 << 20,
        committed_unix_ns=0 if failed else start_ns + number,
        error_code="ABORTED" if failed else "",
        tags={"set": "rare" if number % _TAGGED == 0 else "common"},
        metadata={"finish_reason": "length", "request_id": f"cmpl-{number}"},
        header_xxh3="0" * 16,
    )


def _costs(catalogue: PostgresCatalogue, count: int, start_ns: int, questions: int) -> dict[str, float]:
    numbers = Random(0).sample(range(count), questions)
    middle_ns = start_ns + count // 2

    def stat(number: int) -> None:
        found = catalogue.get(SampleKey(f"n{number % _NAMESPACES}", f"cmpl-{number:024x}"))
        _expect(found is not None, "a sample that was stored is there")

    def page(query: ListQuery) -> Callable[[int], None]:
        def ask(number: int) -> None:
            _expect(len(catalogue.list_page(query)[0]) > 0, "a page has samples")

        return ask

    def oldest(number: int) -> None:
        found = catalogue.candidates(Queue.OLDEST, f"n{number % _NAMESPACES}", (-1, -1), _OLDEST)
        _expect(len(found) == _OLDEST, "there are as many old samples")

    pages = {
        "page": ListQuery(page_size=_PAGE),
        "page from the middle": ListQuery(page_size=_PAGE, created_until_unix_ns=middle_ns),
        "page of two namespaces": ListQuery(page_size=_PAGE, namespaces=("n1", "n2")),
        "page of failed ones": ListQuery(page_size=_PAGE, state=State.FAILED),
        "page of a rare tag": ListQuery(page_size=10, tags={"set": "rare"}),
        "page of a common tag, one namespace": ListQuery(page_size=_PAGE, tags={"set": "common"}, namespace="n1"),
        "page of a request": ListQuery(page_size=_PAGE, request_id=f"cmpl-{count // 2:024x}", namespace=f"n{count // 2 % 4}"),
    }
    kinds = {"stat": stat, "oldest 64": oldest, **{name: page(query) for name, query in pages.items()}}
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for number in numbers:  # In turns, so that what else the machine does falls on all alike.
        for name, ask in kinds.items():
            began = perf_counter()
            ask(number)
            taken[name].append(perf_counter() - began)
    return {f"{name} ms": 1e3 * statistics.median(times) for name, times in taken.items()}


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"it does not hold that {what}")
