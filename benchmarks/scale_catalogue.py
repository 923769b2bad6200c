"""The scale benchmark's catalogues: many samples at rest, and what asking for one of them costs."""

from __future__ import annotations

import signal
import sqlite3
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter, time_ns
from typing import Any

from contenders import Server
from load import HIDDEN, LAYERS, ROW_BYTES, Load, Senders
from transport_ours import SinkStream

from slotstream.client import connect
from slotstream.client.client import Client
from slotstream.store.catalogue.sqlite import sql
from slotstream.store.catalogue.sqlite.catalogue import SqliteCatalogue
from slotstream.store.disk.directory import CATALOGUE_NAME
from slotstream.store.records import SampleRecord, State
from slotstream.store.samples import SampleStore

_BATCH = 5000
_SAMPLES = 50  # Samples that each cost is the median of.
_PAGE = 200
_STARTS = 3  # Of each kind.
_TAGGED = 1000  # Every so many samples carry the tag that is looked for.


def sample_id(number: int) -> str:
    return f"cmpl-{number:024x}"


def fill(data: Path, count: int, name: Callable[[int], str] = sample_id) -> None:
    """A data directory of `count` committed samples, as rows and empty files: nothing here reads rows of tokens."""
    SampleStore.open(data).close()
    catalogue = SqliteCatalogue(data / CATALOGUE_NAME)
    now = time_ns()
    made: set[Path] = set()
    for first in range(0, count, _BATCH):
        records = [_record(name(number), number, now) for number in range(first, min(first + _BATCH, count))]
        catalogue.submit(partial(_put, records=records)).result()
        for record in records:
            path = record.key.path(data)
            if path.parent not in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                made.add(path.parent)
            path.touch()
    catalogue.close(clean=True)


def _put(db: sqlite3.Connection, records: Sequence[SampleRecord]) -> None:
    for record in records:
        sql.put(db, record)


def _record(name: str, number: int, now_ns: int) -> SampleRecord:
    return SampleRecord(
        namespace="default",
        sample_id=name,
        state=State.COMMITTED,
        created_unix_ns=now_ns + number,
        model="benchmark",
        dtype="BF16",
        layer_ids=tuple(range(LAYERS)),
        hidden_size=HIDDEN,
        num_tokens=1024,
        file_bytes=1024 * ROW_BYTES,
        committed_unix_ns=now_ns + number,
        tags={"set": "rare" if number % _TAGGED == 0 else "common"},
        metadata={"finish_reason": "length"},
        header_xxh3="0" * 16,
    )


def measure_catalogue(count: int, data: Path) -> dict[str, Any]:
    """Milliseconds of each request, medians; seconds of starts, and how they compare; MiB that the server holds at the end."""
    fill(data, count)
    _, server = _start(data)
    try:
        with connect(server.address) as client:
            costs = _costs(client, count)
        costs["store ms"] = _store_cost(server.address)
        rss_mib = resident_mib(server.pid)
    finally:
        server.close()
    clean_s, killed_s = _starts(data)
    starts = {"start s": clean_s, "start after a kill s": killed_s, "after a kill / clean": killed_s / clean_s}
    return {"samples": count, **costs, **starts, "resident MiB": rss_mib}


def _starts(data: Path) -> tuple[float, float]:
    """Seconds of a start after a clean stop, and of one after a kill, with nothing written between. In turns; medians."""
    clean, killed = [], []
    for _ in range(_STARTS):
        seconds, server = _start(data)
        clean.append(seconds)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        server.close()
        seconds, server = _start(data)
        killed.append(seconds)
        server.close()
    return statistics.median(clean), statistics.median(killed)


def _start(data: Path) -> tuple[float, Server]:
    """Seconds until a server on `data` answers; the interpreter's own start is part of it."""
    began = perf_counter()
    server = Server("127.0.0.1:0", data, "--transport", "grpc")
    return perf_counter() - began, server


def _costs(client: Client, count: int) -> dict[str, float]:
    numbers = Random(0).sample(range(count), 2 * _SAMPLES)
    middle_ns = client.stat(sample_id(count // 2)).created_unix_ns

    def first_page(number: int) -> None:
        _expect(len(list(client.list(limit=_PAGE))), min(_PAGE, count))

    def middle_page(number: int) -> None:
        _expect(len(list(client.list(created_until=middle_ns, limit=_PAGE))), min(_PAGE, count // 2))

    def tagged_page(number: int) -> None:
        found = list(client.list(tags={"set": "rare"}, limit=10))
        _expect(len(found), min(10, count // _TAGGED))

    return {
        "list ms": _median_ms(first_page, numbers[:_SAMPLES]),
        "list from the middle ms": _median_ms(middle_page, numbers[:_SAMPLES]),
        "list by tag ms": _median_ms(tagged_page, numbers[:_SAMPLES]),
        "stat ms": _median_ms(lambda number: client.stat(sample_id(number)), numbers[_SAMPLES:]),
        "delete ms": _median_ms(lambda number: client.delete(sample_id(number)), numbers[:_SAMPLES]),
    }


def _expect(found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(f"a page has {found} samples, not {expected}")


def _median_ms(call: Callable[[int], object], numbers: list[int]) -> float:
    taken = []
    for number in numbers:
        began = perf_counter()
        call(number)
        taken.append(perf_counter() - began)
    return 1e3 * statistics.median(taken)


def _store_cost(address: str) -> float:
    """Milliseconds a sample of one row, one after the other: until it is committed."""
    senders = Senders("small samples", SinkStream, address, "grpc", True, environment={})
    try:
        senders.prepare(Load(ROW_BYTES, 1, 1, 1))
        senders.all("run")
        return 1e3 * statistics.median(senders.all("run")[0] for _ in range(_SAMPLES))
    finally:
        senders.close()


def resident_mib(pid: int) -> float:
    """Memory of a process that lies in RAM."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) / 1024
