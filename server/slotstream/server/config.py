"""What a server can be told, checked once at start."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from slotstream.store.samples import FREE_BYTES_MIN
from slotstream.wire.address import check_address
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import CHUNK_BYTES_MAX, DEFAULT_ADDRESS, WINDOW_BYTES

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Raises ConfigError, naming the option, for a value that cannot work. Sizes in bytes, times in seconds."""

    data_dir: Path
    listen: str = DEFAULT_ADDRESS  # host:port (0: any free port) or unix:/path.
    metrics_listen: str | None = None  # host:port of the Prometheus endpoint; None: no endpoint.
    log_format: str = "text"
    log_level: str = "info"
    free_bytes_min: int = FREE_BYTES_MIN  # Disk space that samples leave free.
    window_bytes: int = WINDOW_BYTES  # Bytes of chunks a stream may have unacknowledged.
    ingest_bytes_max: int = 256 << 20  # Bytes of chunks that all streams together may hold in memory.
    drain_s: float = 10.0  # How long open samples may still finish after SIGTERM.
    appear_grace_s: float = 5.0  # How long a read waits for an id that nobody has opened yet.
    open_samples_max: int = 4096  # Samples open at a time on one stream.
    reads_max: int = 1024  # Reads running or waiting at a time.

    def __post_init__(self) -> None:
        _check_address("--listen", self.listen)
        if self.metrics_listen is not None:
            if self.metrics_listen.startswith("unix:"):
                raise ConfigError("--metrics takes host:port; Prometheus cannot scrape a unix socket")
            _check_address("--metrics", self.metrics_listen)
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"--log-format {self.log_format!r} is not one of {', '.join(LOG_FORMATS)}")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"--log-level {self.log_level!r} is not one of {', '.join(LOG_LEVELS)}")
        _at_least("--free-bytes-min", self.free_bytes_min, 0)
        _at_least("--window-bytes", self.window_bytes, CHUNK_BYTES_MAX)
        _at_least("--ingest-bytes-max", self.ingest_bytes_max, self.window_bytes)
        _at_least("--drain-s", self.drain_s, 0)
        _at_least("--appear-grace-s", self.appear_grace_s, 0)
        _at_least("--open-samples-max", self.open_samples_max, 1)
        _at_least("--reads-max", self.reads_max, 1)

    @property
    def log_level_number(self) -> int:
        return logging.getLevelNamesMapping()[self.log_level.upper()]


def _check_address(option: str, address: str) -> None:
    try:
        check_address(address, any_port=True)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _at_least(option: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{option} must be at least {least}, not {value}")
