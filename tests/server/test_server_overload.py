"""More than the disk takes, from a real worker half: pressure reaches the sender, memory is bounded, nothing is spoilt."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from server.server_kit import Peer, Reader, RunningServer, Sample
from support.outage_rig import SMALL, Engine, account
from support.waiting import WAIT_S, wait_until

from slotstream.store.disk.files import Files
from slotstream.store.samples import SampleStore
from slotstream.wire.hashing import Buffer
from slotstream.wire.names import CHUNK_BYTES_MAX


class _Disk(Files):
    """Full while `free` is 0; stuck while `goes_on` is not set."""

    def __init__(self) -> None:
        self.free = 1 << 40
        self.goes_on = threading.Event()
        self.goes_on.set()

    def free_bytes(self, path: Path) -> int:
        return self.free

    def pwrite(self, fd: int, data: Buffer, at: int) -> None:
        assert self.goes_on.wait(4 * WAIT_S)  # The engine waits meanwhile, too.
        super().pwrite(fd, data, at)


def _set_slow(running: RunningServer) -> None:
    """As after a slow write: chunks are written by a thread, and a stuck disk does not stop the event loop."""
    running.server._ingest._shared.disk_threads.disk_speed.note(1e9)
    running.server._ingest._shared.disk_threads.disk_speed._slow_until = float("inf")


def test_a_disk_that_was_full_gets_what_did_not_fit_once_it_has_room(tmp_path: Path) -> None:
    disk = _Disk()
    with RunningServer(tmp_path, store=SampleStore.open(tmp_path, files=disk)) as running:
        engine = Engine.start(running.address, seed=1)
        try:
            engine.work(5)
            disk.free = 0
            engine.work(15)
            wait_until(lambda: running.metric("samples_total", outcome="failed", code="STORE_FULL") >= 10)
            assert set(engine.failed().values()) <= {"ABORTED", "STORE_FULL"}
            disk.free = 1 << 40
            wait_until(lambda: engine.settled)
            failed = account(running.address, engine.promised)
            assert failed == {sample_id: "ABORTED" for sample_id, rows in engine.promised.items() if rows is None}
        finally:
            engine.close()


def test_what_waits_for_a_full_disk_makes_room_for_what_the_engine_reads(tmp_path: Path) -> None:
    disk = _Disk()
    with RunningServer(tmp_path, store=SampleStore.open(tmp_path, files=disk)) as running:
        engine = Engine.start(running.address, seed=2, wait_s_max=60.0, **SMALL)
        try:
            wait_until(lambda: engine.rig.worker._sender.link_up)
            disk.free = 0
            engine.work(60)
            assert engine.stats().get("stall_seconds", 0.0) < 30.0  # Not one step waited for the disk.
            disk.free = 1 << 40
            wait_until(lambda: engine.settled)
            failed = account(running.address, engine.promised)
            assert failed == engine.failed()
            assert set(failed.values()) == {"ABORTED", "STORE_FULL"}
        finally:
            engine.close()


@pytest.mark.parametrize("spooling", [False, True], ids=["staging only", "with a spool"])
def test_a_stuck_disk_fills_staging_and_fails_what_finds_no_room(tmp_path: Path, spooling: bool) -> None:
    disk = _Disk()
    options: dict[str, Any] = {"spool_dir": str(tmp_path / "spool")} if spooling else {}
    with RunningServer(tmp_path / "data", store=SampleStore.open(tmp_path / "data", files=disk)) as running:
        _set_slow(running)
        # The first step that finds staging full waits for what is left of that since the last answer; those after it do not.
        engine = Engine.start(running.address, seed=3, wait_s_max=5.0, ack_timeout_s=600.0, **SMALL, **options)
        try:
            engine.work(3)
            wait_until(lambda: engine.settled)
            disk.goes_on.clear()
            engine.work(40)
            stats = engine.stats()
            assert stats["stall_seconds"] > 0
            assert stats["staging_bytes_in_use"] <= stats["staging_bytes_limit"]
            disk.goes_on.set()
            wait_until(lambda: engine.settled)
            failed = account(running.address, engine.promised)
            assert failed == engine.failed()
            assert "STAGING_FULL" in failed.values()
            engine.work(5)
            wait_until(lambda: engine.settled)
            account(running.address, engine.promised)
        finally:
            disk.goes_on.set()
            engine.close()


def test_all_streams_together_hold_no_more_than_they_may(tmp_path: Path) -> None:
    disk, limit, frame = _Disk(), CHUNK_BYTES_MAX, 4000 * Sample.row_bytes
    store = SampleStore.open(tmp_path, files=disk)
    options = {"ingest_bytes_max": limit, "window_bytes": CHUNK_BYTES_MAX}
    with RunningServer(tmp_path, store=store, **options) as running, Reader(running.address) as reader:
        _set_slow(running)
        disk.goes_on.clear()
        peers = [Peer(running.address) for _ in range(4)]
        samples = [Sample(f"s{i}", rows=24_000, seed=i) for i in range(4)]
        for peer, sample in zip(peers, samples, strict=True):
            peer.say(sample.open(1))
            for at in range(0, sample.rows, 4000):
                peer.say(sample.chunk(1, at + 1, at, at + 4000))
            peer.say(sample.commit(1))
        wait_until(lambda: running.metric("held_bytes") >= limit)
        assert limit <= running.metric("held_bytes") < limit + len(peers) * (frame + 1024)
        disk.goes_on.set()
        for peer, sample in zip(peers, samples, strict=True):
            peer.committed()
            assert reader.read(sample.sample_id)[1] == sample.data
            peer.__exit__(None, None, None)
        assert running.metric("held_bytes") == 0
