"""What sending costs vLLM's worker process: its CPU beside the engine's own thread, and how much slower that one gets.

    python benchmarks/worker.py

No vLLM: a thread carries out a step's plan with the connector's worker half, then is busy in Python and in small tensor
operations for as long as a small model's step keeps vLLM's, over and over. Rows are short, so that what is measured is the work
that a chunk takes, and not its bytes. benchmarks/README.md says what each row means.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from children import Child, ChildFailed, questions
from contenders import Server
from machine import machine, plain, progress

from slotstream.client import connect
from slotstream.connector.counters import Counters
from slotstream.connector.faults import SampleFault
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.plan import BlockPlace, RowPlan, SampleFinish, SampleOpen, StepPlan
from slotstream.connector.reading.row_source import CachedRows
from slotstream.connector.reading.staging_plan import StagingPlan
from slotstream.connector.reading.worker import WorkerHalf
from slotstream.connector.sending.inbox import RowBatch
from slotstream.connector.sending.process.handle import sender_for
from slotstream.connector.sending.sender import EnginePost, Sender
from slotstream.connector.sending.staging_area import HostMemory
from slotstream.connector.sending.staging_pool import StagingShape
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.v1 import ingest_pb2
from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import SlotStreamError
from slotstream.wire.names import DEFAULT_ADDRESS, PROTOCOL_VERSION
from slotstream.wire.nixl import is_installed

LAYERS, HIDDEN, BLOCK = 4, 128, 16
ROW_BYTES = LAYERS * HIDDEN * 2
_SENDERS = ("thread", "process")
_TRANSPORTS = ("grpc", "nixl") if is_installed() else ("grpc",)
_LINK_S = 30.0


class _Nowhere:
    """A `Sender` that drops what it gets: the rows are read into staging, and that is all."""

    server = None
    has_faults = looks = False

    def __init__(self, slots: int) -> None:
        self._free = deque(range(slots))

    def start(self) -> None:
        return

    def post(self, item: EnginePost) -> None:
        if isinstance(item, RowBatch):
            self.release(item.slots)

    def hand_over(self) -> None:
        return

    def look(self) -> None:
        return

    def lease(self, count: int, deadline: float) -> list[int]:
        return [self._free.popleft() for _ in range(count)]

    def release(self, slots: list[int]) -> None:
        self._free.extend(slots)

    def why_full(self) -> SlotStreamError:
        raise AssertionError("there is always room")

    def take_faults(self) -> list[SampleFault]:
        return []

    def gauges(self) -> Mapping[str, float]:
        return {}

    def close(self, timeout_s: float) -> None:
        return


def _nowhere(memory: HostMemory, shape: StagingShape, counters: Counters) -> Sender:
    return _Nowhere(shape.num_slots)


class Engine:
    """Steps of `samples` prompts of `rows` tokens each, with `work` units of other work in each step. See `main`."""

    def __init__(self, options: argparse.Namespace, address: str | None, transport: str, sender: str) -> None:
        torch.set_num_threads(1)  # Its helpers would count as CPU beside the engine's thread.
        self._samples, self._rows = options.samples, options.rows
        self._address = address
        self._numbers = itertools.count()
        self._counts: dict[str, float] = {}
        self._scratch = torch.zeros(16)
        blocks = -(-self._rows // BLOCK)
        self._tables = [tuple(range(i * blocks, (i + 1) * blocks)) for i in range(self._samples)]
        self._mapping = torch.cat(
            [torch.arange(i * blocks * BLOCK, i * blocks * BLOCK + self._rows) for i in range(self._samples)]
        )
        chosen = ConnectorOptions(
            server=address or DEFAULT_ADDRESS,
            transport=transport,
            sender=sender,
            chunk_bytes=self._rows * ROW_BYTES // options.chunks,
        )
        config = ConnectorConfig(
            chosen, "benchmark", "benchmark", tuple(range(LAYERS)), RowFormat.of("BF16", LAYERS, HIDDEN), {}
        )
        hello = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="benchmark")
        make = _nowhere if address is None else sender_for(config, hello)
        cache = torch.randn(self._samples * blocks, LAYERS, BLOCK, HIDDEN).to(torch.bfloat16)
        source = CachedRows(cache, config.row_kind, HIDDEN)
        self._worker = WorkerHalf(config, source, make, StagingPlan.of(config, self._samples * self._rows))
        if address is not None:
            self._committed(self._step(), time.monotonic() + _LINK_S)

    def run(self, steps: int, work: int) -> dict[str, float]:
        """Seconds a step, of the engine's thread's CPU, and of the CPU beside it, until everything is durable."""
        cpu, own, began = time.process_time(), time.thread_time(), time.perf_counter()
        ids = []
        for _ in range(steps):
            ids += self._step()
            self._be_busy(work)
        wall = time.perf_counter() - began
        own_used = time.thread_time() - own
        if self._address is not None:
            self._committed(ids, time.monotonic() + _LINK_S + steps)
        beside = time.process_time() - cpu - (time.thread_time() - own)
        return {"wall": wall / steps, "own": own_used / steps, "beside": beside / steps}

    def _step(self) -> list[str]:
        ids = [f"s{next(self._numbers)}" for _ in range(self._samples)]
        tokens = tuple(range(self._rows))
        plan = StepPlan(
            tuple(SampleOpen(i, "default", i, 0, self._rows, True) for i in ids),
            tuple(RowPlan(i, 0, self._rows, 0, BlockPlace(table, 0)) for i, table in zip(ids, self._tables, strict=True)),
            tuple(SampleFinish(i, tokens) for i in ids),
        )
        self._worker.bind(plan)
        self._worker.remember_slot_mapping(self._mapping)
        self._worker.execute()
        self._look()
        return ids

    def _look(self) -> None:
        """What vLLM asks in each step."""
        if faults := self._worker.take_faults():
            raise RuntimeError(f"a sample failed: {faults[0]}")
        for name, value in self._worker.take_stats().items():
            self._counts[name] = self._counts.get(name, 0) + value

    def _be_busy(self, units: int) -> None:
        for _ in range(units):
            for _ in range(40):
                self._scratch.add_(1.0)
            sum(range(400))

    def _committed(self, ids: list[str], deadline: float) -> None:
        """Returns once these samples are durable, and gone again."""
        assert self._address is not None
        wanted = int(ids[-1][1:]) + 1
        while self._counts.get("samples_committed", 0) < wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{wanted} samples were not durable in time: {self._counts}")
            time.sleep(0.01)
            self._look()
        with connect(self._address) as client:
            for sample_id in ids:
                client.delete(sample_id)


def _engine(connection: Connection, *arguments: Any) -> None:
    engine = Engine(*arguments)
    connection.send(None)
    for steps, work in questions(connection):
        connection.send(engine.run(steps, work))


def calibrate(engine: Child, work_ms: float) -> int:
    """Units of work that take the engine's thread so long while it has nothing else to do."""
    engine.ask(20, 100)
    unit_s: float = (engine.ask(50, 100)["own"] - engine.ask(50, 0)["own"]) / 100
    return max(1, round(work_ms / 1e3 / unit_s))


