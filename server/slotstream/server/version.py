"""Which slotstream this server is."""

from __future__ import annotations

from importlib import metadata


def server_version() -> str:
    """The installed distribution's version."""
    return metadata.version("slotstream")
