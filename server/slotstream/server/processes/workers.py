"""Starts a server's worker processes, keeps them running, and lets them finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from slotstream.server.config import ServerConfig
from slotstream.server.listening import LOCAL_OPTIONS
from slotstream.server.processes.primary import WorkersService
from slotstream.server.processes.worker import parameters
from slotstream.v1 import workers_pb2 as pb
from slotstream.v1 import workers_pb2_grpc
from slotstream.wire.errors import ConfigError

_log = logging.getLogger(__name__)
_START_S = 30.0
_AGAIN_S = 1.0
_STOP_S = 15.0


class WorkerProcesses:
    """`config.workers` - 1 processes beside this one. Belongs to one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        addresses: Sequence[str],
        workers: WorkersService,
        samples: grpc.GenericRpcHandler[Any, Any],
    ) -> None:
        """`addresses` are those that the workers listen on too; `samples` answers the calls that they pass on."""
        self._config = config
        self._addresses = addresses
        self._workers = workers
        self._samples = samples
        self._closing = contextlib.AsyncExitStack()
        self._ending = False

    async def start(self) -> None:
        """Returns once every worker serves. Raises ConfigError."""
        # A directory of our own, 0700: nobody else can reach the socket, and it needs no other guard.
        directory = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="slotstream-")))
        private = f"unix:{directory}/primary"
        server = grpc.aio.server(options=LOCAL_OPTIONS)
        server.add_generic_rpc_handlers((self._samples,))
        workers_pb2_grpc.add_WorkersServicer_to_server(self._workers, server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(private)
        await server.start()
        self._closing.push_async_callback(self._workers.finish)
        self._closing.push_async_callback(server.stop, 1.0)
        count = self._config.workers - 1
        tasks = [asyncio.create_task(self._run_worker(number, private)) for number in range(1, count + 1)]
        self._closing.push_async_callback(self._join, tasks)
        try:
            await asyncio.wait_for(self._workers.joined(count), _START_S)
        except TimeoutError as error:
            raise ConfigError(f"--workers: not all of {count} processes came up within {_START_S:.0f} s") from error

    async def stop(self) -> None:
        """End every worker; what is still open there fails."""
        self._ending = True
        self._workers.order(pb.WorkerOrder.END_STREAMS)
        await self._closing.aclose()

    async def _join(self, tasks: list[asyncio.Task[None]]) -> None:
        self._ending = True
        _, late = await asyncio.wait(tasks, timeout=_STOP_S)
        for task in late:  # Kills its process.
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_worker(self, number: int, private: str) -> None:
        """Run one worker, again and again until the server ends."""
        while not self._ending:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "slotstream.server.processes.worker", stdin=asyncio.subprocess.PIPE
            )
            try:
                await process.communicate(parameters(self._config, number, private, self._addresses))
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if not self._ending:
                _log.error("worker %d exited with %s: starting it again", number, process.returncode)
                await asyncio.sleep(_AGAIN_S)
