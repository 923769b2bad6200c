"""Where the connector's log lines go."""

from __future__ import annotations

import logging

CONNECTOR_LOGGER = "vllm.slotstream"  # The root of all of them.


def connector_logger(name: str) -> logging.Logger:
    """A logger below vLLM's own: vLLM sets up handlers for that tree only, with the process's name in front of each line."""
    return logging.getLogger(f"vllm.{name}")
