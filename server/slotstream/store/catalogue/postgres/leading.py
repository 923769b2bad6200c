"""Which of the servers is the leader: the one whose session has a lock. Each leader's term has a number, and it only grows.

The lock goes with its session, which the leader may notice late. So each of its statements asks, in its own transaction,
whether the term is still the last one, and holds on to the answer until it is committed: the next term begins after that.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import psycopg

from slotstream.store.catalogue.postgres.address import Address
from slotstream.store.catalogue.postgres.connecting import connect
from slotstream.store.catalogue.postgres.failures import failure
from slotstream.store.catalogue.postgres.watching import Watch

_ANSWER_S = 10.0
_LOCK = "SELECT pg_try_advisory_lock(hashtext('slotstream leader'))"


class Leading:
    """Of one server. Thread safe."""

    def __init__(self, address: Address, watch: Watch) -> None:
        self._address, self._watch = address, watch
        self._db: psycopg.Connection | None = None
        self._term = 0
        self._asked = threading.Lock()  # Guards both.

    def lead(self) -> int:
        """The term in which this server leads, from now on if nobody does; 0 where another one leads. Raises IoError."""
        with self._asked:
            try:
                if self._db is not None and self._still_leads(self._db):
                    return self._term
                return self._begin()
            except psycopg.Error as error:
                self._drop()
                raise failure(error) from None

    def close(self) -> None:
        """The next server may lead."""
        with self._asked:
            self._drop()

    def _still_leads(self, db: psycopg.Connection) -> bool:
        with suppress(psycopg.Error), self._watch.limit(db, _ANSWER_S):
            if term_of(db) == self._term:
                return True
        self._drop()  # The session is gone; or the database is an older one, or another.
        return False

    def _begin(self) -> int:
        db = connect(self._address)
        try:
            with self._watch.limit(db, _ANSWER_S):
                row = db.execute(_LOCK).fetchone()
                if row is not None and row[0]:
                    row = db.execute("UPDATE leader SET term = term + 1, since = now() RETURNING term").fetchone()
                    assert row is not None, "the table has one row"
                    self._db, self._term = db, int(row[0])
                    return self._term
        finally:
            if self._db is None:
                db.close()
        return 0

    def _drop(self) -> None:
        db, self._db, self._term = self._db, None, 0
        if db is not None:
            with suppress(psycopg.Error):
                db.close()


def term_of(db: psycopg.Connection, *, hold: bool = False) -> int:
    """The last term. `hold`: no other begins before the transaction is over."""
    row = db.execute(f"SELECT term FROM leader{' FOR SHARE' if hold else ''}").fetchone()
    assert row is not None, "the table has one row"
    return int(row[0])
