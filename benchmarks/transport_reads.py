"""The read side of the transport benchmark: one sample of 8,192 tokens, whole and 64 tokens of it."""

from __future__ import annotations

import json
import mmap
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import transport_mooncake as mooncake
from children import Child, tree_cpu_seconds
from contenders import Server
from load import ROW_BYTES, Load, Senders, serve_stream
from machine import progress
from transport_others import serve_flight
from transport_ours import SinkStream

from slotstream.client import connect
from slotstream.wire.names import CHUNK_BYTES_MAX

_TOKENS, _PART = 8192, (4000, 4064)
_NBYTES = _TOKENS * ROW_BYTES
_WHOLE_READS, _PART_READS = 3, 20
_FLIGHT_CHUNK = 1 << 20
_COPY, _PLACED, _TCP, _UNIX = "mmap + copy", "get, in place", "get, TCP", "get, unix"
_FLIGHT, _MOONCAKE = "Arrow Flight do_get", "Mooncake get"


@dataclass(slots=True)
class Read:
    """One way to read: medians of each round. `part_s` is empty where only whole samples can be had."""

    name: str
    whole_s: list[float] = field(default_factory=list)
    part_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)

    @property
    def whole_gb_per_s(self) -> list[float]:
        return [_NBYTES / 1e9 / seconds for seconds in self.whole_s]


class Reader:
    """In a process of its own: reads into memory that is new each time, as `client.get` does."""

    def whole(self, times: int) -> list[float]:
        return _timed(lambda: self.read(0, _TOKENS), times)

    def part(self, times: int) -> list[float]:
        return _timed(lambda: self.read(*_PART), times)

    def first_bytes(self) -> bytes:
        """Of the part, to compare."""
        return bytes(memoryview(self.read(*_PART))[:ROW_BYTES])

    def read(self, start: int, stop: int) -> Any:
        raise NotImplementedError


