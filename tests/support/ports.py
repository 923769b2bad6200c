"""A port for a server that is started more than once, or in a process of its own."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """One that nobody listens on now. Below those that the kernel gives to connections, one of which could take it."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := random.randrange(10_000, 30_000)))
            return port
