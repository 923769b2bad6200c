"""Which slotstream this server is."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache  # Each stream is told.
def server_version() -> str:
    """The installed distribution's version."""
    return metadata.version("slotstream")
