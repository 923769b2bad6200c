"""A pump in a process of its own: the same rows arrive, and neither side's death or silence harms the other."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.files import files_below
from support.late_copies import put_off
from support.outage_rig import SMALL, Engine, Restarting, account, own_descriptors, own_threads
from support.waiting import WAIT_S, wait_until
from support.worker_rig import ROW_BYTES, cached_rows, opened

from slotstream.client import SampleState, connect
from slotstream.connector.counters import SENDER_GAUGES, Counters
from slotstream.connector.plan import SampleFinish, StepPlan
from slotstream.connector.sending.process import handle
from slotstream.connector.sending.process.main import _News
from slotstream.connector.sending.process.messages import Want, hear
from slotstream.wire import nixl
from slotstream.wire.errors import ConfigError

TRANSPORTS = ["grpc", pytest.param("nixl", marks=pytest.mark.skipif(not nixl.is_installed(), reason="NIXL is not installed"))]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restarting]:
    with Restarting(tmp_path / "data") as running:
        yield running


class _Engine:
    """An engine whose pump is a process, and what it counted."""

    def __init__(self, address: str, seed: int = 0, name: str = "e", **options: Any) -> None:
        self.engine = Engine.start(address, seed, name, sender="process", **options)
        self.rig = self.engine.rig
        self.counts: Counter[str] = Counter()
        self.wait_for_link()

    @property
    def promised(self) -> dict[str, bytes | None]:
        return self.engine.promised

    @property
    def pid(self) -> int:
        """The sender process's, once there is one."""
        wait_until(lambda: self.rig.worker._sender._child is not None, "a sender process")
        pid: int = self.rig.worker._sender._child.process.pid
        return pid

    @property
    def ended(self) -> int:
        """Samples that are durable or failed, as the counters have it."""
        self.counts.update({key: int(value) for key, value in self.engine.stats().items()})
        return sum(n for key, n in self.counts.items() if key.startswith(("samples_committed", "samples_failed")))

    def wait_for_link(self) -> None:
        """Returns once the sender process reaches the server."""
        wait_until(lambda: self.rig.worker._sender.gauges()["link_up"] > 0, "a link")

    def settle(self) -> None:
        """Returns once nothing is under way."""
        sender = self.rig.worker._sender
        wait_until(lambda: sender._inbox.empty() and not (sender._owed or sender._open), "an end of everything")

    def close(self) -> None:
        self.engine.close()


def _account(address: str, promised: dict[str, bytes | None]) -> dict[str, str]:
    """See `account`; once the server has heard of every sample: a new process first has to connect."""

    def all_there() -> bool:
        with connect(address) as client:
            there = {info.sample_id: info.state for info in client.list()}
        return promised.keys() <= there.keys() and SampleState.ARRIVING not in there.values()

    wait_until(all_there, "a word on every sample")
    return account(address, promised)


@pytest.fixture
def start(server: Restarting) -> Iterator[Callable[..., _Engine]]:
    """Starts an engine towards `server`; closed in the end."""
    running: list[_Engine] = []

    def start(**options: Any) -> _Engine:
        running.append(_Engine(server.address, **options))
        return running[-1]

    yield start
    for engine in running:
        engine.close()


