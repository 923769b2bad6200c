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
        self._child.ask("watch", names)

    def seen(self, committed: Collection[str]) -> dict[str, int]:
        """Sample id -> Unix ns at which its first row had been read, of those that were watched and committed."""
        found: dict[str, int] = self._child.ask("seen", set(committed))
        return found


def serve_readers(connection: Connection, server: str) -> None:
    """Main function of that process: told to watch samples it reads them, and says later when it had."""
    at: dict[str, int] = {}
    threads: dict[str, threading.Thread] = {}
    with connect(server) as client:
        for what, names in questions(connection):
            if what == "seen":
                watched = threads.keys() & names  # Nobody waits for a sample that will not come.
                for name in watched:
                    threads[name].join(WAIT_S)
                connection.send({name: at[name] for name in watched & at.keys()})
                continue
            at = {}
            threads = {name: threading.Thread(target=_read, args=(client, name, at), daemon=True) for name in names}
            for thread in threads.values():
                thread.start()
            connection.send(len(names))


def _read(client: Client, name: str, at: dict[str, int]) -> None:
    with suppress(SlotStreamError):  # A sample that fails is counted elsewhere.
        with client.read(name, start=0, stop=1, wait_s=WAIT_S) as reader:
            next(iter(reader))
        at[name] = time.time_ns()
