"""What looking costs: lists and look-ups in a full store beside a small one, and ingest while people open the page.

    python benchmarks/looking.py [--json FILE]

Two stores, of 10^3 and 10^5 samples, are asked in turns: what `ls` lists, the page's own list, and `stat` by the id that vLLM
answered a request with. Then 50 visitors each open a sample of 0.4 MB in `slotstream web` every 10 seconds, while a sender
stores as fast as it can. Runs with and without visitors take turns. About five minutes. benchmarks/README.md has figures.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import cycle, pairwise
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # It runs without being installed.

import numpy as np
from children import ChildFailed, tree_cpu_seconds
from contenders import Server
from load import Load, Senders
from machine import file_system, machine, plain, progress
from scale_catalogue import fill
from support.ingest_client import IngestClient
from support.synthetic import SyntheticSample
from support.web import Visitor, WebProcess
from transport_ours import SinkStream

from slotstream.cli.samples import known_as
from slotstream.client import connect
from slotstream.wire.names import DEFAULT_NAMESPACE

_RATIO_MAX, _INGEST_MIN = 1.5, 0.9  # The targets.
_LISTED, _PAGE = 101, 50  # Samples that `ls` asks for, to know whether there are more than 100, and those of the page's list.
_LAYERS, _HIDDEN, _TOKENS = (2, 18, 33, 37), 512, 100  # 0.4 MB in bf16.
_SAMPLES = 64  # That visitors choose from.
_STATIC = ("/static/style.css", "/static/page.js")  # What a browser fetches with each page: it keeps nothing of this site.
_CHUNK_BYTES, _CHUNKS, _AT_ONCE = 2 << 20, 6, 32  # What is stored meanwhile: samples of 12 MiB, so many a run.


class _Noise(SyntheticSample):
    """Normal noise in bf16, the upper halves of float32. Random bits would be bad rows, which the page draws one by one."""

    def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
        shape = (self.num_tokens, len(self.layer_ids) * self.hidden_size)
        noise = np.random.default_rng(self.seed).standard_normal(shape).astype(np.float32)
        return (noise[start:stop].view(np.uint32) >> 16).astype(np.uint16).tobytes()


class _Opening(Visitor):
    """A visitor whose browser fetches a page and its files over one connection."""

    def open(self, path: str) -> None:
        at = urllib.parse.urlsplit(self.url)
        cookies = {"Cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        with contextlib.closing(http.client.HTTPConnection(at.netloc, timeout=60)) as connection:
            for one in (path, *_STATIC):
                connection.request("GET", one, headers=cookies)
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    raise ChildFailed(f"{one} was answered with {answer.status}")


def caller_id(number: int) -> str:
    """What vLLM answers a request with, spread as vLLM's own ids are."""
    return f"cmpl-{random.Random(number).getrandbits(128):032x}"


def _sample_id(number: int) -> str:
    """The sample of that request."""
    return f"{caller_id(number)}-0-{number:08x}"


# Lists and look-ups.


class _Store:
    """A server with so many samples at rest, its page, and what one look of each kind is."""

    def __init__(self, count: int, work: Path, stack: ExitStack) -> None:
        progress(f"a store of {count} samples\n")
        self.count = count
        data = work / f"store-{count}"
        fill(data, count, _sample_id)
        server = Server("127.0.0.1:0", data, "--transport", "grpc")
        stack.callback(server.close)
        page = stack.enter_context(WebProcess(server.address, "--allow-anonymous"))
        self._visitor = Visitor(page.url)
        self._visitor.post("/login", {"token": ""})
        self._client = stack.enter_context(connect(server.address))

    def looks(self) -> dict[str, Callable[[int], object]]:
        return {"ls": self._first_page, "the page's list": self._overview, "look-up by the caller's id": self._look_up}

    def _first_page(self, number: int) -> None:
        _expect(len(list(self._client.list(limit=_LISTED))), min(_LISTED, self.count))

    def _overview(self, number: int) -> None:
        answer = self._visitor.get("/")
        _expect(answer.body.count('href="/samples/default/'), _PAGE)

    def _look_up(self, number: int) -> None:
        wanted = number % self.count
        found = known_as(self._client, caller_id(wanted), DEFAULT_NAMESPACE)
        _expect([info.sample_id for info in found], [_sample_id(wanted)])


