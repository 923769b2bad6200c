"""Starts the server, runs it until a signal, drains it and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import stat
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from slotstream.server.access.connections import Connections
from slotstream.server.access.gate import Gate
from slotstream.server.access.shared_connections import SharedConnections
from slotstream.server.access.tls import Certificates
from slotstream.server.config import ServerConfig
from slotstream.server.disk_threads import DiskThreads
from slotstream.server.health.healthcheck import HealthService
from slotstream.server.health.probes import DiskWatch, Probes, serve_probes
from slotstream.server.housekeeping import Housekeeping
from slotstream.server.ingest.service import IngestService
from slotstream.server.listening import SERVICES, add_ports, has_tls, make_server
from slotstream.server.logs import configure_logging
from slotstream.server.malloc import give_back_when_idle
from slotstream.server.metrics import Metrics, serve_metrics
from slotstream.server.nixl.readers import start_readers
from slotstream.server.overview.history import History
from slotstream.server.parts import ServerParts
from slotstream.server.processes.primary import WorkersService
from slotstream.server.processes.workers import WorkerProcesses
from slotstream.server.pulse import Pulse, beat_forever
from slotstream.server.samples.service import SamplesService
from slotstream.server.samples.status import About
from slotstream.server.service_manager import notify
from slotstream.server.shared_store import open_shared_store
from slotstream.server.version import server_version
from slotstream.server.waiters import Waiters
from slotstream.store.records import SampleKey
from slotstream.store.samples import SampleStore
from slotstream.v1 import workers_pb2
from slotstream.wire.address import is_local, is_socket
from slotstream.wire.errors import ConfigError

_log = logging.getLogger(__name__)
_LAST_CALLS_S = 1.0  # How long calls that should have ended may still take before they are cut off.
_WORKERS_END_S = 5.0  # How long workers may hold the port that outlive a server which was killed.
_LOOK_AGAIN_S = 0.05


def run(config: ServerConfig, *, ready: Callable[[str], None] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. `ready` gets the real address once the server answers.

    What the operator has to change is said in one sentence on stderr, and the exit code is 1.
    """
    configure_logging(config)
    _raise_descriptor_limit()
    try:
        asyncio.run(_serve(config, ready))
    except ConfigError as error:
        print(f"slotstream serve: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: ServerConfig, ready: Callable[[str], None] | None) -> None:
    signals = _Signals()
    server = Server(config)
    await server.start()
    if ready is not None:
        ready(server.address)
    notify("READY=1", f"STATUS=listening on {', '.join(server.addresses)}")
    try:
        await signals.first.wait()
        notify("STOPPING=1", "STATUS=draining")
        await server.drain(hurry=signals.second)
    finally:
        await server.stop()


class _Signals:
    """SIGTERM and SIGINT: the first asks to drain, the second to stop now."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._caught, number)

    def _caught(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
        self.first.set()
        _log.info("%s: %s", number.name, "stopping now" if self.second.is_set() else "draining")


class Server:
    """One server in this event loop: `start`, then `drain` if wanted, then `stop`."""

    def __init__(self, config: ServerConfig, *, store: SampleStore | None = None) -> None:
        """`store`: an open store to serve instead of the configuration's data directory; `stop` closes it."""
        self.config = config
        self.address = config.listen  # The first of `addresses`.
        self.addresses = list(config.addresses)
        self.probes_address: str | None = None
        self.metrics_address: str | None = None
        self._given_store = store
        self._closing = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Open the store and answer. Raises ConfigError, with nothing left behind."""
        try:
            await self._start()
        except BaseException:
            await self._closing.aclose()
            raise

    async def _start(self) -> None:
        config = self.config
        for address in config.addresses:
            await _until_free(address, _WORKERS_END_S if config.workers > 1 else 0.0)
        probes = self._probes = Probes()
        if config.probes_listen is not None:
            self.probes_address, stop_probes = serve_probes(probes, config.probes_listen)
            self._closing.push_async_callback(asyncio.to_thread, stop_probes)
            _log.info("probes on http://%s/livez and /readyz", self.probes_address)
        connections = Connections(config)
        gate = Gate(config, note=connections.note, connections=SharedConnections(connections))
        certificates = Certificates(config) if config.tls_cert is not None else None
        store = await asyncio.to_thread(self._open_store) if self._given_store is None else self._given_store
        if config.accept_clock:
            await asyncio.to_thread(store.lifetimes.accept_clock)
        self.store = store
        self._closing.push_async_callback(asyncio.to_thread, store.close)
        disk_threads = self._disk_threads = DiskThreads()
        self._closing.push_async_callback(asyncio.to_thread, disk_threads.shutdown)
        self.metrics = metrics = Metrics(store)
        if certificates is not None:
            metrics.certificate_expiry.set_function(certificates.expires_unix_s)
        self._waiters = Waiters()
        readers = await asyncio.to_thread(start_readers, config, metrics)
        if readers is not None:
            self._closing.push_async_callback(asyncio.to_thread, readers.close)
        self._housekeeping = Housekeeping(config, store, metrics, self._directory_changed)
        parts = ServerParts(config, store, disk_threads, metrics, self._waiters, gate)
        self._ingest = IngestService(parts, self._housekeeping.touch, readers)
        disk = DiskWatch(store, config.free_bytes_min)
        await asyncio.to_thread(disk.look)
        about = self._about(disk, certificates, nixl=readers is not None)
        self._samples = SamplesService(parts, self._housekeeping, about)
        self._workers = WorkersService(parts, self._housekeeping.touch)
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(store.watch, self._news)
        self._health = HealthService(config, connections.note, gate.connections)
        self._grpc = make_server(config)
        self._grpc.add_generic_rpc_handlers((self._ingest.handler(), self._samples.handler(), self._health.handler()))
        self._health.serve("", *SERVICES)
        self.addresses = self._bind(certificates)
        self.address = self.addresses[0]
        if config.metrics_listen is not None:
            self.metrics_address, stop_metrics = serve_metrics(metrics, config.metrics_listen)
            self._closing.push_async_callback(asyncio.to_thread, stop_metrics)
            _log.info("metrics on http://%s/metrics", self.metrics_address)
        await self._grpc.start()
        connections.start(self.addresses)
        self._closing.push_async_callback(asyncio.to_thread, connections.stop)
        self._housekeeping.start()
        self._closing.push_async_callback(asyncio.to_thread, self._housekeeping.stop)
        self._closing.push_async_callback(self._stop_grpc)
        self._watch(disk_threads)
        trimming = asyncio.create_task(give_back_when_idle(metrics.moved_bytes))
        self._closing.callback(trimming.cancel)
        if config.workers > 1:
            between = Gate(config, between_processes=True)
            workers = WorkerProcesses(config, self.addresses, self._workers, self._samples.handler(between))
            self._closing.push_async_callback(workers.stop)
            await workers.start()
            _log.info("%d processes take ingest streams", config.workers)
        disk.start()
        self._closing.callback(disk.stop)
        probes.disk = disk
        for address in self.addresses:
            tls = "yes" if has_tls(config, address) else "no"
            token = "yes" if config.tokens_file is not None else "no"
            _log.info("slotstream %s (TLS: %s, token: %s) listening on %s", server_version(), tls, token, address)

    def _about(self, disk: DiskWatch, certificates: Certificates | None, *, nixl: bool) -> About:
        """What `Samples.Status` is told of this process."""
        history = History(lambda at: self.metrics.counted(at, disk.free_bytes))
        disk.looked = history.note
        return About(
            history,
            health=lambda: self._probes.readyz()[1],
            disk=lambda: (None, None) if disk.word == "disk" else (disk.free_bytes, disk.disk_bytes),
            processes=lambda: 1 + self._workers.count,
            certificate_expires=(lambda: 0.0) if certificates is None else certificates.expires_unix_s,
            nixl=nixl,
        )

    def _watch(self, disk_threads: DiskThreads) -> None:
        """What `/livez` looks at."""
        beating = asyncio.create_task(beat_forever(disk_threads.loop))
        self._closing.callback(beating.cancel)
        self._probes.pulses = (disk_threads.loop, *self._housekeeping.pulses, Pulse("catalogue", self.store.writer, idle=True))
        self._closing.callback(self._probes.ignore_pulses)

    def _directory_changed(self, healthy: bool) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: the process is ending.
            self._loop.call_soon_threadsafe(self._health.change, healthy)
            self._loop.call_soon_threadsafe(self._workers.change, healthy)

    def _news(self, key: SampleKey | None) -> None:
        """Another server did something to a sample, or may have to any. From a thread of the catalogue's."""
        with contextlib.suppress(RuntimeError):  # The loop is closed: the process is ending.
            if key is None:
                self._loop.call_soon_threadsafe(self._waiters.notify_all)
            else:
                self._loop.call_soon_threadsafe(self._waiters.notify, key)

    def _open_store(self) -> SampleStore:
        if self.config.store is not None:
            return open_shared_store(self.config)
        return SampleStore.open(self.config.data_dir, free_bytes_min=self.config.free_bytes_min)

    def _bind(self, certificates: Certificates | None) -> list[str]:
        config = self.config
        for address in config.addresses:
            if config.allow_anonymous and not is_local(address):
                _log.warning("anybody who reaches %s may read, store and delete all that is here (--allow-anonymous)", address)
            if config.tokens_file is not None and certificates is None and not is_local(address):
                _log.warning(
                    "tokens travel unencrypted to %s: give --tls-cert and --tls-key, or put TLS in front of it", address
                )
        return add_ports(self._grpc, config, certificates)

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Take no more samples, and let open ones and running reads finish within drain_s, or until `hurry` is set."""
        self._probes.draining = True
        self._health.stop_for_good()
        self._ingest.drain()
        self._workers.order(workers_pb2.WorkerOrder.DRAIN)
        deadline = asyncio.get_running_loop().time() + self.config.drain_s
        await _until(self._idle(), deadline, hurry)
        # No sample will arrive any more: whoever waits for one is told, and running reads get the rest of the time.
        self._ingest.end_streams()
        self._workers.order(workers_pb2.WorkerOrder.END_STREAMS)
        await self._idle()
        self._waiters.close()
        await _until(self._samples.idle(), deadline, hurry)

    async def _idle(self) -> None:
        """Returns once no sample is open, here or in a worker."""
        await self._ingest.idle()
        await self._workers.idle()

    async def stop(self) -> None:
        """End every call and close everything. What is still arriving fails as SERVER_DRAINING."""
        await self._closing.aclose()
        _log.info("stopped")

    async def _stop_grpc(self) -> None:
        self._ingest.end_streams()
        self._waiters.close()
        await self._grpc.stop(_LAST_CALLS_S)
        await self._ingest.idle()


async def _until(done: Awaitable[None], deadline: float, hurry: asyncio.Event | None) -> None:
    """Returns when `done`, when the loop's clock reaches `deadline`, or when `hurry` is set."""
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(done)]
    if hurry is not None:
        waits.append(asyncio.ensure_future(hurry.wait()))
    timeout = max(0.0, deadline - asyncio.get_running_loop().time())
    await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _check_listen(listen: str) -> None:
    """Raises ConfigError, saying why, when nothing can listen there; gRPC itself would only say that it failed."""
    if is_socket(listen):
        _check_socket_path(Path(listen.removeprefix("unix:")))
        return
    host, _, port = listen.rpartition(":")
    if port == "0":
        return
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise ConfigError(f"--listen: cannot listen on {listen}: {error.strerror or error}") from error


async def _until_free(listen: str, patience_s: float) -> None:
    """Returns once something can listen there. Raises ConfigError, saying why, when nothing can after `patience_s`."""
    deadline = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            return _check_listen(listen)
        except ConfigError:
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(_LOOK_AGAIN_S)


def _check_socket_path(path: Path) -> None:
    """A socket that nobody listens on is a dead server's, and is removed; anything else at the path stays."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"--listen: {path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
        raise ConfigError(f"--listen: another server is listening on {path}")
    except FileNotFoundError:
        pass
    except ConnectionRefusedError:
        path.unlink()
    except OSError as error:
        raise ConfigError(f"--listen: cannot use {path}: {error.strerror or error}") from error
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError as error:
        raise ConfigError(f"--listen: cannot listen on {path}: {error.strerror or error}") from error


def _raise_descriptor_limit() -> None:
    """Every arriving sample is an open file; the usual soft limit of 1024 is a default for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
