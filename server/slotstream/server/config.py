"""The server's configuration, checked once at start."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from slotstream.common.checks import check_number
from slotstream.store.upkeep.retention import Policy
from slotstream.wire.address import DEFAULT_PORT, check_address, is_local, is_socket
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import CHUNK_BYTES_MAX, DEFAULT_ADDRESS, WINDOW_BYTES
from slotstream.wire.nixl import check_transport

_NUMBER_MAX = (1 << 62) - 1  # What messages and the operating system take.
_SECONDS_MAX = 365 * 86400
WORKERS_MAX = 64
NO_DATA = Path()  # By identity: nobody named a directory.
NIXL_POOL_BYTES_MIN = 4 * CHUNK_BYTES_MAX


def _option(flag: str, help: str, unit: str | None = None, **more: Any) -> dict[str, Any]:
    """What is said of a field that is an option of the server; `unit`: of its value, None for a switch and for choices.

    `choices`: the words it may be. `least` and `most`: bounds of a number. `octal`: how a number is written.
    `shown`: the default in words. `more`: the field of what comes after the first, where a flag may be repeated.
    """
    return {"flag": flag, "help": help, "unit": unit, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Raises ConfigError, naming the option, for a value that cannot work. Sizes in bytes, times in seconds.

    A field is the one place of an option: `--help`, docs/reference.md and the checks of its value are made of it, in order.
    """

    data_dir: Path = field(
        default=NO_DATA,
        metadata=_option(
            "--data",
            "directory of the sample files and their catalogue; created if missing; one server at a time",
            "DIR",
            shown="required, or --store",
        ),
    )
    store: str | None = field(
        default=None,
        metadata=_option(
            "--store",
            "s3://BUCKET/PREFIX of samples as objects, for any number of servers; needs --catalogue, --scratch",
            "URL",
        ),
    )
    catalogue: str | None = field(
        default=None,
        repr=False,  # Passwords may stand in it.
        metadata=_option(
            "--catalogue",
            "postgresql://USER@HOST:PORT/DATABASE of the samples of --store; no password on the command line",
            "URL",
        ),
    )
    scratch: Path | None = field(
        default=None,
        metadata=_option(
            "--scratch", "directory where rows land on their way to --store; emptied at start; each server has its own", "DIR"
        ),
    )
    experimental: bool = field(
        default=False, metadata=_option("--experimental", "use what may still change; nothing needs it in this version")
    )
    listen: str = field(
        default=DEFAULT_ADDRESS,
        metadata=_option(
            "--listen",
            "address to serve on: host:port (port 0: any free one) or unix:/path; may be repeated",
            "ADDRESS",
            more="also_listen",
        ),
    )
    also_listen: tuple[str, ...] = ()
    metrics_listen: str | None = field(
        default=None, metadata=_option("--metrics", "address of the Prometheus endpoint, /metrics", "HOST:PORT")
    )
    probes_listen: str | None = field(
        default=None,
        metadata=_option(
            "--probes", "address of /livez and /readyz for kubelets: plain HTTP, without TLS and tokens", "HOST:PORT"
        ),
    )
    log_format: str = field(
        default="text",
        metadata=_option("--log-format", "one JSON object a line, or text for people", choices=("text", "json")),
    )
    log_level: str = field(
        default="info",
        metadata=_option("--log-level", "least severe messages to show", choices=("debug", "info", "warning", "error")),
    )
    free_bytes_min: int = field(
        default=1 << 30,
        metadata=_option(
            "--free-bytes-min",
            "disk space to leave free: samples that would use it are refused with STORE_FULL",
            "BYTES",
            least=0,
        ),
    )
    window_bytes: int = field(
        default=WINDOW_BYTES,
        metadata=_option(
            "--window-bytes",
            "bytes of rows that a stream may have unacknowledged; over NIXL it is at least a quarter of the pool",
            "BYTES",
            least=CHUNK_BYTES_MAX,
        ),
    )
    transport: str = field(
        default="auto",
        metadata=_option(
            "--transport",
            "how rows may come: over grpc only, or over NIXL too where it is installed (auto). nixl: do not start without it. "
            "shared: over NIXL only from senders whose memory this process can read, on its own host",
            choices=("auto", "grpc", "nixl", "shared"),
        ),
    )
    nixl_pool_bytes: int = field(
        default=256 << 20,
        metadata=_option(
            "--nixl-pool-bytes",
            "memory that rows are read into over NIXL, taken as rows come",
            "BYTES",
            least=NIXL_POOL_BYTES_MIN,
        ),
    )
    nixl_readers: int = field(
        default=0,
        metadata=_option(
            "--nixl-readers",
            "processes that read rows over NIXL and share that memory; 0: one for every four cores of a worker, up to four",
            "N",
        ),
    )
    ingest_bytes_max: int = field(
        default=256 << 20,
        metadata=_option(
            "--ingest-bytes-max",
            "bytes of rows that all streams together may hold in memory; "
            "at this the server reads no more until some are written",
            "BYTES",
        ),
    )
    drain_s: float = field(
        default=10.0,
        metadata=_option(
            "--drain-s",
            "how long open samples may still be finished after SIGTERM; a second signal ends that at once",
            "SECONDS",
            least=0,
            most=_SECONDS_MAX,
        ),
    )
    appear_grace_s: float = field(
        default=5.0,
        metadata=_option(
            "--appear-grace-s",
            "how long a waiting read waits for a sample id that nobody has opened yet",
            "SECONDS",
            least=0,
            most=_SECONDS_MAX,
        ),
    )

    # Who may: docs/security.md is about these, and about the limits below.
    tokens_file: Path | None = field(
        default=None,
        metadata=_option(
            "--tokens", "bearer tokens with their namespaces and rights, TOML or JSON; read again when it changes", "FILE"
        ),
    )
    tls_cert: Path | None = field(
        default=None,
        metadata=_option("--tls-cert", "the server's certificate chain, PEM; read again when it changes", "FILE"),
    )
    tls_key: Path | None = field(
        default=None, metadata=_option("--tls-key", "its private key, PEM, without a passphrase", "FILE")
    )
    tls_client_ca: Path | None = field(
        default=None,
        metadata=_option("--tls-client-ca", "authorities, PEM: peers must show a certificate that one of them signed", "FILE"),
    )
    allow_anonymous: bool = field(
        default=False,
        metadata=_option(
            "--allow-anonymous", "serve anybody on an address beyond loopback, without --tokens and --tls-client-ca"
        ),
    )
    socket_mode: int = field(
        default=0o600, metadata=_option("--socket-mode", "file mode of the unix socket, octal", "MODE", octal=True)
    )

    # Limits. A peer is one token, else one certificate name, else all who need neither.
    open_samples_max: int = field(
        default=4096, metadata=_option("--open-samples-max", "samples that one stream may have open", "N", least=1)
    )
    peer_open_samples_max: int = field(
        default=8192,
        metadata=_option("--peer-open-samples-max", "samples that one peer may have open on all its streams", "N", least=1),
    )
    connections_max: int = field(
        default=4096, metadata=_option("--connections-max", "connections at a time; more are closed at once", "N", least=1)
    )
    streams_max: int = field(default=256, metadata=_option("--streams-max", "ingest streams at a time", "N", least=1))
    peer_streams_max: int = field(
        default=128, metadata=_option("--peer-streams-max", "ingest streams of one peer at a time", "N", least=1)
    )
    reads_max: int = field(default=1024, metadata=_option("--reads-max", "reads that may run or wait at a time", "N", least=1))
    peer_reads_max: int = field(
        default=512, metadata=_option("--peer-reads-max", "reads of one peer that may run or wait at a time", "N", least=1)
    )
    requests_max: int = field(
        default=1024,
        metadata=_option(
            "--requests-max", "other requests of one peer at a time; of all peers four times as many", "N", least=1
        ),
    )
    hello_s: float = field(
        default=10.0,
        metadata=_option("--hello-s", "how long a new stream may take to say Hello", "SECONDS", least=0.1, most=_SECONDS_MAX),
    )
    stream_idle_s: float = field(
        default=3600.0,
        metadata=_option(
            "--stream-idle-s",
            "how long a stream with open samples may say nothing before it is ended",
            "SECONDS",
            least=0.1,
            most=_SECONDS_MAX,
        ),
    )
    sample_s_max: float = field(
        default=86400.0,
        metadata=_option(
            "--sample-s-max",
            "how long a sample may take from its first message to its commit before it fails",
            "SECONDS",
            least=0.1,
            most=_SECONDS_MAX,
        ),
    )
    read_stall_s: float = field(
        default=300.0,
        metadata=_option(
            "--read-stall-s",
            "how long a reader may not take its rows before its read is ended",
            "SECONDS",
            least=0.1,
            most=_SECONDS_MAX,
        ),
    )

    workers: int = field(
        default=1,
        metadata=_option("--workers", "processes that take ingest streams; the kernel shares connections out among them", "N"),
    )
    retention: Policy = field(
        default_factory=Policy,
        metadata=_option(
            "--retention",
            "TOML file of the rules by which samples are deleted, see docs/storage.md",
            "FILE",
            shown="none, nothing is deleted",
        ),
    )
    retention_grace_s: float = field(
        default=60.0,
        metadata=_option(
            "--retention-grace-s",
            "how long rules that differ from the last run's delete nothing, while the log says what they would delete",
            "SECONDS",
            least=0,
            most=_SECONDS_MAX,
        ),
    )
    accept_clock: bool = field(
        default=False,
        metadata=_option(
            "--accept-clock",
            "the clock is right, though it leapt or samples bear times to come: delete by age again, however much that is",
        ),
    )
    scrub_every_s: float = field(
        default=7 * 86400.0,
        metadata=_option(
            "--scrub-every-s",
            "how often all that is stored is read and checked in the background; 0: never",
            "SECONDS",
            least=0,
            most=_SECONDS_MAX,
        ),
    )
    scrub_bytes_per_s: float = field(
        default=float(32 << 20), metadata=_option("--scrub-bytes-per-s", "how fast that reads", "BYTES", least=1)
    )

    def __post_init__(self) -> None:
        for address in self.addresses:
            _check_address("--listen", address)
            if self.addresses.count(address) > 1 and not address.endswith(":0"):
                raise ConfigError(f"--listen: {address} is given twice")
        for option, listen, caller, port in (
            ("--metrics", self.metrics_listen, "Prometheus", 9464),
            ("--probes", self.probes_listen, "a kubelet", 9465),
        ):
            if listen is not None and is_socket(listen):
                raise ConfigError(f"{option} takes host:port; {caller} cannot reach a unix socket")
            if listen is not None:
                _check_address(option, listen, port)
        for told in fields(self):
            choices, value = told.metadata.get("choices"), getattr(self, told.name)
            if choices and value not in choices:
                raise ConfigError(f"{told.metadata['flag']} {value!r} is not one of {', '.join(choices)}")
        check_transport("--transport", self.transport)
        try:
            self._check_numbers()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._check_workers()
        self._check_store()
        self._check_security()

    def _check_numbers(self) -> None:
        """Raises ValueError."""
        for told in fields(self):
            if (least := told.metadata.get("least")) is not None:
                most = told.metadata.get("most", _NUMBER_MAX)
                check_number(told.metadata["flag"], getattr(self, told.name), least, most)
        check_number("--nixl-readers", self.nixl_readers, 0, self.nixl_pool_bytes // NIXL_POOL_BYTES_MIN)
        check_number("--ingest-bytes-max", self.ingest_bytes_max, self.window_bytes, _NUMBER_MAX)

    def _check_workers(self) -> None:
        if not 1 <= self.workers <= WORKERS_MAX:
            raise ConfigError(f"--workers must be 1 to {WORKERS_MAX}, not {self.workers}")
        if self.workers > 1 and any(map(is_socket, self.addresses)):
            raise ConfigError("--workers: only one process can listen on a unix socket; give --listen host:port")

    def _check_store(self) -> None:
        has_store, has_data = self.store is not None, self.data_dir is not NO_DATA
        for is_wrong, why in (
            (not has_store and self.catalogue is not None, "--catalogue belongs to --store: give --store too"),
            (not has_store and self.scratch is not None, "--scratch belongs to --store: give --store too"),
            (not has_store and not has_data, "give --data, or SLOTSTREAM_SERVE_DATA, or data in the file of --config"),
            (has_store and has_data, "--data and --store exclude each other: samples are files, or objects"),
            (has_store and self.catalogue is None, "--store needs --catalogue too"),
            (has_store and self.scratch is None, "--store needs --scratch too"),
            (has_store and self.workers > 1, "--workers: with --store one process takes all streams; start more servers"),
            (
                has_store and self.retention.free_bytes_target > 0 and not self.retention.bucket_bytes_max,
                "--retention: with --store free_bytes_target needs bucket_bytes_max: what the bucket may hold",
            ),
            (
                not has_store and self.retention.bucket_bytes_max > 0,
                "--retention: bucket_bytes_max belongs to --store; of a disk free_bytes_target is enough",
            ),
        ):
            if is_wrong:
                raise ConfigError(why)

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


def _check_address(option: str, address: str, usual_port: int = DEFAULT_PORT) -> None:
    try:
        check_address(address, any_port=True, usual_port=usual_port)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
