"""A worker process of a server: takes ingest streams on the server's port, and passes everything else on to the primary.

    python -m slotstream.server.processes.worker < parameters     started by the primary (workers.py), never by hand

It ends when the primary tells it to, or is gone: a signal to the process group means the primary, which has to drain first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from slotstream.server.access.bodies import BODY_S, Bodies
from slotstream.server.access.connections import Connections
from slotstream.server.access.gate import PEERS_ASSUMED, Gate, Shares
from slotstream.server.access.shared_connections import SharedConnections
from slotstream.server.access.tls import Certificates
from slotstream.server.config import ServerConfig
from slotstream.server.disk_threads import DiskThreads
from slotstream.server.health.healthcheck import HealthService
from slotstream.server.ingest.service import IngestService
from slotstream.server.listening import LOCAL_OPTIONS, SERVICES, add_ports, make_server
from slotstream.server.logs import configure_logging
from slotstream.server.malloc import give_back_when_idle
from slotstream.server.metrics import Metrics
from slotstream.server.nixl.readers import start_readers
from slotstream.server.overview.engines import Engines
from slotstream.server.parts import ServerParts
from slotstream.server.processes.remote_store import RemoteStore
from slotstream.server.status import abort
from slotstream.server.waiters import Waiters
from slotstream.v1 import workers_pb2 as pb
from slotstream.v1 import workers_pb2_grpc
from slotstream.wire.errors import ConfigError, SlotStreamError
from slotstream.wire.names import CONTROL_BYTES_MAX

_log = logging.getLogger(__name__)
_REPORT_S = 1.0
_LAST_CALLS_S = 1.0
_CENTURIES_S = 1e9
_RawContext = grpc.aio.ServicerContext[bytes, bytes]
_RAW: Any = None  # No serializer: messages pass through as bytes.


def parameters(config: ServerConfig, worker: int, primary: str, addresses: Sequence[str]) -> bytes:
    """What a worker reads from its stdin: the server's configuration, its own number, the primary's private address."""
    told = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "retention"}  # The primary's business.
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in told.items()}
    listen, *also_listen = addresses
    told_config = {**plain, "listen": listen, "also_listen": also_listen}
    return json.dumps({"config": told_config, "worker": worker, "primary": primary}).encode()


def _config_of(plain: dict[str, Any]) -> ServerConfig:
    paths = {f.name for f in fields(ServerConfig) if "Path" in str(f.type)}
    told: dict[str, Any] = {k: Path(v) if k in paths and v is not None else v for k, v in plain.items()}
    return ServerConfig(**{**told, "also_listen": tuple(told["also_listen"])})


class Worker:
    """One worker, in this event loop."""

    def __init__(self, config: ServerConfig, number: int, primary: str) -> None:
        self._config = config
        self._number = number
        self._primary = primary
        self.metrics = Metrics(None)
        self._engines = Engines()

    async def run(self) -> None:
        """Serve until the primary says otherwise, or is gone."""
        channel = grpc.aio.insecure_channel(self._primary, options=LOCAL_OPTIONS)
        with grpc.insecure_channel(self._primary, options=LOCAL_OPTIONS) as blocking:
            disk_threads, connections = DiskThreads(), Connections(self._config)
            gate = Gate(self._config, note=connections.note, connections=SharedConnections(connections))
            certificates = Certificates(self._config) if self._config.tls_cert is not None else None
            store = RemoteStore(blocking, self._number, self._config.data_dir, self._config.free_bytes_min)
            # The primary wakes who waits for a sample, and applies retention: it hears of each one's beginning and end.
            readers = await asyncio.to_thread(start_readers, self._config, self.metrics)
            parts = ServerParts(self._config, store, disk_threads, self.metrics, Waiters(), gate, self._engines)
            ingest = IngestService(parts, lambda namespace: None, readers)
            health = HealthService(self._config, connections.note, gate.connections)
            health.serve("", *SERVICES)
            server = make_server(self._config)
            server.add_generic_rpc_handlers(
                (ingest.handler(), _PassOn(self._config, channel, gate, self.metrics), health.handler())
            )
            add_ports(server, self._config, certificates)
            await server.start()
            connections.start(self._config.addresses)
            trimming = asyncio.create_task(give_back_when_idle(self.metrics.moved_bytes))
            grace_s = None  # Without a primary nothing can be said of any sample: every stream ends at once.
            try:
                if await self._follow_orders(channel, ingest, health):
                    grace_s = _LAST_CALLS_S
                    ingest.end_streams()
            finally:
                trimming.cancel()
                await server.stop(grace_s)
                await asyncio.to_thread(connections.stop)
                await ingest.idle()
                if readers is not None:
                    await asyncio.to_thread(readers.close)
                await asyncio.to_thread(disk_threads.shutdown)
                await channel.close(None)

    async def _follow_orders(self, channel: grpc.aio.Channel, ingest: IngestService, health: HealthService) -> bool:
        """Report to the primary and do as it says; returns when it wants no more of this process (True), or is gone."""
        stub: Any = workers_pb2_grpc.WorkersStub(channel)  # type: ignore[no-untyped-call]
        orders = stub.Join(self._reports())
        try:
            async for order in orders:
                if order.kind == pb.WorkerOrder.DRAIN:
                    health.stop_for_good()
                    ingest.drain()
                elif order.kind == pb.WorkerOrder.END_STREAMS:
                    return True
                else:
                    health.change(order.kind == pb.WorkerOrder.SERVING)
            _log.error("worker %d: the primary process ended the stream", self._number)
        except grpc.aio.AioRpcError as error:
            _log.error("worker %d: the primary process is gone: %s", self._number, error.details())
        return False

    async def _reports(self) -> AsyncIterator[pb.WorkerReport]:
        while True:
            values = [pb.MetricValue(name=n, labels=labels, value=v) for n, labels, v in self.metrics.values()]
            yield pb.WorkerReport(worker=self._number, metrics=values, engines=self._engines.own())
            await asyncio.sleep(_REPORT_S)


class _PassOn(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # Generic in the stubs alone.
    """Calls of the Samples service, handed to the primary and back as they are, once this process has admitted them."""

    def __init__(self, config: ServerConfig, channel: grpc.aio.Channel, gate: Gate, metrics: Metrics) -> None:
        self._channel = channel
        self._gate = gate
        self._metrics = metrics
        self._bodies = Bodies(CONTROL_BYTES_MAX, connections=gate.connections)
        # Of calls that wait for their messages; those that are whole have finer shares in the primary.
        most, of_peer = config.reads_max + PEERS_ASSUMED * config.requests_max, config.peer_reads_max + config.requests_max
        self._shares = Shares("calls", most, of_peer)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        if not method.startswith("/slotstream.v1.Samples/"):
            return None
        return grpc.stream_stream_rpc_method_handler(self._forwarder(method))

    def _forwarder(self, method: str) -> Callable[[object, Any], Any]:
        async def forward(_: object, context: _RawContext) -> None:
            try:
                session = self._gate.admit(context)
                with self._shares.one(session.peer):
                    await self._forward(method, await self._bodies.read(context, session.caller, BODY_S), context)
            except SlotStreamError as error:
                self._metrics.requests.labels(method.rpartition("/")[2], error.code).inc()
                await abort(context, error)

        return forward

    async def _forward(self, method: str, request: bytes, context: _RawContext) -> None:
        told: Any = self._gate.told_of(context)
        call = self._channel.unary_stream(method, _RAW, _RAW)(request, timeout=_seconds_left(context), metadata=told)
        try:
            async for reply in call:
                await context.write(reply)
        except grpc.aio.AioRpcError as error:
            trailing: Any = error.trailing_metadata() or ()
            await context.abort(error.code(), error.details() or "", tuple(trailing))
        finally:
            call.cancel()


def _seconds_left(context: _RawContext) -> float | None:
    """Of the caller's deadline; None where it has none, which gRPC spells as centuries."""
    left_s = context.time_remaining()
    return left_s if left_s is not None and left_s < _CENTURIES_S else None


def main() -> int:
    told = json.loads(sys.stdin.buffer.read())
    config = _config_of(told["config"])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    configure_logging(config)
    try:
        asyncio.run(Worker(config, told["worker"], told["primary"]).run())
    except ConfigError as error:
        print(f"slotstream serve, worker {told['worker']}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # gRPC's own threads may hold the interpreter's shutdown up; everything of ours is closed.
