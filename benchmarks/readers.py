"""What a trainer's reads cost beside reading the same files with safetensors, in one run: samples of 0.4 MB and of 64 MB.

`python benchmarks/readers.py --json readers.json`: about three minutes. benchmarks/README.md has what it showed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # It runs without being installed.

import torch
from safetensors.torch import load_file
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.client import connect, rows
from slotstream.client.dataset import SampleDataset
from slotstream.demo.processes import free_port

FILES = "safetensors"
_SPACE = "bench"


@dataclass(frozen=True)
class _Size:
    name: str
    count: int
    tokens: int
    hidden: int

    @property
    def nbytes(self) -> int:
        return self.count * self.tokens * self.hidden * 2


SIZES = (_Size("0.4 MB", 600, 100, 2048), _Size("64 MB", 12, 4096, 8192))


class _Random(SyntheticSample):
    """Rows of chance: what they are does not matter, and making them must not take longer than reading them."""

    def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
        return os.urandom(self.row_bytes) * ((self.num_tokens if stop is None else stop) - start)


@contextmanager
def _stored(size: _Size, work: Path | None) -> Iterator[ServerProcess]:
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(dir=work) as directory, ServerProcess(Path(directory), address=address) as server:
        with IngestClient(server.address, timeout_s=600) as ingest:
            for number in range(size.count):
                sample = _Random(
                    f"s{number:05}", namespace=_SPACE, num_tokens=size.tokens, layer_ids=(1,), hidden_size=size.hidden
                )
                ingest.store(sample, rows_per_chunk=max(1, (2 << 20) // sample.row_bytes))
        yield server


def _ways(server: ServerProcess, size: _Size) -> dict[str, Callable[[], int]]:
    """Each reads every sample once; how many rows it got."""
    files = sorted(server.data_dir.glob(f"{_SPACE}/*/*.safetensors"))
    many_rows = size.tokens * max(1, (8 << 20) // (size.tokens * size.hidden * 2))

    def from_files() -> int:
        return sum(len(load_file(path)["hidden_states"].clone()) for path in files)  # In memory of its own, as ours are.

    def many(in_place: bool) -> int:
        with connect(server.address, data_dir=server.data_dir if in_place else None) as client:
            answers = client.get_many(namespace=_SPACE)
            return sum(len(answer.sample.token_ids) for answer in answers if answer.sample is not None)

    def one_by_one(in_place: bool) -> int:
        with connect(server.address, data_dir=server.data_dir if in_place else None) as client:
            return sum(len(client.get(info.sample_id, namespace=_SPACE).token_ids) for info in client.list(namespace=_SPACE))

    def dataset(in_place: bool) -> int:
        with connect(server.address, data_dir=server.data_dir if in_place else None) as client:
            return sum(len(sample.token_ids) for sample in SampleDataset(client, namespace=_SPACE, shuffle=True))

    def stream(in_place: bool) -> int:
        with connect(server.address, data_dir=server.data_dir if in_place else None) as client:
            return sum(len(batch) for batch in rows(1, many_rows, client=client, namespace=_SPACE, buffer_rows=4 * many_rows))

    ours = {"get_many": many, "get": one_by_one, "SampleDataset": dataset, "rows": stream}
    ways: dict[str, Callable[[], int]] = {FILES: from_files}
    for name, read in ours.items():
        ways[f"{name}, in place"] = lambda read=read: read(True)  # type: ignore[misc]
        ways[f"{name}, sent"] = lambda read=read: read(False)  # type: ignore[misc]
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way; the median counts (default: %(default)s)")
    parser.add_argument("--only", metavar="SIZE", help="one of the sizes (default: both)")
    parser.add_argument("--samples", metavar="N", type=int, help="of each size (default: 600 and 12)")
    parser.add_argument("--work-dir", metavar="DIR", type=Path, help="where the samples are stored (default: a temporary one)")
    arguments = parser.parse_args()
    sizes = [size for size in SIZES if arguments.only in (None, size.name)]
    if arguments.samples:
        sizes = [replace(size, count=arguments.samples) for size in sizes]
    torch.set_num_threads(1)
    figures: dict[str, dict[str, float]] = {}
    for size in sizes:
        with _stored(size, arguments.work_dir) as server:
            ways = _ways(server, size)
            took: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(arguments.rounds + 1):
                for name, read in ways.items():
                    begun = time.perf_counter()
                    got = read()
                    if turn:  # The first one pays for what the others find: pages of the cache, modules, connections.
                        took[name].append(time.perf_counter() - begun)
                    assert got == size.count * size.tokens, f"{name} read {got} rows"
        middle = {name: statistics.median(seconds) for name, seconds in took.items()}
        figures[size.name] = {name: middle[FILES] / seconds for name, seconds in middle.items()}
        print(f"samples of {size.name}, {size.nbytes / 1e9:.2f} GB")
        for name, seconds in middle.items():
            print(f"  {name:24}{size.nbytes / 1e9 / seconds:6.2f} GB/s   {middle[FILES] / seconds:5.2f} of {FILES}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
