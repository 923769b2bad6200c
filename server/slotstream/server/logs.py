"""Logging of the server process: text for people, or one JSON object a line. Never rows, token ids or prompts."""

from __future__ import annotations

import logging
import sys
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from slotstream.server.config import ServerConfig


def configure_logging(config: ServerConfig) -> None:
    """Send the process's log to stderr. For the program `slotstream serve` alone: a library does not do this."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        fields = "%(asctime)s %(levelname)s %(name)s %(message)s"
        renamed = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter(fields, rename_fields=renamed, datefmt="%Y-%m-%dT%H:%M:%S%z"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level_number)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)


def failure_fields(event: str, code: str, **more: str | int | float | None) -> dict[str, Any]:
    """What a log collector can search for in the line of a failure: the `extra` of a call of `logging`.

    `event` is a stable word; `more` are of namespace, sample_id, peer, engine, bytes and ms. What is None is left out.
    """
    told = {"event": event, "code": code, **more}
    return {name: value for name, value in told.items() if value is not None}


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether what gRPC reports is more than a peer that left before the end of its call could be told to it.

    gRPC keeps silent of that itself, unless it notices the departure a moment later than the failure (grpcio 1.76,
    _cython/_cygrpc/aio/server.pyx.pxi, _handle_exceptions): then it logs a traceback.
    """
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"