def report(rounds: dict[str, list[dict[str, float]]]) -> str:
    """The table: medians, and the ratio to nothing sent with its range."""
    lines = [f"{'':24}{'steps/s':>9}{'to nothing':>12}{'':17}{'engine thread, CPU ms':>23}{'beside it':>11}"]
    for name, figures in rounds.items():
        ratios = [nothing["wall"] / one["wall"] for nothing, one in zip(rounds["nothing sent"], figures, strict=True)]

        def median(what: str, figures: list[dict[str, float]] = figures) -> float:
            return statistics.median(one[what] for one in figures)

        span = "" if name == "nothing sent" else f"({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(
            f"{name:24}{1 / median('wall'):>9.1f}{statistics.median(ratios):>12.2f} {span:16}"
            f"{median('own') * 1e3:>23.1f}{median('beside') * 1e3:>11.1f}"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--samples", type=int, default=8, metavar="N", help="samples that end in a step (default: %(default)s)")
    add("--rows", type=int, default=1024, metavar="N", help="rows of a sample, of 1 KiB each (default: %(default)s)")
    add("--chunks", type=int, default=8, metavar="N", help="chunks of a sample (default: %(default)s)")
    add("--work-ms", type=float, default=13.0, metavar="N", help="other work of the engine's thread (default: %(default)s)")
    add("--senders", nargs="+", choices=_SENDERS, default=_SENDERS, help="where the sender runs (default: each)")
    add("--steps", type=int, default=150, metavar="N", help="steps of each run (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="interleaved rounds to take medians of (default: %(default)s)")
    add("--work-dir", type=Path, default=Path("/dev/shm"), metavar="DIR", help="put the data here (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    if min(options.samples, options.chunks, options.steps, options.rounds) < 1 or options.rows // options.chunks < 4:
        parser.error("all numbers must be at least 1, and a chunk must have 4 rows")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    host = machine()
    print(
        f"{datetime.now(UTC):%Y-%m-%d}: {host['cpus']} CPUs ({host['cpu']}); {options.samples} samples of {options.rows} rows "
        f"in {options.chunks} chunks a step, {options.work_ms:g} ms of other work; medians of {options.rounds} rounds",
        flush=True,
    )
    rounds: dict[str, list[dict[str, float]]] = {}
    try:
        with ExitStack() as stack:
            work_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="slotstream-bench-", dir=options.work_dir))
            engines: dict[str, tuple[str | None, str, str]] = {"nothing sent": (None, "grpc", "thread")}
            for transport, sender in itertools.product(_TRANSPORTS, options.senders):
                name = f"{'gRPC' if transport == 'grpc' else 'NIXL'}, a {sender}"
                server = stack.enter_context(closing(Server("127.0.0.1:0", Path(work_dir, name))))
                engines[name] = (server.address, transport, sender)
            children = {
                name: stack.enter_context(Child(name, _engine, options, *rest, tuned=False)) for name, rest in engines.items()
            }
            for child in children.values():
                child.answer()
            units = calibrate(children["nothing sent"], options.work_ms)
            for number in range(options.rounds):
                progress(f"round {number + 1}/{options.rounds}:")
                for name, child in children.items():
                    child.ask(max(1, options.steps // 5), units)
                    rounds.setdefault(name, []).append(child.ask(options.steps, units))
                    progress(f"  {name} {1 / rounds[name][-1]['wall']:.1f}")
                progress("\n")
    except ChildFailed as error:
        print(f"worker benchmark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(report(rounds))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": host, "options": plain(options), "rounds": rounds}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
