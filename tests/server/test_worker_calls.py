"""The primary's side of its workers: a call that its worker no longer waits for forgets nothing that a thread is doing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from slotstream.server.access.gate import Gate
from slotstream.server.config import ServerConfig
from slotstream.server.disk_threads import DiskThreads
from slotstream.server.metrics import Metrics
from slotstream.server.parts import ServerParts
from slotstream.server.processes.primary import WorkersService
from slotstream.server.waiters import Waiters
from slotstream.store.disk.files import Files
from slotstream.store.records import SampleKey, State
from slotstream.store.samples import SampleStore
from slotstream.v1 import ingest_pb2
from slotstream.v1 import workers_pb2 as pb

KEY = SampleKey("default", "s")
SAMPLE = ingest_pb2.OpenSample(
    namespace=KEY.namespace, sample_id=KEY.sample_id, dtype="F32", layer_ids=(1,), hidden_size=8, rows_max=4, rows_exact=True
)
FAILURE = pb.UploadFailure(code="INTERRUPTED", message="the peer is gone")
NO_CONTEXT: Any = None
TIMEOUT_S = 60.0


class StuckFiles(Files):
    """Once `stick` named an operation, it waits, until `go_on`."""

    def __init__(self) -> None:
        self._name = ""
        self._reached = threading.Event()
        self._go_on = threading.Event()

    def stick(self, name: str) -> None:
        self._name = name

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, TIMEOUT_S)

    def go_on(self) -> None:
        self._go_on.set()

    def _wait(self, name: str) -> None:
        if name == self._name:
            self._reached.set()
            assert self._go_on.wait(TIMEOUT_S)

    def make_dir(self, path: Path) -> None:
        self._wait("make_dir")
        super().make_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._wait("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._wait("unlink")
        super().unlink(path)


class Primary:
    """The service over a store, and worker 1, which is there until `dies`."""

    def __init__(self, data_dir: Path) -> None:
        self.files = StuckFiles()
        self.store = SampleStore.open(data_dir, files=self.files)
        self.disk_threads = DiskThreads()
        self.waiters = Waiters()
        self.committed: list[str] = []
        config = ServerConfig(data_dir=data_dir)
        parts = ServerParts(config, self.store, self.disk_threads, Metrics(self.store), self.waiters, Gate(config))
        self.calls = WorkersService(parts, self.committed.append)
        self._dies = asyncio.Event()
        self._joining = asyncio.create_task(self._follow_orders())

    async def _follow_orders(self) -> None:
        async def reports() -> AsyncIterator[pb.WorkerReport]:
            yield pb.WorkerReport(worker=1)
            await self._dies.wait()

        async for _ in self.calls.Join(reports(), NO_CONTEXT):
            pass

    async def dies(self) -> None:
        self._dies.set()
        await self._joining

    async def begin(self) -> tuple[int, Path]:
        """A sample, and the file that its worker has written."""
        await self.calls.joined(1)
        begun = await self.calls.Begin(pb.BeginUpload(worker=1, sample=SAMPLE), NO_CONTEXT)
        assert not begun.failure.code, begun
        partial = KEY.directory(self.store.data_dir) / begun.partial
        partial.write_bytes(b"rows")
        return begun.upload, partial

    def publish(self, number: int) -> Coroutine[Any, Any, pb.UploadEnded]:
        return self.calls.Publish(pb.PublishUpload(upload=number, num_tokens=4, file_bytes=4, hash_rows=4), NO_CONTEXT)

    def fail(self, number: int) -> Coroutine[Any, Any, pb.UploadEnded]:
        return self.calls.Fail(pb.FailUpload(upload=number, failure=FAILURE), NO_CONTEXT)

    async def cancelled_in(self, operation: str, call: Coroutine[Any, Any, Any]) -> None:
        """Start a call, and cancel it while a thread is stuck for it in an operation of the disk."""
        self.files.stick(operation)
        calling = asyncio.create_task(call)
        await self.files.reached()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    @property
    def is_idle(self) -> bool:
        return self.calls._idle.is_set()

    async def idle(self) -> None:
        await asyncio.wait_for(self.calls.idle(), TIMEOUT_S)

    def state(self) -> tuple[State, str]:
        record = self.store.stat(KEY)
        assert record is not None
        return record.state, record.error_code


def run(data_dir: Path, test: Callable[[Primary], Coroutine[Any, Any, None]]) -> None:
    async def all_of_it() -> None:
        primary = Primary(data_dir)
        try:
            await test(primary)
        finally:
            primary.files.go_on()
            await primary.dies()
            await asyncio.to_thread(primary.disk_threads.shutdown)
            primary.store.close()

    asyncio.run(all_of_it())


def test_a_commit_whose_call_is_cancelled_is_finished_and_counted(tmp_path: Path) -> None:
    async def test(primary: Primary) -> None:
        number, _ = await primary.begin()
        with primary.waiters.watch(KEY) as changed:
            await primary.cancelled_in("rename", primary.publish(number))
            assert not primary.is_idle  # Who drains the server waits for it.
            primary.files.go_on()
            await primary.idle()
            assert changed.is_set()
        assert primary.committed == [KEY.namespace]
        assert primary.state() == (State.COMMITTED, "")

    run(tmp_path, test)


@pytest.mark.parametrize("how", ["fails", "dies"])
def test_a_worker_that_gives_up_does_not_end_a_commit(tmp_path: Path, how: str) -> None:
    """It waits for so long, then says that the sample failed; or it is killed while the disk is slow."""

    async def test(primary: Primary) -> None:
        number, _ = await primary.begin()
        await primary.cancelled_in("rename", primary.publish(number))
        await (primary.dies() if how == "dies" else primary.fail(number))
        assert not primary.is_idle
        primary.files.go_on()
        await primary.idle()
        assert primary.state() == (State.COMMITTED, "")

    run(tmp_path, test)


def test_a_failure_whose_call_is_cancelled_is_recorded_and_counted(tmp_path: Path) -> None:
    async def test(primary: Primary) -> None:
        number, partial = await primary.begin()
        await primary.cancelled_in("unlink", primary.fail(number))
        assert not primary.is_idle
        primary.files.go_on()
        await primary.idle()
        assert primary.state() == (State.FAILED, "INTERRUPTED")
        assert not partial.exists()

    run(tmp_path, test)


def test_a_sample_that_nobody_waits_for_when_it_is_open_is_failed(tmp_path: Path) -> None:
    """Its number was never heard: nobody else will ever end it."""

    async def test(primary: Primary) -> None:
        await primary.calls.joined(1)
        with primary.waiters.watch(KEY) as changed:
            await primary.cancelled_in("make_dir", primary.calls.Begin(pb.BeginUpload(worker=1, sample=SAMPLE), NO_CONTEXT))
            primary.files.go_on()
            while primary.store.stat(KEY) is None or primary.state() != (State.FAILED, "INTERRUPTED"):
                changed.clear()
                await asyncio.wait_for(changed.wait(), TIMEOUT_S)
        await primary.idle()

    run(tmp_path, test)
