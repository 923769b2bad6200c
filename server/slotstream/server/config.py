"""The server's configuration, checked once at start."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from slotstream.common.checks import check_number
from slotstream.store.samples import FREE_BYTES_MIN
from slotstream.store.upkeep.retention import Policy
from slotstream.wire.address import check_address, is_local, is_socket
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import CHUNK_BYTES_MAX, DEFAULT_ADDRESS, WINDOW_BYTES
from slotstream.wire.nixl import check_transport

_NUMBER_MAX = (1 << 62) - 1  # What messages and the operating system take.
_SECONDS_MAX = 365 * 86400
LOG_FORMATS = ("text", "json")
TRANSPORTS = ("auto", "grpc", "nixl", "shared")
LOG_LEVELS = ("debug", "info", "warning", "error")
_COUNTS = (
    "open_samples_max",
    "reads_max",
    "connections_max",
    "streams_max",
    "peer_streams_max",
    "peer_open_samples_max",
    "peer_reads_max",
    "requests_max",
)
WORKERS_MAX = 64
NIXL_POOL_BYTES_MIN = 4 * CHUNK_BYTES_MAX
_PATIENCES = ("hello_s", "stream_idle_s", "sample_s_max", "read_stall_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Raises ConfigError, naming the option, for a value that cannot work. Sizes in bytes, times in seconds."""

    data_dir: Path
    listen: str = DEFAULT_ADDRESS  # host:port (0: any free port) or unix:/path.
    also_listen: tuple[str, ...] = ()  # More of them.
    metrics_listen: str | None = None  # host:port of the Prometheus endpoint; None: no endpoint.
    probes_listen: str | None = None  # host:port of /livez and /readyz; None: nowhere.
    log_format: str = "text"
    log_level: str = "info"
    free_bytes_min: int = FREE_BYTES_MIN  # Disk space that samples leave free.
    window_bytes: int = WINDOW_BYTES  # Bytes of chunks a stream may have unacknowledged.
    transport: str = "auto"  # How rows may come: grpc, or over NIXL too; nixl: only start if that works; shared: see there.
    nixl_pool_bytes: int = 256 << 20  # What chunks are read into over NIXL; allocated when the first sender offers it.
    nixl_readers: int = 0  # Processes that read over NIXL, in each of `workers`; 0: as many as the cores are good for.
    ingest_bytes_max: int = 256 << 20  # Bytes of chunks that all streams together may hold in memory.
    drain_s: float = 10.0  # How long open samples may still finish after SIGTERM.
    appear_grace_s: float = 5.0  # How long a read waits for an id that nobody has opened yet.
    open_samples_max: int = 4096  # Samples open at a time on one stream.
    reads_max: int = 1024  # Reads running or waiting at a time.
    tokens_file: Path | None = None  # Bearer tokens, their namespaces and rights; None: no token is asked for.
    tls_cert: Path | None = None  # PEM certificate chain; None: no TLS.
    tls_key: Path | None = None
    tls_client_ca: Path | None = None  # PEM authorities; peers then need a certificate signed by one of them.
    allow_anonymous: bool = False  # Serve anybody who reaches an address beyond loopback.
    socket_mode: int = 0o600  # Of the unix socket.
    connections_max: int = 4096  # Connections at a time; each is an open file.
    streams_max: int = 256  # Ingest streams at a time.
    peer_streams_max: int = 128  # Of one peer: one token, else one certificate name, else all who need neither.
    peer_open_samples_max: int = 8192  # Samples of one peer arriving at a time, on all its streams.
    peer_reads_max: int = 512  # Reads of one peer running or waiting at a time.
    requests_max: int = 1024  # Stat, List, Delete and Verify calls of one peer at a time; four times as many of all.
    hello_s: float = 10.0  # How long a new stream may take to say Hello.
    stream_idle_s: float = 3600.0  # How long a stream with open samples may say nothing.
    sample_s_max: float = 86400.0  # How long a sample may take from its open to its commit.
    workers: int = 1  # Processes that take ingest streams.
    read_stall_s: float = 300.0  # How long a reader may not take what it asked for.
    retention: Policy = field(default_factory=Policy)  # Which samples may be deleted; by default none.
    accept_clock: bool = False  # The clock is right, whatever the samples' times or a long stop say.
    scrub_every_s: float = 7 * 86400.0  # How often everything stored is read and checked; 0: never.
    scrub_bytes_per_s: float = float(32 << 20)  # How fast.

    def __post_init__(self) -> None:
        for address in self.addresses:
            _check_address("--listen", address)
            if self.addresses.count(address) > 1 and not address.endswith(":0"):
                raise ConfigError(f"--listen: {address} is given twice")
        for option, listen, caller in (
            ("--metrics", self.metrics_listen, "Prometheus"),
            ("--probes", self.probes_listen, "a kubelet"),
        ):
            if listen is not None and is_socket(listen):
                raise ConfigError(f"{option} takes host:port; {caller} cannot reach a unix socket")
            if listen is not None:
                _check_address(option, listen)
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"--log-format {self.log_format!r} is not one of {', '.join(LOG_FORMATS)}")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"--log-level {self.log_level!r} is not one of {', '.join(LOG_LEVELS)}")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"--transport {self.transport!r} is not one of {', '.join(TRANSPORTS)}")
        check_transport("--transport", self.transport)
        try:
            self._check_numbers()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._check_workers()
        self._check_security()

    def _check_numbers(self) -> None:
        """Raises ValueError."""
        check_number("--free-bytes-min", self.free_bytes_min, 0, _NUMBER_MAX)
        check_number("--window-bytes", self.window_bytes, CHUNK_BYTES_MAX, _NUMBER_MAX)
        check_number("--nixl-pool-bytes", self.nixl_pool_bytes, NIXL_POOL_BYTES_MIN, _NUMBER_MAX)
        check_number("--nixl-readers", self.nixl_readers, 0, self.nixl_pool_bytes // NIXL_POOL_BYTES_MIN)
        check_number("--ingest-bytes-max", self.ingest_bytes_max, self.window_bytes, _NUMBER_MAX)
        check_number("--drain-s", self.drain_s, 0, _SECONDS_MAX)
        check_number("--appear-grace-s", self.appear_grace_s, 0, _SECONDS_MAX)
        for name in _COUNTS:
            check_number("--" + name.replace("_", "-"), getattr(self, name), 1, _NUMBER_MAX)
        for name in _PATIENCES:
            check_number("--" + name.replace("_", "-"), getattr(self, name), 0.1, _SECONDS_MAX)
        check_number("--scrub-every-s", self.scrub_every_s, 0, _SECONDS_MAX)
        check_number("--scrub-bytes-per-s", self.scrub_bytes_per_s, 1, _NUMBER_MAX)

    def _check_workers(self) -> None:
        if not 1 <= self.workers <= WORKERS_MAX:
            raise ConfigError(f"--workers must be 1 to {WORKERS_MAX}, not {self.workers}")
        if self.workers > 1 and any(map(is_socket, self.addresses)):
            raise ConfigError("--workers: only one process can listen on a unix socket; give --listen host:port")

    def _check_security(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: give both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key: client certificates are a part of TLS")
        if not 0 <= self.socket_mode <= 0o777:
            raise ConfigError(f"--socket-mode must be 0 to 0777, not {self.socket_mode:o}")
        if self.tls_cert is not None and all(map(is_socket, self.addresses)):
            raise ConfigError("--tls-cert: a unix socket has no TLS; --socket-mode says who may use it")
        if self.allow_anonymous and (self.tokens_file is not None or self.tls_client_ca is not None):
            raise ConfigError("--allow-anonymous contradicts --tokens and --tls-client-ca: drop it, or them")
        if self.tokens_file or self.tls_client_ca or self.allow_anonymous:
            return
        for address in (address for address in self.addresses if not is_local(address)):
            raise ConfigError(
                f"--listen: {address} can be reached from other machines: give --tokens or --tls-client-ca, "
                "or --allow-anonymous to let anybody in who reaches it"
            )

    @property
    def nixl_window_bytes(self) -> int:
        """What a stream may have unacknowledged over NIXL: several samples, for each is read and written by one thread."""
        return max(self.window_bytes, min(self.nixl_pool_bytes, self.ingest_bytes_max) // 2)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Everywhere that it listens."""
        return (self.listen, *self.also_listen)

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach it."""
        return all(map(is_local, self.addresses))

    @property
    def log_level_number(self) -> int:
        return logging.getLevelNamesMapping()[self.log_level.upper()]


def _check_address(option: str, address: str) -> None:
    try:
        check_address(address, any_port=True)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
