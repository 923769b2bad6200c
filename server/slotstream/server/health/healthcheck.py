"""The standard health service, open to everybody. Specified in https://github.com/grpc/grpc/blob/master/doc/health-checking.md.

We do not use the one of grpcio-health-checking. There, once somebody stops watching a service, nobody else who watches it is
told anything more (one condition for all of them is dropped with the first), and nothing limits how many watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from slotstream.server.access.bodies import BODY_S, Bodies
from slotstream.server.access.gate import Context, Shares, address_of
from slotstream.server.access.limits import HEALTH_CHECKS, HEALTH_WATCHES
from slotstream.server.access.shared_connections import SharedConnections
from slotstream.server.config import ServerConfig
from slotstream.server.status import abort
from slotstream.wire.errors import BadParams, SlotStreamError

_REQUEST_BYTES_MAX = 4 << 10
_Reply = health_pb2.HealthCheckResponse


class HealthService:
    """Statuses by service name. Belongs to one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        note: Callable[[Context], None] = lambda context: None,
        connections: SharedConnections | None = None,
    ) -> None:
        """`note` gets every call. `connections`: those that calls come over."""
        self._note = note
        self._statuses: dict[str, int] = {}
        self._changes: set[asyncio.Event] = set()
        self._stopped = False
        # Everybody may call it: else a peer would save its own connection with a call here, as another caller.
        self._bodies = Bodies(_REQUEST_BYTES_MAX, connections=connections, saves_connections=False)
        self._watches = HEALTH_WATCHES.shares(config)
        self._checks = HEALTH_CHECKS.shares(config)

    def serve(self, *services: str) -> None:
        """These are SERVING."""
        self._statuses = dict.fromkeys(services, _Reply.SERVING)

    def stop_for_good(self) -> None:
        """All of them are NOT_SERVING from now on."""
        self.change(False)
        self._stopped = True

    def change(self, serving: bool) -> None:
        """All of them are SERVING, or are not, and every watcher is told. Nothing, once they stopped for good."""
        if self._stopped:
            return
        self._statuses = dict.fromkeys(self._statuses, _Reply.SERVING if serving else _Reply.NOT_SERVING)
        for change in self._changes:
            change.set()

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The service. A stream of requests each, of which there is one, as in Samples: its length comes before its content."""
        check: Any = self._check
        watch: Any = self._watch
        reply = _Reply.SerializeToString
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(check, None, reply),
            "Watch": grpc.stream_stream_rpc_method_handler(watch, None, reply),
        }
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)

    async def _check(self, _: object, context: Context) -> Any:
        async with self._asked(self._checks, context) as service:
            status = self._statuses.get(service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return _Reply(status=status)

    async def _watch(self, _: object, context: Context) -> None:
        async with self._asked(self._watches, context) as service:
            await self._tell(service, context)

    @asynccontextmanager
    async def _asked(self, shares: Shares, context: Context) -> AsyncIterator[str]:
        """The service that is asked for. Turns what goes wrong into a status."""
        self._note(context)
        address = address_of(context)
        try:
            with shares.one(address):
                raw = await self._bodies.read(context, address, BODY_S)
                try:
                    request = health_pb2.HealthCheckRequest.FromString(raw)
                except DecodeError as error:
                    raise BadParams("the request is not a HealthCheckRequest") from error
                yield request.service
        except SlotStreamError as error:
            await abort(context, error)

    async def _tell(self, service: str, context: Context) -> None:
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
