"""The cluster benchmark's servers: what storing and reading samples takes of our processes, with objects and with files."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # It runs without being installed.

from children import tree_cpu_seconds
from machine import progress
from support.ingest_client import IngestClient
from support.postgres import Cluster
from support.seaweedfs import ObjectStore
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.client import connect
from slotstream.store.catalogue.postgres.migrating import migrate

LOCAL = "files"
_MIB = 1 << 20
_HIDDEN, _LAYERS = 4096, (2, 18, 33, 36)  # Of an 8B model: 32 KiB a row.
_SENDERS = 2
_CHUNK_BYTES = 2 * _MIB


class _Random(SyntheticSample):
    """Rows of chance, which take no time to make."""

    def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
        stop = self.num_tokens if stop is None else stop
        return _NOISE[start % 7 :][: (stop - start) * self.row_bytes]


_NOISE = os.urandom(_CHUNK_BYTES + 7)


def measure_servers(sizes_mib: Sequence[int], total_mib: int, rounds: int, work: Path) -> list[dict[str, Any]]:
    """A line a size of sample: processor seconds a GiB of our servers, storing and reading `total_mib`; medians of rounds in
    turns, after one that is not counted.
    """
    lines = []
    for size in sizes_mib:
        progress(f"[samples of {size} MiB]")
        count = max(_SENDERS, total_mib // size)
        with _servers(work) as contenders:
            taken: dict[str, dict[str, list[float]]] = {name: {"store": [], "read": []} for name in contenders}
            for number in range(rounds + 1):
                for name, servers in contenders.items():
                    stored, read = _round(servers, size, count, f"r{number}")
                    if number:
                        taken[name]["store"].append(stored)
                        taken[name]["read"].append(read)
                    progress(".")
        lines.append({"sample_mib": size, "samples": count, **{name: _middle(both) for name, both in taken.items()}})
    return lines


def _middle(both: dict[str, list[float]]) -> dict[str, float]:
    return {what: statistics.median(times) for what, times in both.items()}


@contextmanager
def _servers(work: Path) -> Iterator[dict[str, list[ServerProcess]]]:
    """A local server; one over a bucket and a catalogue; and two over another of each."""
    with ExitStack() as ends, tempfile.TemporaryDirectory(dir=work, prefix="bench-cluster-") as directory:
        place = Path(directory)
        postgres = Cluster(fsync="off")
        ends.callback(postgres.stop)
        objects = ObjectStore()
        ends.callback(objects.stop)
        contenders = {LOCAL: [ends.enter_context(ServerProcess(place / "data"))]}
        for count in (1, 2):
            catalogue, store = postgres.database(), objects.bucket()
            migrate(catalogue)
            contenders[f"{count} with objects"] = [
                ends.enter_context(
                    ServerProcess(
                        None,
                        *("--store", store, "--scratch", str(place / f"scratch-{count}-{number}")),
                        environment={**objects.environment(), "SLOTSTREAM_SERVE_CATALOGUE": catalogue},
                    )
                )
                for number in range(count)
            ]
        yield contenders


def _round(servers: list[ServerProcess], size_mib: int, count: int, name: str) -> tuple[float, float]:
    """Processor seconds a GiB: stored, read."""
    ids = [f"{name}-{number:05}" for number in range(count)]
    gib = count * size_mib / 1024
    stored = _spent(servers, lambda: _in_turns(servers, ids, lambda address, some: _store(address, some, size_mib))) / gib
    read = _spent(servers, lambda: _in_turns(servers, ids, _read)) / gib
    with connect(servers[0].address) as client:
        for sample_id in ids:
            client.delete(sample_id)
    return stored, read


def _spent(servers: list[ServerProcess], work: Callable[[], None]) -> float:
    """Processor seconds of the servers."""
    before = sum(tree_cpu_seconds(server.process.pid) for server in servers)
    work()
    return sum(tree_cpu_seconds(server.process.pid) for server in servers) - before


def _in_turns(servers: list[ServerProcess], ids: list[str], work: Callable[[str, list[str]], None]) -> None:
    """Two callers at a time, over all servers."""
    with ThreadPoolExecutor(_SENDERS) as threads:
        done = [
            threads.submit(work, servers[number % len(servers)].address, ids[number::_SENDERS]) for number in range(_SENDERS)
        ]
        for one in done:
            one.result()


def _store(address: str, ids: list[str], size_mib: int) -> None:
    with IngestClient(address, timeout_s=600) as ingest:
        for sample_id in ids:
            sample = _Random(sample_id, layer_ids=_LAYERS, hidden_size=_HIDDEN, num_tokens=size_mib * 32)
            ingest.store(sample, rows_per_chunk=_CHUNK_BYTES // sample.row_bytes)


def _read(address: str, ids: list[str]) -> None:
    with connect(address) as client:
        for sample_id in ids:
            with client.read(sample_id, wait_s=0.0) as reading:
                for _ in reading:
                    pass
