"""What happened to which samples, told from server to server: LISTEN and NOTIFY.

A notice is a transaction of its own, after the one that it tells of: those that notify are committed one after the other in all
the database, and senders wait for theirs. It is lost with the connection of who listens, and with the process of who tells. So
who listens again after a loss is told that anything may have happened.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import psycopg

from slotstream.store.catalogue.postgres.address import Address
from slotstream.store.catalogue.postgres.connecting import connect
from slotstream.store.catalogue.postgres.failures import one_line
from slotstream.store.catalogue.postgres.watching import Watch
from slotstream.store.records import SampleKey
from slotstream.wire.errors import IoError

_log = logging.getLogger(__name__)
_CHANNEL = "slotstream"
_EVERYTHING = ""
_QUIET_S = 5.0  # After so long without a notice it is asked whether the session is there.
_ANSWER_S = 10.0
_FIRST_S = 5.0  # How long who begins to listen waits until it does. If it takes longer: then it is told that anything happened.
_PAUSE_S = 0.5  # Between two tries to connect.
_TOLD_MAX = 4096  # Samples; with more than that not yet told, it is that anything happened.

_SEND = (
    "SELECT set_config('synchronous_commit', 'off', true), "
    f"(SELECT count(pg_notify('{_CHANNEL}', said)) FROM unnest(%s::text[]) AS said)"
)

Told = Callable[[SampleKey | None], None]


class Notices:
    """What one thread that writes has to tell."""

    def __init__(self) -> None:
        self._keys: dict[SampleKey, None] = {}
        self._all = False

    def add(self, keys: Iterable[SampleKey]) -> None:
        self._keys.update(dict.fromkeys(keys))
        if len(self._keys) > _TOLD_MAX:
            self._keys.clear()
            self._all = True

    def __bool__(self) -> bool:
        return self._all or bool(self._keys)

    def send(self, db: psycopg.Connection) -> None:
        """All of them; after a failure they are there still. Raises psycopg.Error."""
        said = [_EVERYTHING] if self._all else [str(key) for key in self._keys]
        # A notice that is lost with the machine costs less than a wait for its disk.
        db.execute(_SEND, (said,))
        self._keys.clear()
        self._all = False


class Listener:
    """A thread that listens, over a connection of its own, and tells."""

    def __init__(self, address: Address, watch: Watch, told: Told) -> None:
        self._address, self._watch, self._told = address, watch, told
        self._over, self._listens = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen_forever, name="catalogue-notices", daemon=True)
        self._thread.start()
        self._listens.wait(_FIRST_S)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _listen_forever(self) -> None:
        while not self._over.is_set():
            try:
                with connect(self._address) as db:
                    self._listen(db)
            except (psycopg.Error, IoError) as error:
                _log.info("the catalogue's notices are away: %s", self._address.redacted(one_line(error)))
                self._over.wait(_PAUSE_S)

    def _listen(self, db: psycopg.Connection) -> None:
        """Until the end, or until the connection is lost: that raises psycopg.Error."""
        with self._watch.limit(db, _ANSWER_S):
            db.execute(f"LISTEN {_CHANNEL}")
        self._listens.set()
        self._tell(None)
        quiet_s = 0.0
        while not self._over.is_set():
            found = list(db.notifies(timeout=_PAUSE_S, stop_after=1))
            for notice in found:
                namespace, _, sample_id = notice.payload.partition("/")
                self._tell(SampleKey(namespace, sample_id) if notice.payload else None)
            quiet_s = 0.0 if found else quiet_s + _PAUSE_S
            if quiet_s >= _QUIET_S:
                quiet_s = 0.0
                with self._watch.limit(db, _ANSWER_S):
                    db.execute("SELECT 1")

    def _tell(self, key: SampleKey | None) -> None:
        try:
            self._told(key)
        except Exception:
            _log.exception("who was told of %s failed", key or "everything")
