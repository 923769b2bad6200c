"""Outages with real servers and real kills: each promised sample is stored, or failed with a reason that the server knows."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.files import files_below
from support.outage_rig import SMALL, Engine, Restarting, account, own_descriptors, own_threads
from support.waiting import wait_until
from support.worker_rig import opened

from slotstream.client import connect
from slotstream.connector.plan import StepPlan
from slotstream.connector.sending.spool import files as spool_files
from slotstream.v1 import ingest_pb2
from slotstream.wire.hashing import xxh3

TESTS = Path(__file__).parents[1]


Start = Callable[..., Engine]
STREAMS = [1, pytest.param(4, marks=pytest.mark.extended)]
with_one_stream_and_four = pytest.mark.parametrize("streams", [1, 4], indirect=True)


@pytest.fixture(params=STREAMS)
def streams(request: pytest.FixtureRequest) -> int:
    """Of each engine. The server has one process, which takes them all."""
    return int(request.param)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restarting]:
    with Restarting(tmp_path / "data", "--drain-s", "1") as made:
        yield made


@pytest.fixture
def start(server: Restarting, streams: int) -> Start:
    """Starts an engine towards `server`; to be closed."""

    def start(seed: int, name: str = "e", **options: Any) -> Engine:
        engine = Engine.start(server.address, seed, name, streams=streams, **options)
        if server.process is not None:
            wait_until(lambda: engine.rig.worker._sender.gauges()["streams_up"] == streams, "all streams")
        return engine

    return start


def _aborted(engine: Engine) -> dict[str, str]:
    return {sample_id: "ABORTED" for sample_id, rows in engine.promised.items() if rows is None}


@with_one_stream_and_four
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "shut down"])
def test_what_was_in_flight_and_what_came_meanwhile_is_stored_when_the_server_is_back(
    server: Restarting, start: Start, number: signal.Signals
) -> None:
    engine = start(number)
    try:
        engine.work(30)
        server.stop(number)
        engine.work(30)
        server.start()
        engine.work(5)
        wait_until(lambda: engine.settled)
        assert account(server.address, engine.promised) == _aborted(engine)
        stats = engine.stats()
        assert stats["samples_replayed"] >= 20
        assert stats["samples_in_flight"] == stats["staging_bytes_in_use"] == stats["staging_bytes_kept"] == 0
    finally:
        engine.close()


def test_a_server_that_was_stopped_and_goes_on_gets_everything_on_a_new_stream(server: Restarting, start: Start) -> None:
    engine = start(3, ack_timeout_s=0.2)
    try:
        engine.work(10)
        server.send(signal.SIGSTOP)
        engine.work(20)
        wait_until(lambda: not engine.rig.worker._sender._outbox.link_up)
        engine.work(10)
        server.send(signal.SIGCONT)
        wait_until(lambda: engine.settled)
        assert account(server.address, engine.promised) == _aborted(engine)
    finally:
        engine.close()


def test_what_finds_no_room_fails_at_once_and_the_server_is_told_when_it_is_back(server: Restarting, start: Start) -> None:
    engine = start(4, wait_s_max=600.0, **SMALL)
    try:
        engine.work(3)
        server.stop()
        wait_until(lambda: not engine.rig.worker._sender._outbox.link_up)
        engine.work(40)  # Waits for nothing, whatever the policy says: nothing makes room.
        server.start()
        wait_until(lambda: engine.settled)
        failed = account(server.address, engine.promised)
        assert {sample_id for sample_id, code in failed.items() if code == "SERVER_UNAVAILABLE"}
        assert failed == engine.failed()
        assert engine.stats()["failures_reported"] == len(failed)
        engine.work(20)
        wait_until(lambda: engine.settled)
        late = dict(list(engine.promised.items())[-20:])
        assert set(account(server.address, late).values()) <= {"ABORTED"}
    finally:
        engine.close()


@with_one_stream_and_four
def test_a_spool_holds_what_staging_cannot(server: Restarting, start: Start, tmp_path: Path) -> None:
    engine = start(5, spool_dir=str(tmp_path / "spool"), wait_s_max=60.0, **SMALL)
    try:
        engine.work(3)
        server.stop()
        engine.work(60)
        assert len(files_below(tmp_path / "spool", ".spool")) > 16
        for path in (tmp_path / "spool").rglob("*"):
            assert path.stat().st_mode & 0o077 == 0
        server.start()
        wait_until(lambda: engine.settled)
        assert account(server.address, engine.promised) == _aborted(engine)
        wait_until(lambda: not files_below(tmp_path / "spool", ".spool"))
        stats = engine.stats()
        assert stats["spooled_bytes"] > 0
        assert stats["spool_bytes_in_use"] == stats["staging_bytes_in_use"] == stats["staging_bytes_kept"] == 0
    finally:
        engine.close()
    assert not list((tmp_path / "spool").iterdir())


@pytest.mark.parametrize("how", ["bytes", "unwritable"])
def test_a_spool_that_takes_no_more_is_as_none(server: Restarting, start: Start, tmp_path: Path, how: str) -> None:
    """Counted, and what finds no room is accounted for."""
    spool = tmp_path / "spool"
    if how == "unwritable":
        spool.write_text("a file in its place")
    options: dict[str, Any] = {**SMALL, "spool_bytes_max": 1 << 16, "spool_dir": str(spool)}
    engine = start(6, **options)
    try:
        server.stop()
        wait_until(lambda: not engine.rig.worker._sender._outbox.link_up)
        engine.work(80)
        server.start()
        wait_until(lambda: engine.settled)
        failed = account(server.address, engine.promised)
        assert "SERVER_UNAVAILABLE" in failed.values()
        assert failed == engine.failed()
        assert (engine.stats().get("spool_errors", 0) > 0) == (how == "unwritable")
    finally:
        engine.close()


def _killed_engine(address: str, spool: Path, seed: int) -> dict[str, bytes | None]:
    """Run an engine that spools while nobody is there, and kill it; what it promised."""
    command = [sys.executable, "-m", "support.outage_rig", address, str(spool), str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.kill()
    assert said, "the engine died by itself"
    return {sample_id: None if rows is None else bytes.fromhex(rows) for sample_id, rows in json.loads(said).items()}


def test_an_engine_killed_in_an_outage_leaves_its_spool_to_the_next(server: Restarting, start: Start, tmp_path: Path) -> None:
    server.stop()
    spool = tmp_path / "spool"
    promised = _killed_engine(server.address, spool, 1)
    files = files_below(spool, ".spool")
    names = _whole(promised)[:4]
    flipped, cut, emptied, rotten = (next(p for p in files if f"~{name}.spool" in p.name) for name in names)
    raw = bytearray(flipped.read_bytes())
    raw[-1] ^= 1  # In the record of the commit.
    flipped.write_bytes(raw)
    cut.write_bytes(cut.read_bytes()[:-5])
    emptied.write_bytes(b"\xff" * 100)
    raw = bytearray(rotten.read_bytes())
    rows = promised[names[3]]
    assert rows is not None
    raw[raw.index(rows[:40])] ^= 1
    rotten.write_bytes(raw)
    other = start(7, name="other", spool_dir=str(spool), wait_s_max=60.0, **SMALL)
    try:
        other.work(20)  # Two live owners of one directory.
        server.start()
        engine = start(8, name="next", spool_dir=str(spool))
        try:
            engine.work(5)
            wait_until(lambda: engine.settled and other.settled)
            wait_until(lambda: not files_below(spool, ".spool"))
            failed = account(server.address, promised)
            assert failed.pop("killed1-half") == "INTERRUPTED"
            damaged = dict(zip(names, ("DAMAGED", "INTERRUPTED", "DAMAGED", "DAMAGED"), strict=True))
            aborted = {i: "ABORTED" for i, rows in promised.items() if rows is None and i != "killed1-half"}
            assert aborted
            assert failed == damaged | aborted
            assert account(server.address, other.promised) == _aborted(other)
            assert account(server.address, engine.promised) == _aborted(engine)
        finally:
            engine.close()
    finally:
        other.close()
    assert not list(spool.iterdir())


def test_an_engine_that_shuts_down_in_an_outage_leaves_what_is_whole_to_the_next(
    server: Restarting, start: Start, tmp_path: Path
) -> None:
    """Whose chunks are smaller: the rows go out in pieces."""
    spool = str(tmp_path / "spool")
    first = start(10, name="first", spool_dir=spool, **SMALL)
    try:
        first.work(2)
        wait_until(lambda: first.settled)
        server.stop()
        wait_until(lambda: not first.rig.worker._sender._outbox.link_up)
        first.work(5)
        rig = first.rig
        rig.capture("long", 200)
        first.promised["long"] = rig.rows("long", 0, 200)
        rig.step(StepPlan((opened("half", 9),)), None)
    finally:
        first.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("slotstream-spool")]
    server.start()
    next_one = start(11, name="next", spool_dir=spool, staging_bytes=1 << 20, chunk_bytes=4096)
    try:
        wait_until(lambda: next_one.settled)
        wait_until(lambda: not files_below(Path(spool), ".spool"))
        assert account(server.address, first.promised | {"half": None}) == _aborted(first) | {"half": "ABORTED"}
        with connect(server.address) as client:
            assert int(client.stat("long").metadata["chunks"]) > 2
    finally:
        next_one.close()


def test_a_row_longer_than_a_slot_cannot_come_back_and_that_is_said(server: Restarting, start: Start, tmp_path: Path) -> None:
    owned = spool_files.create_dir(tmp_path / "spool")
    file = spool_files.SpoolFile(1, "default", "wide", owned)
    wide = ingest_pb2.OpenSample(
        namespace="default", sample_id="wide", dtype="BF16", layer_ids=[1], hidden_size=4096, rows_max=1, rows_exact=True
    )
    rows = memoryview(bytes(8192))
    header = ingest_pb2.ChunkHeader(rows=1, xxh3=xxh3(rows))
    spool_files.append(file, ingest_pb2.IngestRequest(open=wide), None)
    spool_files.append(file, ingest_pb2.IngestRequest(chunk=header), rows)
    commit = ingest_pb2.CommitSample(row_count=1, token_ids=[7])
    spool_files.append(file, ingest_pb2.IngestRequest(commit=commit), None)
    os.close(owned.lock_fd)
    engine = start(0, spool_dir=str(tmp_path / "spool"))
    try:
        wait_until(lambda: engine.settled and not files_below(tmp_path / "spool", ".spool"))
        assert account(server.address, {"wide": None}) == {"wide": "TOO_LARGE"}
    finally:
        engine.close()


def _whole(promised: dict[str, bytes | None]) -> list[str]:
    return [sample_id for sample_id, rows in promised.items() if rows is not None]


def _cycle(server: Restarting, engine: Engine, rng: random.Random) -> None:
    """One outage at a random moment: a kill, a shutdown, or a stop, with captures before, in and after it."""
    engine.work(rng.randrange(8))
    how = rng.choice(["kill", "term", "stop"])
    if how == "stop":
        server.send(signal.SIGSTOP)
        engine.work(rng.randrange(12))
        time.sleep(rng.random() * 0.5)  # Shorter or longer than the stream is given.
        server.send(signal.SIGCONT)
    else:
        server.stop(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        engine.work(rng.randrange(12))
        server.start()
    engine.work(rng.randrange(4))
    if rng.random() < 0.5:
        wait_until(lambda: engine.settled)


# Rows let go of for others when the link broke, or refused by a server on its way out; no room, while it was hung or away.
_UNLUCKY = {"INTERRUPTED", "SERVER_DRAINING", "STAGING_FULL", "SERVER_UNAVAILABLE"}


def _outage_cycles(server: Restarting, start: Start, tmp_path: Path, cycles: int, **options: Any) -> None:
    rng = random.Random(cycles)
    engine = start(9, ack_timeout_s=0.2, **SMALL, **options)
    try:
        engine.work(5)
        wait_until(lambda: engine.settled)
        lock = int("spool_dir" in options)  # Of the spool, from its first use on.
        threads, descriptors = own_threads(), own_descriptors() + lock
        for _ in range(cycles):
            _cycle(server, engine, rng)
        wait_until(lambda: engine.settled)
        failed = account(server.address, engine.promised)
        told = engine.failed()
        for sample_id, code in failed.items():
            assert code == told[sample_id]
            assert code in _UNLUCKY or (code == "ABORTED" and engine.promised[sample_id] is None)
        wait_until(lambda: own_threads() <= threads, "the end of a thread")
        wait_until(lambda: own_descriptors() <= descriptors, "the end of a descriptor")
        assert server.descriptors() < 100
    finally:
        engine.close()
    assert not files_below(tmp_path, ".spool")
    assert not files_below(tmp_path, ".partial")


@with_one_stream_and_four
@pytest.mark.parametrize("spooling", [False, True], ids=["staging only", "with a spool"])
def test_a_few_outages(server: Restarting, start: Start, tmp_path: Path, spooling: bool) -> None:
    _outage_cycles(server, start, tmp_path, 3, **({"spool_dir": str(tmp_path / "spool")} if spooling else {}))


@pytest.mark.extended
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("spooling", [False, True], ids=["staging only", "with a spool"])
def test_a_hundred_outages(server: Restarting, start: Start, tmp_path: Path, spooling: bool) -> None:
    _outage_cycles(server, start, tmp_path, 100, **({"spool_dir": str(tmp_path / "spool")} if spooling else {}))
