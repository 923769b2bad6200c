"""Readers that wait for samples from before they exist, in a process of their own: vLLM's has its interpreter to itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from children import Child, questions

from slotstream.client import Client, SlotStreamError, connect

WAIT_S = 120.0


class Readers:
    """Notes when each sample could be read."""

    def __init__(self, server: str) -> None:
        self._child = Child("readers", serve_readers, server, tuned=False)

    def watch(self, names: Sequence[str]) -> None:
        """Wait for these samples; those before are forgotten."""
        self._child.ask(names)

    def seen(self, committed: Collection[str]) -> dict[str, int]:
        """Sample id -> Unix ns at which its first row had been read, of those that were watched and committed."""
        found: dict[str, int] = self._child.ask(None)
        return {name: at for name, at in found.items() if name in committed}


def serve_readers(connection: Connection, server: str) -> None:
    """Main function of that process: told names it reads their samples, asked with None it says when it had."""
    at: dict[str, int] = {}
    threads: list[threading.Thread] = []
    with connect(server) as client:
        for (names,) in questions(connection):
            if names is None:
                for thread in threads:
                    thread.join(WAIT_S)
                connection.send(at)
                continue
            at = {}
            threads = [threading.Thread(target=_read, args=(client, name, at), daemon=True) for name in names]
            for thread in threads:
                thread.start()
            connection.send(len(names))


def _read(client: Client, name: str, at: dict[str, int]) -> None:
    with suppress(SlotStreamError):  # A sample that fails is counted elsewhere.
        with client.read(name, start=0, stop=1, wait_s=WAIT_S) as reader:
            next(iter(reader))
        at[name] = time.time_ns()
