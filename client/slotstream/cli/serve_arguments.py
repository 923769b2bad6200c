"""The options of `slotstream serve`, and the configuration that they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from slotstream.server.config import LOG_FORMATS, LOG_LEVELS, TRANSPORTS, ServerConfig
from slotstream.store.upkeep.retention import Policy


def _default(name: str) -> object:
    return ServerConfig.__dataclass_fields__[name].default


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option of the server to `parser`."""

    def option(flag: str, field: str, help_text: str, **more: object) -> None:
        value = _default(field)
        shown = "none" if value is None else f"{value:04o}" if field == "socket_mode" else "%(default)s"
        parser.add_argument(flag, dest=field, default=value, help=f"{help_text} (default: {shown})", **more)  # type: ignore[arg-type]

    parser.add_argument(
        "--data",
        dest="data_dir",
        metavar="DIR",
        type=Path,
        required=True,
        help="directory of the sample files and their catalogue; created if missing; one server at a time",
    )
    parser.add_argument(
        "--listen",
        action="append",
        metavar="ADDRESS",
        help="address to serve on: host:port (port 0: any free one) or unix:/path; may be repeated "
        f"(default: {_default('listen')})",
    )
    option("--metrics", "metrics_listen", "address of the Prometheus endpoint, /metrics", metavar="HOST:PORT")
    option(
        "--probes",
        "probes_listen",
        "address of /livez and /readyz for kubelets: plain HTTP, without TLS and tokens",
        metavar="HOST:PORT",
    )
    option("--log-format", "log_format", "one JSON object a line, or text for people", choices=LOG_FORMATS)
    option("--log-level", "log_level", "least severe messages to show", choices=LOG_LEVELS)
    option(
        "--free-bytes-min",
        "free_bytes_min",
        "disk space to leave free: samples that would use it are refused with STORE_FULL",
        metavar="BYTES",
        type=int,
    )
    option(
        "--window-bytes",
        "window_bytes",
        "bytes of rows that a stream may have unacknowledged; over NIXL it is at least a quarter of the pool",
        metavar="BYTES",
        type=int,
    )
    option(
        "--transport",
        "transport",
        "how rows may come: over grpc only, or over NIXL too where it is installed (auto). nixl: do not start without it. "
        "shared: over NIXL only from senders whose memory this process can read, on its own host",
        choices=TRANSPORTS,
    )
    option(
        "--nixl-pool-bytes",
        "nixl_pool_bytes",
        "memory that rows are read into over NIXL, taken when the first sender offers that",
        metavar="BYTES",
        type=int,
    )
    option(
        "--nixl-readers",
        "nixl_readers",
        "processes that read rows over NIXL and share that memory; 0: one for every four cores of a worker, up to four",
        metavar="N",
        type=int,
    )
    option(
        "--ingest-bytes-max",
        "ingest_bytes_max",
        "bytes of rows that all streams together may hold in memory; at this the server reads no more until some are written",
        metavar="BYTES",
        type=int,
    )
    option(
        "--drain-s",
        "drain_s",
        "how long open samples may still be finished after SIGTERM; a second signal ends that at once",
        metavar="SECONDS",
        type=float,
    )
    option(
        "--appear-grace-s",
        "appear_grace_s",
        "how long a waiting read waits for a sample id that nobody has opened yet",
        metavar="SECONDS",
        type=float,
    )
    _add_security_arguments(option)
    _add_limit_arguments(option)
    option(
        "--workers",
        "workers",
        "processes that take ingest streams; the kernel shares connections out among them",
        metavar="N",
        type=int,
    )
    parser.add_argument(
        "--retention",
        metavar="FILE",
        type=Path,
        help="TOML file of the rules by which samples are deleted, see docs/storage.md (default: none, nothing is deleted)",
    )
    option(
        "--accept-clock",
        "accept_clock",
        "the clock is right, though it leapt or samples bear times to come: delete by age again, however much that is",
        action="store_true",
    )
    option(
        "--scrub-every-s",
        "scrub_every_s",
        "how often all that is stored is read and checked in the background; 0: never",
        metavar="SECONDS",
        type=float,
    )
    option("--scrub-bytes-per-s", "scrub_bytes_per_s", "how fast that reads", metavar="BYTES", type=float)
    parser.add_argument(
        "--no-malloc-tuning",
        action="store_true",
        help="do not restart with the glibc malloc settings that make large messages cheaper",
    )


def _add_security_arguments(option: Callable[..., None]) -> None:
    """docs/security.md is about these."""
    option(
        "--tokens",
        "tokens_file",
        "bearer tokens with their namespaces and rights, TOML or JSON; read again when it changes",
        metavar="FILE",
        type=Path,
    )
    option(
        "--tls-cert", "tls_cert", "the server's certificate chain, PEM; read again when it changes", metavar="FILE", type=Path
    )
    option("--tls-key", "tls_key", "its private key, PEM, without a passphrase", metavar="FILE", type=Path)
    option(
        "--tls-client-ca",
        "tls_client_ca",
        "authorities, PEM: peers must show a certificate that one of them signed",
        metavar="FILE",
        type=Path,
    )
    option(
        "--allow-anonymous",
        "allow_anonymous",
        "serve anybody on an address beyond loopback, without --tokens and --tls-client-ca",
        action="store_true",
    )
    option("--socket-mode", "socket_mode", "file mode of the unix socket, octal", metavar="MODE", type=_octal)


def _add_limit_arguments(option: Callable[..., None]) -> None:
    for field, help_text in (
        ("open_samples_max", "samples that one stream may have open"),
        ("peer_open_samples_max", "samples that one peer may have open on all its streams"),
        ("connections_max", "connections at a time; more are closed at once"),
        ("streams_max", "ingest streams at a time"),
        ("peer_streams_max", "ingest streams of one peer at a time"),
        ("reads_max", "reads that may run or wait at a time"),
        ("peer_reads_max", "reads of one peer that may run or wait at a time"),
        ("requests_max", "other requests of one peer at a time; of all peers four times as many"),
    ):
        option("--" + field.replace("_", "-"), field, help_text, metavar="N", type=int)
    for field, help_text in (
        ("hello_s", "how long a new stream may take to say Hello"),
        ("stream_idle_s", "how long a stream with open samples may say nothing before it is ended"),
        ("sample_s_max", "how long a sample may take from its first message to its commit before it fails"),
        ("read_stall_s", "how long a reader may not take its rows before its read is ended"),
    ):
        option("--" + field.replace("_", "-"), field, help_text, metavar="SECONDS", type=float)


def _octal(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an octal file mode") from None


def config_from_arguments(arguments: argparse.Namespace) -> ServerConfig:
    """The configuration that the parsed options make. Raises ConfigError."""
    listen, *also_listen = arguments.listen or [_default("listen")]
    chosen = {**vars(arguments), "listen": listen, "also_listen": tuple(also_listen)}
    values = {name: chosen[name] for name in ServerConfig.__dataclass_fields__}
    if (path := values["retention"]) is None:
        values["retention"] = Policy()
    else:
        values["retention"] = Policy.from_toml(path, free_bytes_min=arguments.free_bytes_min)
    return ServerConfig(**values)
