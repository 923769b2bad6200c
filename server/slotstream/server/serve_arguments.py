"""The options of `slotstream serve`, and the configuration that they make."""

from __future__ import annotations

import argparse
from pathlib import Path

from slotstream.server.config import LOG_FORMATS, LOG_LEVELS, ServerConfig


def _default(name: str) -> object:
    return ServerConfig.__dataclass_fields__[name].default


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option of the server to `parser`."""

    def option(flag: str, field: str, help_text: str, **more: object) -> None:
        value = _default(field)
        shown = "none" if value is None else "%(default)s"
        parser.add_argument(flag, dest=field, default=value, help=f"{help_text} (default: {shown})", **more)  # type: ignore[arg-type]

    parser.add_argument(
        "--data",
        dest="data_dir",
        metavar="DIR",
        type=Path,
        required=True,
        help="directory of the sample files and their catalogue; created if missing; one server at a time",
    )
    option("--listen", "listen", "address to serve on: host:port (port 0: any free one) or unix:/path", metavar="ADDRESS")
    option("--metrics", "metrics_listen", "address of the Prometheus endpoint, /metrics", metavar="HOST:PORT")
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
        "bytes of rows that a stream may have in flight before the server acknowledged them",
        metavar="BYTES",
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
    option("--open-samples-max", "open_samples_max", "samples that one stream may have open", metavar="N", type=int)
    option("--reads-max", "reads_max", "reads that may run or wait at a time", metavar="N", type=int)
    parser.add_argument(
        "--no-malloc-tuning",
        action="store_true",
        help="do not restart with the glibc malloc settings that make large messages cheaper",
    )


def config_from_arguments(arguments: argparse.Namespace) -> ServerConfig:
    """The configuration that the parsed options make. Raises ConfigError."""
    return ServerConfig(**{name: getattr(arguments, name) for name in ServerConfig.__dataclass_fields__})
