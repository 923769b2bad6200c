"""A limit on every wait for the database, also where its machine still answers: a process that was stopped says nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg

_LOOK_S = 0.5


class Watch:
    """Cuts connections that were waited on for too long: for who waits they are lost then. Thread safe."""

    def __init__(self) -> None:
        self._until: dict[psycopg.Connection, float] = {}
        self._changed = threading.Condition()  # Guards it, and the end.
        self._over = False
        self._thread = threading.Thread(target=self._look, name="catalogue-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def limit(self, db: psycopg.Connection, seconds: float) -> Iterator[None]:
        """What is asked of `db` in here takes no longer than so many seconds, and some."""
        with self._changed:
            self._until[db] = time.monotonic() + seconds
        try:
            yield
        finally:
            with self._changed:
                self._until.pop(db, None)

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def _look(self) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: self._over, _LOOK_S):
                now = time.monotonic()
                # Under the lock: nobody closes a connection whose wait is not over, so its number is its own.
                for db in [db for db, until in self._until.items() if until < now]:
                    del self._until[db]
                    _cut(db)


def _cut(db: psycopg.Connection) -> None:
    """Both ways, while somebody waits."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(db.fileno())) as own:
        own.shutdown(socket.SHUT_RDWR)