def _timed(call: Callable[[], Any], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        began = perf_counter()
        call()
        taken.append(perf_counter() - began)
    return taken


class FileReader(Reader):
    """The sample's file, mapped, and its rows copied."""

    def __init__(self, path: Path, at: int) -> None:
        self._path, self._at = path, at

    def read(self, start: int, stop: int) -> Any:
        import numpy as np

        rows = np.empty((stop - start) * ROW_BYTES, dtype=np.uint8)
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            at = self._at + start * ROW_BYTES
            rows.data[:] = memoryview(mapped)[at : at + len(rows)]
        return rows


class ClientReader(Reader):
    """`client.get` into a tensor: hash-checked, by the server, or here where the rows are taken out of the file."""

    def __init__(self, address: str, sample_id: str, data_dir: Path | None = None) -> None:
        self._client, self._sample_id = connect(address, data_dir=data_dir), sample_id

    def read(self, start: int, stop: int) -> Any:
        import torch

        rows = self._client.get(self._sample_id, start=start, stop=stop).hidden_states
        return rows.view(torch.uint8).flatten().numpy()


class FlightReader(Reader):
    """Arrow Flight's `do_get` of batches of 1 MiB from a mapped file, copied into one array."""

    def __init__(self, location: str, path: Path, at: int) -> None:
        from pyarrow import flight

        self._client, self._path, self._at = flight.connect(location), path, at

    def read(self, start: int, stop: int) -> Any:
        import numpy as np
        from pyarrow import flight

        rows = np.empty((stop - start) * ROW_BYTES, dtype=np.uint8)
        target, at = rows.data, 0
        ticket = f"{self._path}:{self._at + start * ROW_BYTES}:{len(rows)}:{_FLIGHT_CHUNK}"
        for chunk in self._client.do_get(flight.Ticket(ticket.encode())):
            data = chunk.data.column(0).buffers()[1]
            target[at : at + data.size] = memoryview(data).cast("B")
            at += data.size
        return rows


class MooncakeReader(Reader):
    """`get` of an object of a sample's size; it has no `get` of a part."""

    def __init__(self, master: str, path: Path, at: int) -> None:
        self._store = mooncake.open_store(master, 0)
        with path.open("rb") as file:
            file.seek(at)
            mooncake.check(self._store.put("sample", file.read(_NBYTES)), "put")

    def read(self, start: int, stop: int) -> Any:
        data = memoryview(self._store.get("sample"))
        if len(data) != _NBYTES:
            raise RuntimeError("Mooncake does not hold the sample any more")
        return data[start * ROW_BYTES : stop * ROW_BYTES]


@dataclass(frozen=True, slots=True)
class _Way:
    child: Child
    server_pids: Sequence[int]

    def ask(self, *question: Any) -> Any:
        return self.child.ask(*question)[2]

    def measure(self, read: Read) -> None:
        """One round; the first read of each kind is not counted."""
        self.ask("whole", 1)
        pids = [self.child.pid, *self.server_pids]
        before = sum(map(tree_cpu_seconds, pids))
        read.whole_s.append(statistics.median(self.ask("whole", _WHOLE_READS)))
        used = sum(map(tree_cpu_seconds, pids)) - before
        read.cpu_s_per_gb.append(used / (_WHOLE_READS * _NBYTES / 1e9))
        if read.name != _MOONCAKE:
            read.part_s.append(statistics.median(self.ask("part", _PART_READS + 1)[1:]))


def measure_reads(present: Callable[[Sequence[str]], list[str]], rounds: int, sockets: Path, work: Path) -> list[Read]:
    """All rounds of all ways to read that are `present`."""
    with ExitStack() as stack:
        ways: dict[str, _Way] = {}

        def add(name: str, make: Callable[..., Reader], *arguments: Any, servers: Sequence[int] = (), env: Any = None) -> None:
            child = Child(name, serve_stream, make, *arguments, tuned=False, environment=env)
            stack.callback(child.close)
            child.answer()
            ways[name] = _Way(child, servers)

        for name, listen in ((_TCP, "127.0.0.1:0"), (_UNIX, f"unix:{sockets}/reads")):
            data = work / name.replace(", ", "-")
            server = Server(listen, data, "--transport", "grpc")
            stack.callback(server.close)
            sample_id, path, at = _store_sample(server.address, data)
            if name == _TCP:
                add(_COPY, FileReader, path, at)
                add(_PLACED, ClientReader, server.address, sample_id, data, servers=[server.pid])
            add(name, ClientReader, server.address, sample_id, servers=[server.pid])
        if present([_FLIGHT]):
            flight = Child("Flight server", serve_flight, tuned=True)
            stack.callback(flight.close)
            add(_FLIGHT, FlightReader, flight.answer(), path, at, servers=[flight.pid])
        if present([_MOONCAKE]):
            owner = mooncake.MooncakeReceiver()
            stack.callback(owner.close)
            add(_MOONCAKE, MooncakeReader, owner.address, path, at, servers=owner.pids, env=mooncake.ENVIRONMENT)
        return _rounds(ways, rounds)


def _rounds(ways: dict[str, _Way], rounds: int) -> list[Read]:
    if len({way.ask("first_bytes") for way in ways.values()}) != 1:
        raise RuntimeError("the ways to read do not read the same bytes")
    reads = {name: Read(name) for name in ways}
    for number in range(rounds):
        progress(f"reads, round {number + 1}/{rounds}:")
        for name, way in ways.items():
            way.measure(reads[name])
            progress(f"  {name} {reads[name].whole_gb_per_s[-1]:.2f}")
        progress("\n")
    return list(reads.values())


def _store_sample(address: str, data: Path) -> tuple[str, Path, int]:
    """Store the sample: its id, its file, and where its rows begin there."""
    senders = Senders("sample", SinkStream, address, "grpc", True, environment={})
    try:
        senders.prepare(Load(CHUNK_BYTES_MAX, 1, 1, _NBYTES // CHUNK_BYTES_MAX))
        senders.one("run")
    finally:
        senders.close()
    with connect(address) as client:
        sample_id = next(client.list()).sample_id
    path = next(data.rglob(f"{sample_id}.safetensors"))
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    return sample_id, path, 8 + header_bytes + header["hidden_states"]["data_offsets"][0]


def report_reads(reads: Sequence[Read]) -> str:
    """The table."""
    if not reads:
        return ""
    title = f"read {_TOKENS} tokens, {_NBYTES >> 20} MiB"
    lines = [
        "",
        "",
        f"{title:26}{'GB/s':>7}{'min':>7}{'max':>7}{'CPU s/GB':>10}{'whole ms':>10}{'64 tokens ms':>14}{'part':>7}",
    ]
    for read in reads:
        speeds = read.whole_gb_per_s
        whole = statistics.median(read.whole_s)
        part = f"{'-':>14}{'-':>7}"
        if read.part_s:
            seconds = statistics.median(read.part_s)
            part = f"{1e3 * seconds:>14.2f}{seconds / whole:>7.1%}"
        lines.append(
            f"{read.name:26}{statistics.median(speeds):>7.2f}{min(speeds):>7.2f}{max(speeds):>7.2f}"
            f"{statistics.median(read.cpu_s_per_gb):>10.2f}{1e3 * whole:>10.1f}{part}"
        )
    return "\n".join(lines)


def judge_reads(reads: Sequence[Read], verdict_of: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole samples against mmap and copy, and what a part takes of the whole."""
    found = {read.name: read for read in reads}
    verdicts = []
    for name in (_PLACED, _TCP, _UNIX):
        if name not in found:
            continue
        read = found[name]
        ratios = [copy / ours for copy, ours in zip(found[_COPY].whole_s, read.whole_s, strict=True)]
        verdicts.append(verdict_of(f"{name} / {_COPY}, whole samples", ratios, 0.7, at_least=True))
        parts = [part / whole for part, whole in zip(read.part_s, read.whole_s, strict=True)]
        verdicts.append(verdict_of(f"{name}: 64 tokens of {_TOKENS} / the whole", parts, 0.03, at_least=False))
    return verdicts