def _is_there(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_row_arrives_and_everything_is_given_back(
    start: Callable[..., _Engine], server: Restarting, transport: str
) -> None:
    threads, descriptors = own_threads(), own_descriptors()
    engine = start(seed=1, transport=transport, wait_s_max=WAIT_S, **SMALL)
    pid = engine.pid
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    engine.engine.work(150)
    wait_until(lambda: engine.ended == 150)
    failed = _account(server.address, engine.promised)
    assert failed == {sample_id: "ABORTED" for sample_id, rows in engine.promised.items() if rows is None}
    assert engine.engine.failed() == failed
    assert engine.counts["rows"] * ROW_BYTES == engine.counts["bytes"]
    sender = engine.rig.worker._sender
    gauges = ("samples_in_flight", "staging_bytes_in_use", "staging_bytes_kept")
    wait_until(lambda: not any(sender.gauges()[name] for name in gauges), "an idle sender")
    assert sender.gauges()["link_up"] == 1
    assert set(sender.gauges()) == set(SENDER_GAUGES)
    engine.close()
    assert not _is_there(pid)
    assert own_threads() == threads
    wait_until(lambda: own_descriptors() <= descriptors + 2, "closing")  # Staging's own, and its mapping's.


def test_log_lines_are_the_workers(start: Callable[..., _Engine], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vllm.slotstream")
    start()
    wait_until(lambda: any("connected to" in record.getMessage() for record in caplog.records))
    (record,) = [record for record in caplog.records if "connected to" in record.getMessage()]
    assert (record.name, record.process) == ("vllm.slotstream.connector.sending.pump", os.getpid())


# A process that died or has just started, a server that is away, and rows sent on the stream that broke with one of them.
_UNLUCKY = {"INTERNAL", "INTERRUPTED", "SERVER_UNAVAILABLE", "SERVER_DRAINING", "STAGING_FULL"}


def _strike(victim: str, engine: _Engine, server: Restarting, rng: random.Random) -> None:
    """Kill the sender process or the server, with samples before and after; returns once it is replaced."""
    engine.engine.work(rng.randrange(20))
    if rng.random() < 0.5:
        time.sleep(rng.random() * 0.2)
    if victim == "server":
        server.stop(rng.choice([signal.SIGKILL, signal.SIGTERM]))
        engine.engine.work(rng.randrange(20))
        server.start()
        return
    os.kill(before := engine.pid, signal.SIGKILL)
    engine.engine.work(rng.randrange(5))
    wait_until(lambda: engine.rig.worker._sender._child is not None and engine.pid != before, "another process")


@pytest.mark.parametrize(
    ("seed", "streams"),
    [
        *((0, 1), (1, 1), (1, 4)),
        *(pytest.param(seed, 1, marks=pytest.mark.extended) for seed in range(2, 20)),
        *(pytest.param(seed, 4, marks=pytest.mark.extended) for seed in range(2, 12)),
    ],
)
def test_a_killed_process_is_replaced_and_every_promise_accounted_for(
    start: Callable[..., _Engine],
    server: Restarting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    streams: int,
) -> None:
    """In longer runs the server is killed as well. Some of those with several streams have a process for each."""
    monkeypatch.setattr("slotstream.connector.sending.process.handle._RETRY_S", 0.05)
    rng = random.Random(seed)
    spool = {"spool_dir": str(tmp_path / "spool")} if seed % 2 else {}
    several = {"streams": streams, "transport": "grpc" if seed % 4 else "auto"} if streams > 1 else {}
    engine = start(seed=seed, wait_s_max=WAIT_S, **SMALL, **spool, **several)
    victims = ["sender"] * 3 if seed < 2 else ["sender", *rng.choices(["sender", "server"], k=7)]
    for victim in victims:
        _strike(victim, engine, server, rng)
    engine.wait_for_link()
    engine.engine.work(3)  # As the process says of the link may be a second old.
    engine.settle()
    engine.engine.work(20)
    engine.settle()
    wait_until(lambda: not files_below(tmp_path / "spool", ".spool"))
    failed = _account(server.address, engine.promised)
    aborted = {sample_id for sample_id, rows in engine.promised.items() if rows is None}
    assert aborted <= failed.keys()
    assert {code for sample_id, code in failed.items() if sample_id not in aborted} <= _UNLUCKY
    last = list(engine.promised)[-20:]
    assert not (failed.keys() & set(last)) - aborted  # It works as before.
    assert engine.ended
    assert engine.counts["sender_restarts"] == victims.count("sender")


def test_samples_that_got_rows_when_the_process_died_fail_for_the_engine_too(
    start: Callable[..., _Engine], server: Restarting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotstream.connector.sending.process.handle._RETRY_S", 0.05)
    engine = start(**SMALL)
    rig = engine.rig
    table = rig.table("half", 40)
    rig.write(rig.slots("half", 0, 40))
    rig.step(StepPlan((opened("half", 40),), (cached_rows("half", 0, 20, 0, table),)), rig.slots("half", 0, 20))
    before = engine.pid
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: engine.rig.worker._sender._child is not None and engine.pid != before)
    rig.step(StepPlan((), (cached_rows("half", 20, 40, 20, table),)), rig.slots("half", 20, 40))  # Not known here any more.
    wait_until(lambda: engine.engine.failed() == {"half": "INTERNAL"})
    assert _account(server.address, {"half": None}) == {"half": "INTERNAL"}
    wait_until(lambda: rig.worker._sender.gauges()["staging_bytes_in_use"] == 0)


def test_while_there_is_no_process_samples_fail_and_are_reported_later(
    start: Callable[..., _Engine], server: Restarting, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(**SMALL)
    executable = sys.executable
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr("slotstream.connector.sending.process.handle._RETRY_S_MAX", 0.2)
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: engine.rig.worker._sender._child is None)
    engine.engine.work(30)
    wait_until(lambda: engine.ended >= 0 and engine.counts["sender_restarts"] > 2, "several tries")
    assert not engine.rig.worker._sender._owed  # Nothing piles up meanwhile but samples and their reasons, which are bounded.
    assert {sample_id for sample_id, rows in engine.promised.items() if rows is not None} <= engine.engine.failed().keys()
    monkeypatch.setattr(sys, "executable", executable)
    engine.settle()
    engine.wait_for_link()
    failed = _account(server.address, engine.promised)
    assert failed.keys() == engine.promised.keys()
    assert set(failed.values()) <= {"INTERNAL", "ABORTED"}
    engine.engine.work(10)
    engine.settle()
    whole = {sample_id for sample_id, rows in list(engine.promised.items())[-10:] if rows is not None}
    assert not whole & _account(server.address, engine.promised).keys()


def test_a_process_that_hangs_costs_the_engine_little_and_is_killed(
    start: Callable[..., _Engine], server: Restarting, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("_SILENT_S", 3.0), ("_GRACE_S", 0.5), ("_RETRY_S", 0.05), ("_ANSWER_S", 0.2)):
        monkeypatch.setattr(f"slotstream.connector.sending.process.handle.{name}", seconds)
    engine = start(**SMALL)
    engine.engine.work(5)
    hung = engine.pid
    os.kill(hung, signal.SIGSTOP)
    engine.engine.work(80)  # More than staging holds: some find no room.
    wait_until(lambda: engine.rig.worker._sender._child is not None and engine.pid != hung, "another process")
    engine.engine.work(10)
    engine.settle()
    failed = _account(server.address, engine.promised)
    # SERVER_UNAVAILABLE: the new process has not reached the server yet, and staging is full.
    assert set(failed.values()) <= {"INTERNAL", "STAGING_FULL", "ABORTED", "INTERRUPTED", "SERVER_UNAVAILABLE"}
    assert "INTERNAL" in failed.values()
    assert not _is_there(hung)


def test_an_outage_is_waited_out_with_a_spool(start: Callable[..., _Engine], server: Restarting, tmp_path: Path) -> None:
    engine = start(seed=5, spool_dir=str(tmp_path / "spool"), wait_s_max=60.0, **SMALL)
    engine.engine.work(3)
    server.stop()
    engine.engine.work(60)
    assert len(files_below(tmp_path / "spool", ".spool")) > 16
    server.start()
    engine.settle()
    failed = _account(server.address, engine.promised)
    assert failed == {sample_id: "ABORTED" for sample_id, rows in engine.promised.items() if rows is None}
    wait_until(lambda: not files_below(tmp_path / "spool", ".spool"))


def test_what_a_server_that_hangs_has_no_room_for_fails_and_the_rest_is_stored(
    start: Callable[..., _Engine], server: Restarting
) -> None:
    engine = start(seed=6, wait_s_max=0.2, **SMALL)
    server.send(signal.SIGSTOP)
    engine.engine.work(60)
    server.send(signal.SIGCONT)
    engine.settle()
    failed = _account(server.address, engine.promised)
    assert {code for sample_id, code in failed.items() if engine.promised[sample_id] is not None} == {"STAGING_FULL"}
    assert len(failed) < len(engine.promised)
    assert engine.engine.stats()["stall_seconds"] > 0
    wait_until(lambda: engine.rig.worker._sender.gauges()["staging_bytes_in_use"] == 0)


def test_rows_that_the_device_reads_late_are_waited_for_by_the_process(
    start: Callable[..., _Engine], server: Restarting, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = put_off(monkeypatch)
    reads.hold = {2}
    engine = start(**SMALL)
    for req_id in ("before", "late", "after"):
        engine.rig.capture(req_id, 8)
        engine.promised[req_id] = engine.rig.rows(req_id, 0, 8)
    wait_until(lambda: engine.ended == 1)
    wait_until(lambda: not engine.rig.worker._sender._owed)
    assert engine.rig.worker._sender._open.keys() == {"late", "after"}  # All is said: nobody here waits for the device.
    assert engine.rig.worker._sender._inbox.empty()
    reads.release(2)
    engine.settle()
    assert _account(server.address, engine.promised) == {}


def test_slots_are_leased_without_a_word_to_the_process_while_it_keeps_up(
    start: Callable[..., _Engine], server: Restarting, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def want(count: int, deadline: float) -> Want:
        asked.append(count)
        return Want(count, deadline)

    monkeypatch.setattr(handle, "Want", want)
    engine = start(**SMALL)
    for number in range(25):  # More than there are slots.
        engine.rig.capture(f"s{number}", 8)
        engine.rig.free(f"s{number}")
        wait_until(lambda number=number: engine.ended == number + 1)  # type: ignore[misc]
    assert not asked
    assert engine.counts["samples_committed"] == 25
    wait_until(lambda: engine.rig.worker._sender.gauges()["staging_bytes_in_use"] == 0)


def test_a_copy_that_never_ends_does_not_keep_the_engine_from_stopping(
    start: Callable[..., _Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotstream.connector.reading.worker._CLOSE_S", 0.2)
    put_off(monkeypatch).hold = {1}
    engine = start()
    pid = engine.pid
    engine.rig.capture("a", 8)
    engine.close()
    assert not _is_there(pid)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_dead_engine_handed_over_is_stored_and_its_process_ends(server: Restarting, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "support.outage_rig", "--in-process", server.address, str(int(how))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as engine:
        assert engine.stdout is not None
        said = json.loads(engine.stdout.readline())
        assert engine.wait(60) == -how
    wait_until(lambda: not _is_there(said["pid"]), "the sender process's end")
    promised = {sample_id: rows and bytes.fromhex(rows) for sample_id, rows in said["promised"].items()}
    failed = _account(server.address, promised)
    assert failed == {sample_id: "ABORTED" for sample_id, rows in promised.items() if rows is None}
    assert "dead-half" in failed


def test_a_step_wakes_the_thread_that_carries_once(start: Callable[..., _Engine]) -> None:
    """And in order: what a sample begins with, its rows, its end."""
    engine = start()
    engine.settle()
    rig, sender = engine.rig, engine.rig.worker._sender
    inbox, put = sender._inbox, []

    def note(item: Any) -> None:
        put.append(item)
        inbox.put(item)

    sender._inbox = SimpleNamespace(put=note, get=inbox.get, empty=inbox.empty)
    try:
        tables = [rig.table(name, 4) for name in ("a", "b", "c")]
        slots = [slot for name in ("a", "b", "c") for slot in rig.slots(name, 0, 4)]
        rig.write(slots)
        opens = tuple(opened(name, 4) for name in ("a", "b", "c"))
        rows = tuple(cached_rows(name, 0, 4, 0, table) for name, table in zip(("a", "b", "c"), tables, strict=True))
        finishes = tuple(SampleFinish(name, (0, 1, 2, 3)) for name in ("a", "b", "c"))
        rig.step(StepPlan(opens, rows, finishes), slots)
    finally:
        sender._inbox = inbox
    (posted,) = put
    assert [type(item).__name__ for item in posted] == ["SampleOpen"] * 3 + ["_LentBatch"] + ["SampleFinish"] * 3
    engine.settle()


def test_what_cannot_be_carried_over_costs_nothing_that_was_posted_with_it(
    start: Callable[..., _Engine], server: Restarting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others fail with the process, and the server hears of it."""
    engine = start()
    sender = engine.rig.worker._sender
    owe = sender._owe

    def fails(item: Any) -> None:
        if getattr(item, "req_id", "") == "bad":
            raise RuntimeError("of a test")
        owe(item)

    monkeypatch.setattr(sender, "_owe", fails)
    engine.rig.step(StepPlan(tuple(opened(name, 4) for name in ("a", "bad", "c"))), None)
    wait_until(lambda: engine.ended == 2)
    monkeypatch.undo()
    assert engine.counts["hook_faults"] == 1
    assert set(_account(server.address, {"a": None, "c": None})) == {"a", "c"}


def test_the_end_of_a_sample_is_told_also_where_nothing_else_happened() -> None:
    ours, theirs = Pipe()
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    pump: Any = SimpleNamespace(take_faults=list, gauges=dict, server=None)
    log: Any = SimpleNamespace(take=list)
    news = _News(theirs, pump, Counters(), ended, log)
    told: list[str] = []
    for req_id in ("a", "b", "c"):
        ended.put(req_id)
        while req_id not in told:
            told += hear(ours).ended
    news.close()
    assert told == ["a", "b", "c"]


def test_an_option_that_the_process_cannot_follow_stops_the_start(server: Restarting, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ConfigError, match="the process that sends rows cannot start: it ended at once"):
            _Engine(server.address)
        patch.setattr(sys, "executable", "/nowhere")
        with pytest.raises(ConfigError, match=r"the process that sends rows cannot start: .*No such file"):
            _Engine(server.address)
    for package in nixl._PACKAGES:
        (tmp_path / f"{package}.py").write_text("raise ImportError('broken')")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigError, match="cannot start: connector option transport is nixl: "):
            _Engine(server.address, transport="nixl")
