"""A real worker half and a real server that is killed, stopped and started under it; and the account of what was promised.

As a program (`python -m support.outage_rig ADDRESS SPOOL_DIR SEED`): an engine that captures while nobody is there, fills
its spool, says what it promised, and waits to be killed. As `python -m support.outage_rig --in-process ADDRESS SIGNAL`: one
whose pump is a process, which says what it promised as soon as that process has it, and kills itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from slotstream.client import SampleState, connect
from slotstream.connector.faults import SampleFault
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.plan import SampleAbort, SampleFinish, SampleOpen, StepPlan
from slotstream.connector.sending.sinks import sinks_for
from slotstream.v1 import ingest_pb2
from slotstream.wire.names import PROTOCOL_VERSION
from support.server import ServerProcess
from support.waiting import WAIT_S, wait_until
from support.worker_rig import Rig, cached_rows, make_rig

SMALL: dict[str, Any] = {"staging_bytes": 1 << 20, "chunk_bytes": 64 << 10}  # 16 slots.


@dataclass
class Engine:
    """Requests one after another, each a sample. `promised`: sample id -> its rows, None if it was aborted."""

    rig: Rig
    rng: random.Random
    name: str
    promised: dict[str, bytes | None] = field(default_factory=dict)
    faults: dict[str, SampleFault] = field(default_factory=dict)

    @classmethod
    def start(cls, address: str, seed: int = 0, name: str = "e", **options: object) -> Engine:
        hello = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id=name)
        chosen: dict[str, Any] = {"ack_timeout_s": 30.0, "wait_s_max": 0.5, "server": address, **options}
        if chosen.get("sender") == "process":
            return cls(make_rig(seed, hello=hello, **chosen), random.Random(seed), name)
        chosen = {"transport": "grpc", **chosen, "server": address.split(",")}
        sinks = sinks_for(ConnectorOptions.from_extra(chosen), hello)
        return cls(make_rig(seed, sinks[0], more=sinks[1:], **chosen), random.Random(seed), name)

    @property
    def settled(self) -> bool:
        """Whether the server has answered for everything."""
        outbox = self.rig.worker._sender._outbox
        return not self.rig.worker._sender._inbox and outbox.is_empty and outbox.link_up

    def work(self, count: int) -> None:
        """So many requests: prompts in one step or in two, some with tokens of unknown number, some aborted half way."""
        for _ in range(count):
            self._request(f"{self.name}-{len(self.promised)}")

    def failed(self) -> dict[str, str]:
        """Sample id -> code, of those that the worker half has said failed."""
        self.faults |= {fault.req_id: fault for fault in self.rig.worker.take_faults()}
        return {sample_id: fault.code for sample_id, fault in self.faults.items()}

    def _request(self, sample_id: str) -> None:
        rig, tokens = self.rig, self.rng.randrange(2, 60)
        table, cut = rig.table(sample_id, tokens), self.rng.choice([tokens, self.rng.randrange(1, tokens)])
        rig.write(rig.slots(sample_id, 0, tokens))
        abort = self.rng.random() < 0.1
        exact = self.rng.random() < 0.7
        opened = SampleOpen(sample_id, "default", sample_id, 0, tokens if exact else tokens + 100, exact, {"made": "up"})
        finish = SampleFinish(sample_id, tuple(range(tokens)))
        whole = cut == tokens and not abort
        first = cached_rows(sample_id, 0, cut, 0, table)
        rig.step(StepPlan((opened,), (first,), (finish,) if whole else ()), rig.slots(sample_id, 0, cut))
        if abort:
            rig.step(StepPlan(aborts=(SampleAbort(sample_id, "ABORTED", "it was hung up"),)), None)
        elif not whole:
            rest = cached_rows(sample_id, cut, tokens, cut, table)
            rig.step(StepPlan((), (rest,), (finish,)), rig.slots(sample_id, cut, tokens))
        self.promised[sample_id] = None if abort else rig.rows(sample_id, 0, tokens)
        rig.free(sample_id)

    def stats(self) -> dict[str, float]:
        return self.rig.worker.take_stats()

    def close(self) -> None:
        self.rig.worker.close()


def account(address: str, promised: dict[str, bytes | None]) -> dict[str, str]:
    """Sample id -> why it failed, of those that did. Every promised one is on the server: its rows, or why there are none."""
    failed = {}
    with connect(address) as client:
        for sample_id, rows in promised.items():
            info = client.stat(sample_id)
            if info.state is SampleState.FAILED:
                assert info.error_code, sample_id
                assert info.error_message, sample_id
                failed[sample_id] = info.error_code
                continue
            assert info.state is SampleState.COMMITTED, (sample_id, info)
            assert rows is not None, f"{sample_id} was aborted, and is stored"
            stored = client.get(sample_id)
            assert stored.hidden_states.contiguous().view(torch.uint8).numpy().tobytes() == rows, sample_id
    return failed


def assert_only_aborted(failed: dict[str, str], promised: dict[str, bytes | None], *, cut: bool = False) -> None:
    """No sample failed but those that were aborted.

    `cut`: ways were cut. The abort of a sample may then reach the server by another way, before the server hears of the cut:
    that has the last word, and the sample says INTERRUPTED.
    """
    assert not {sample_id: code for sample_id, code in failed.items() if promised[sample_id] is not None}
    assert set(failed.values()) <= ({"ABORTED", "INTERRUPTED"} if cut else {"ABORTED"})


class Restarting:
    """A server that comes and goes on one address and one data directory."""

    def __init__(self, data_dir: Path, *options: str, running: bool = True, address: str | None = None) -> None:
        self._sockets = tempfile.TemporaryDirectory(prefix="slotstream-")
        self.address = address or f"unix:{self._sockets.name}/s"
        self._data_dir = data_dir
        self.options = options
        self.environment: dict[str, str] = {}
        self.process: ServerProcess | None = None
        if running:
            self.start()

    def start(self) -> None:
        self.process = ServerProcess(
            self._data_dir, *self.options, address=self.address, transport="auto", environment=self.environment
        )

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.process.send_signal(number)

    def stop(self, number: int = signal.SIGKILL) -> None:
        process, self.process = self.process, None
        if process is not None:
            with process:
                process.process.send_signal(signal.SIGCONT)
                process.stop(number)

    def descriptors(self) -> int:
        """Files that the server has open."""
        assert self.process is not None
        return len(list(Path(f"/proc/{self.process.process.pid}/fd").iterdir()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self._sockets.cleanup()


def own_threads() -> int:
    return threading.active_count()


def own_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def begin_half(engine: Engine) -> None:
    """A sample that has half of its rows, and gets no more."""
    rig = engine.rig
    table = rig.table("half", 40)
    rig.write(rig.slots("half", 0, 20))
    opened = SampleOpen("half", "default", f"{engine.name}-half", 0, 40, True)
    rig.step(StepPlan((opened,), (cached_rows("half", 0, 20, 0, table),)), rig.slots("half", 0, 20))
    engine.promised[f"{engine.name}-half"] = None


def half_is_arriving(engine: Engine, address: str) -> bool:
    """Whether the server has that sample open, and nothing else of this engine."""
    with connect(address) as client:
        arriving = [info.sample_id for info in client.list(state="arriving")]
    return arriving == [f"{engine.name}-half"] and not engine.rig.worker._sender._inbox


def finish_half(engine: Engine) -> None:
    """The sample of `begin_half` gets its other half, and is whole."""
    rig, table = engine.rig, engine.rig.tables["half"]
    rig.write(rig.slots("half", 20, 40))
    rest = cached_rows("half", 20, 40, 20, table)
    rig.step(StepPlan((), (rest,), (SampleFinish("half", tuple(range(40))),)), rig.slots("half", 20, 40))
    engine.promised[f"{engine.name}-half"] = rig.rows("half", 0, 40)


def _main(address: str, spool_dir: str, seed: int) -> None:
    engine = Engine.start(address, seed, f"killed{seed}", spool_dir=spool_dir, wait_s_max=WAIT_S, **SMALL)
    engine.work(40)
    begin_half(engine)
    pump = engine.rig.worker._sender
    wait_until(
        lambda: not pump._inbox and not pump._spool_writer.writing and all(_is_spooled(s) for s in _held(engine)), "spooling"
    )
    promised = {sample_id: None if rows is None else rows.hex() for sample_id, rows in engine.promised.items()}
    print(json.dumps(promised), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)  # Until it is killed.


def _held(engine: Engine) -> list[object]:
    return list(engine.rig.worker._sender._outbox._held.values())


def _is_spooled(sample: object) -> bool:
    return not sample.unspooled and (sample.commit is None or sample.commit_spooled)  # type: ignore[attr-defined]


def _die_at_once(address: str, number: int) -> None:
    engine = Engine.start(address, 0, "dead", sender="process")
    engine.work(60)
    begin_half(engine)
    sender = engine.rig.worker._sender
    wait_until(lambda: sender._inbox.empty() and not sender._owed and sender.gauges()["link_up"] > 0)
    promised = {sample_id: None if rows is None else rows.hex() for sample_id, rows in engine.promised.items()}
    print(json.dumps({"pid": sender._child.process.pid, "promised": promised}), flush=True)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    if sys.argv[1] == "--in-process":
        _die_at_once(sys.argv[2], int(sys.argv[3]))
    else:
        _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
