"""One life of a server: the real store, disk threads, housekeeping and services, on simulated threads and a simulated loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from simulation.disk import SimFiles
from simulation.loop import SimLoop
from simulation.network import Call
from simulation.scheduler import Process, SimThread, running
from simulation.threads import SimTime
from support.sqlite_of import sqlite_of

from slotstream.server.access.gate import Gate
from slotstream.server.config import ServerConfig
from slotstream.server.disk_threads import DiskThreads
from slotstream.server.housekeeping import Housekeeping
from slotstream.server.ingest.service import IngestService
from slotstream.server.metrics import Metrics
from slotstream.server.parts import ServerParts
from slotstream.server.samples.service import SamplesService
from slotstream.server.waiters import Waiters
from slotstream.store.catalogue.holds import Holds
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import ConfigError

_IDLE_S = 200.0  # A drain must have ended by then, whatever its patience.


class SimServer:
    """What `app.Server` puts together, but for what listens. Begins at once; `wait_until_up` says how that went."""

    def __init__(self, files: SimFiles, life: int, options: dict[str, Any], chunk_threads: int) -> None:
        self.process = Process(f"server {life}")
        self.calls: dict[Call, None] = {}
        self.is_up = False
        self.refusal = ""
        self.loop: SimLoop
        self.store: SampleStore
        self._files = files
        self._options = options
        self._chunk_threads = chunk_threads
        self._thread: SimThread = running().spawn("loop", self._run, self.process)
        self._waiting: list[SimThread] = []

    def _run(self) -> None:
        self.loop = SimLoop()
        config = self._config()
        try:
            self.store = self._open(config)
        except ConfigError as error:
            self.refusal = str(error)
            running().note(f"start refused: {error}".replace(str(self._files.root), "DIR"))
            self._tell()
            return
        self.disk_threads = DiskThreads(chunk_threads=self._chunk_threads)
        self.metrics = Metrics(self.store)
        self.waiters = Waiters()
        self.housekeeping = Housekeeping(config, self.store, self.metrics, lambda healthy: None)
        parts = ServerParts(config, self.store, self.disk_threads, self.metrics, self.waiters, Gate(config))
        self.ingest = IngestService(parts, self.housekeeping.touch)
        self.samples = SamplesService(parts, self.housekeeping)
        for bodies in (self.ingest._shared.bodies, self.samples._calls.bodies):
            bodies._resident = lambda: 0  # The memory of this process is not the server's.
        self._handlers = (self.ingest.handler(), self.samples.handler())
        self.housekeeping.start()
        self.is_up = True
        self._tell()
        self.loop.run()

    def _config(self) -> ServerConfig:
        return ServerConfig(data_dir=self._files.root, listen="127.0.0.1:0", **self._options)

    def _open(self, config: ServerConfig) -> SampleStore:
        return SampleStore.open(
            self._files.root,
            files=self._files,
            free_bytes_min=config.free_bytes_min,
            wall=SimTime.time_ns,
            elapsed=SimTime.elapsed_ns,
            uploads_max=64,
        )

    def _held(self) -> Holds:
        """Of readers, in the catalogue."""
        return sqlite_of(self.store)._holds

    def _tell(self) -> None:
        for thread in self._waiting:
            running().wake(thread)

    def wait_until_up(self) -> bool:
        """Whether it serves; False where the start was refused, or the process died."""
        while not (self.is_up or self.refusal or self.process.dead):
            self._waiting.append(running().current)
            running().block(1.0)
        return self.is_up and not self.process.dead

    def handler(self, details: Any) -> Any:
        for handlers in self._handlers:
            found = handlers.service(details)
            if found is not None:
                return found
        raise AssertionError(f"there is no {details.method}")

    # Its ends.

    def kill(self) -> None:
        self.is_up = False
        running().kill(self.process)
        for call in list(self.calls):
            call.server_died()

    def stop(self, drain_s: float) -> None:
        """Drain and stop, as `app.Server` does it."""
        self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._stop(drain_s)))
        if not running().join(self._thread, _IDLE_S):
            if not self.process.dead:
                running().fail(f"the server did not stop within {_IDLE_S:g} s")
            return
        running().join(running().spawn("close", self._close, self.process))
        self._files.connections.clear()

    async def _stop(self, drain_s: float) -> None:
        self.is_up = False
        self.ingest.drain()
        await _within(self.ingest.idle(), drain_s)
        self.ingest.end_streams()
        await self.ingest.idle()
        self.waiters.close()
        await _within(self.samples.idle(), drain_s)
        for call in list(self.calls):
            call.cut("UNAVAILABLE")
        while self.calls:  # noqa: ASYNC110  # What they do at their end is what is tested.
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # Tasks that were cancelled have ended by then.
        self.loop.stop()

    def _close(self) -> None:
        """What blocks. Nothing may be left then."""
        self.housekeeping.stop()
        self.disk_threads.shutdown()
        self.leftovers()
        self.store.close()
        others = sorted(thread.name for thread in self.process.threads if thread is not running().current)
        if others:
            running().fail(f"threads go on after the stop: {others}")
        if self._files.fds:
            names = sorted(Path(f"/proc/self/fd/{fd}").readlink().name for fd in self._files.fds)
            running().fail(f"files are open after the stop: {names}")
        self.process.dead = True

    def leftovers(self) -> None:
        """Everything that was taken was given back. For a server on which no call is under way."""
        shared, calls = self.ingest._shared, self.samples._calls
        left = {
            "open samples": shared._open,
            "bytes held": shared._held_bytes,
            "shares of open samples": shared.open_shares._total + len(shared.open_shares._by_peer),
            "streams": len(self.ingest._streams) + self.ingest._stream_shares._total,
            "streams that wait for room": len(shared._waiting),
            "reads": self.samples._reads + calls.read_shares._total + self.samples._waiting_shares._total,
            "requests": calls.request_shares._total + self.samples._admin._verify_shares._total,
            "waiters": len(self.waiters._waiting),
            "uploads": len(self.store._uploads) + self.store._opening + len(self.store._failing),
            "readers": len(self._held()),
            "tasks": len(asyncio.all_tasks(self.loop)),
            "lines": len(self.disk_threads.chunk_lines._lines) + len(self.disk_threads.commit_lines._lines),
        }
        for what, count in left.items():
            if count:
                running().fail(f"{what}: {count} are left though nobody has any")


async def _within(done: Any, seconds: float) -> None:
    task = asyncio.ensure_future(done)
    await asyncio.wait((task,), timeout=seconds)
    task.cancel()