def _expect(found: object, expected: object) -> None:
    if found != expected:
        raise RuntimeError(f"a look found {found}, not {expected}")


def measure_looks(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Median milliseconds of each kind of look, in turns, by samples at rest."""
    with ExitStack() as stack:
        stores = [_Store(count, work, stack) for count in options.samples]
        taken: dict[str, list[list[float]]] = {name: [[] for _ in stores] for name in stores[0].looks()}
        numbers = random.Random(0).sample(range(max(options.samples)), options.looks + 1)
        for turn, number in enumerate(numbers):
            for name, times in taken.items():
                for store, seconds in zip(stores, times, strict=True):
                    began = perf_counter()
                    store.looks()[name](number)
                    if turn:  # The first one opens connections.
                        seconds.append(perf_counter() - began)
    rows = []
    for name, times in taken.items():
        medians = [1e3 * statistics.median(seconds) for seconds in times]
        ratio = medians[-1] / medians[0]
        of_stores = {f"{count} samples, ms": ms for count, ms in zip(options.samples, medians, strict=True)}
        rows.append({"look": name, **of_stores, "ratio": ratio, "met": ratio <= _RATIO_MAX})
    return rows


# Visitors beside ingest.


class _Visitors:
    """They open a sample's page every so often, each at a moment of its own, while `opening()`."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        chance = random.Random(0)
        self._visitors = [_Opening(url) for _ in range(options.visitors)]
        for visitor in self._visitors:
            visitor.post("/login", {"token": ""})
        offsets = sorted(chance.random() * options.every_s for _ in self._visitors)
        gaps = [after - before for before, after in pairwise([*offsets, offsets[0] + options.every_s])]
        self._turns = cycle(zip(self._visitors, gaps, strict=True))
        self._chance = chance

    @contextmanager
    def opening(self) -> Iterator[list[float]]:
        """Seconds of each page that was opened, once this ends. Raises ChildFailed where one was not shown."""
        done, opened, seconds = threading.Event(), list[Future[float]](), list[float]()

        def take_turns() -> None:
            due = monotonic()
            for visitor, gap in self._turns:
                opened.append(pool.submit(_timed, visitor, f"/samples/default/seen-{self._chance.randrange(_SAMPLES)}"))
                due += gap
                if done.wait(max(0.0, due - monotonic())):
                    return

        with ThreadPoolExecutor(len(self._visitors)) as pool:
            turns = threading.Thread(target=take_turns)
            turns.start()
            try:
                yield seconds
            finally:
                done.set()
                turns.join()
        try:
            seconds += [one.result() for one in opened]
        except OSError as error:
            raise ChildFailed(f"a visitor got no page: {error}") from error


def _timed(visitor: _Opening, path: str) -> float:
    began = perf_counter()
    visitor.open(path)
    return perf_counter() - began


def measure_visits(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """GB/s that are stored with visitors and without, in turns; the ratio of each round."""
    progress(f"{options.visitors} visitors\n")
    load = Load(_CHUNK_BYTES, 1, _AT_ONCE, _CHUNKS)
    server = Server("127.0.0.1:0", work / "data", "--transport", "grpc")
    senders = Senders("beside visitors", SinkStream, server.address, "grpc", True, environment={})

    def stored_gb_per_s() -> float:
        ends, nbytes, seconds = monotonic() + options.run_s, 0, 0.0
        while monotonic() < ends:
            seconds += senders.all("run")[0]
            nbytes += load.total_bytes
            senders.all("clear")
        return nbytes / 1e9 / seconds

    try:
        with IngestClient(server.address) as ingest:
            one = _Noise("seen", layer_ids=_LAYERS, hidden_size=_HIDDEN, num_tokens=_TOKENS)
            ingest.store(*(replace(one, sample_id=f"seen-{number}", seed=number) for number in range(_SAMPLES)))
        senders.prepare(load)
        senders.all("run")
        senders.all("clear")
        rounds = []
        with WebProcess(server.address, "--allow-anonymous") as page:
            visitors = _Visitors(page.url, options)
            for turn in range(options.rounds):
                found, pages = dict[str, float](), dict[str, float]()
                for visited in (False, True) if turn % 2 else (True, False):
                    if not visited:
                        found["alone GB/s"] = stored_gb_per_s()
                        continue
                    used_s = tree_cpu_seconds(page.process.pid)
                    with visitors.opening() as seconds:
                        found["visited GB/s"] = stored_gb_per_s()
                    used_s = tree_cpu_seconds(page.process.pid) - used_s
                    pages = {"pages": len(seconds), "page ms": 1e3 * statistics.median(seconds)}
                    pages["page's process, CPU ms a page"] = 1e3 * used_s / len(seconds)
                rounds.append(found | pages)
    finally:
        senders.close()
        server.close()
    ratios = [one["visited GB/s"] / one["alone GB/s"] for one in rounds]
    ratio = statistics.median(ratios)
    return {"rounds": rounds, "ratios": ratios, "ratio": ratio, "met": ratio >= _INGEST_MIN}


# The rest.


def report(looks: Sequence[dict[str, Any]], visits: dict[str, Any] | None, options: argparse.Namespace) -> str:
    lines = []
    for row in looks:
        costs = ", ".join(f"{value:.2f} ms with {key.split()[0]}" for key, value in row.items() if key.endswith(", ms"))
        lines.append(f"{row['look']}: {costs}: {row['ratio']:.2f} times (at most {_RATIO_MAX}: {_met(row)})")
    if visits is not None:
        low, _, high = statistics.quantiles(visits["ratios"], n=4)
        page_ms, cpu_ms, alone = (
            statistics.median(one[key] for one in visits["rounds"])
            for key in ("page ms", "page's process, CPU ms a page", "alone GB/s")
        )
        lines.append(
            f"ingest beside {options.visitors} visitors, one page each {options.every_s:g} s: "
            f"{page_ms:.0f} ms a page, {cpu_ms:.1f} CPU ms of the page's process; "
            f"{visits['ratio']:.3f} of ingest alone, {alone:.2f} GB/s "
            f"(half of the rounds {low:.2f} to {high:.2f}; at least {_INGEST_MIN}: {_met(visits)})"
        )
    return "\n".join(lines)


def _met(row: dict[str, Any]) -> str:
    return "met" if row["met"] else "MISSED"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", type=lambda text: text.split(","), default=["looks", "visits"], metavar="NAMES", help="of looks, visits")
    add("--samples", type=_numbers, default=[10**3, 10**5], metavar="N", help="at rest (default: 10^3 and 10^5)")
    add("--looks", type=int, default=200, metavar="N", help="of each kind (default: %(default)s)")
    add("--visitors", type=int, default=50, metavar="N", help="(default: %(default)s)")
    add("--every-s", type=float, default=10.0, metavar="N", help="seconds between two pages of one (default: %(default)s)")
    add("--run-s", type=float, default=5.0, metavar="N", help="seconds of storing in each run (default: %(default)s)")
    add("--rounds", type=int, default=20, metavar="N", help="with visitors and without (default: %(default)s)")
    add("--work-dir", type=Path, default=Path(), metavar="DIR", help="put temporary data directories here (default: .)")
    add("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - {"looks", "visits"}:
        parser.error(f"--parts: unknown {sorted(unknown)}")
    if min(options.looks, options.visitors, options.every_s, options.run_s) <= 0:
        parser.error("--looks, --visitors, --every-s and --run-s must be more than 0")
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    if min(options.samples) < options.looks or min(options.samples) < _PAGE:
        parser.error(f"--samples must be at least --looks, and {_PAGE}")
    return options


def _numbers(text: str) -> list[int]:
    return [int(float(part)) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    host = machine()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As Ctrl-C: no process and no data directory stays behind.
    with tempfile.TemporaryDirectory(prefix="slotstream-bench-", dir=options.work_dir.absolute()) as work:
        Path(work, ".gitignore").write_text("*\n")  # It may lie in a checkout while this runs.
        disk, date = file_system(Path(work)), f"{datetime.now(UTC):%Y-%m-%d}"
        print(f"{date}: {host['cpus']} CPUs ({host['cpu']}), {host['memory_gib']} GiB, {disk}", flush=True)
        try:
            looks = measure_looks(options, Path(work)) if "looks" in options.parts else []
            visits = measure_visits(options, Path(work)) if "visits" in options.parts else None
        except ChildFailed as error:
            print(f"looking benchmark: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    print(report(looks, visits, options))
    if options.json is not None:
        said = {
            "benchmark": "looking",
            "date": date,
            "machine": {**host, "file_system": disk},
            "options": plain(options),
            "looks": looks,
            "visits": visits,
        }
        options.json.write_text(json.dumps(said, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
