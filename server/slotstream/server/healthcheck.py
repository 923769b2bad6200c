"""The standard health service, open to everybody. Specified in https://github.com/grpc/grpc/blob/master/doc/health-checking.md.

We do not use the one of grpcio-health-checking. There, once somebody stops watching a service, nobody else who watches it is
told anything more (one condition for all of them is dropped with the first), and nothing limits how many watch.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slotstream.server.access.gate import Shares
from slotstream.server.status import abort
from slotstream.wire.errors import TooMany

_WATCHES_MAX = 4096  # Each connector has one.
_Reply = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Statuses by service name. Belongs to one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changes: set[asyncio.Event] = set()
        self._stopped = False
        self._shares = Shares("health watches", _WATCHES_MAX, _WATCHES_MAX)

    def serve(self, *services: str) -> None:
        """These are SERVING."""
        self._statuses = dict.fromkeys(services, _Reply.SERVING)

    def stop_for_good(self) -> None:
        """All of them are NOT_SERVING from now on."""
        self.change(False)
        self._stopped = True

    def change(self, serving: bool) -> None:
        """All of them are SERVING, or are not, and whoever watches hears of it. Nothing, once they stopped for good."""
        if self._stopped:
            return
        self._statuses = dict.fromkeys(self._statuses, _Reply.SERVING if serving else _Reply.NOT_SERVING)
        for change in self._changes:
            change.set()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return _Reply(status=status)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            with self._shares.one(""):
                await self._watch(request.service, context)
        except TooMany as error:
            await abort(context, error)

    async def _watch(self, service: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        change = asyncio.Event()
        self._changes.add(change)
        told: int | None = None
        try:
            while True:
                change.clear()
                status = self._statuses.get(service, _Reply.SERVICE_UNKNOWN)
                if status != told:
                    await context.write(_Reply(status=status))
                told = status
                await change.wait()
        finally:
            self._changes.discard(change)
