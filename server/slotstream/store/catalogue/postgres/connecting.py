"""One connection to the database, set up as every one is; and what stands between us and it that may not.

No wait is without an end: for the connection, for a lock, for a peer that is gone. Each query walks an index, and the planner
is told so, since it guesses by statistics, which a new table does not have.
"""

from __future__ import annotations

import psycopg
from psycopg.conninfo import make_conninfo

from slotstream.store.catalogue.postgres.address import Address
from slotstream.store.catalogue.postgres.failures import one_line
from slotstream.wire.errors import ConfigError, IoError

SCHEMA = "slotstream"
_VERSION_MIN = 140000
_CONNECT_S = 5
_LOCK_MS = 5_000
_IDLE_MS = 15_000  # Within a transaction: of a process that stopped, or whose network did. Its locks would hold up all others.
_READ_MS = 30_000
# Where the URL does not say otherwise. An end that is gone shows after about ten seconds.
_OF_THE_NETWORK = {
    "connect_timeout": str(_CONNECT_S),
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "target_session_attrs": "read-write",  # Of several hosts the primary.
    "application_name": "slotstream",
}
_OF_THE_SESSION = {
    "search_path": SCHEMA,
    "default_transaction_isolation": "read committed",
    "lock_timeout": str(_LOCK_MS),
    "idle_in_transaction_session_timeout": str(_IDLE_MS),
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}


def connect(address: Address, *, writes: bool = False) -> psycopg.Connection:
    """A connection that commits each statement by itself, unless it is told BEGIN. Raises IoError.

    `writes`: no statement of it is cut off, since a COMMIT that is would count, and might not survive the server's loss.
    """
    try:
        settings = {**_OF_THE_NETWORK, **address.settings, "client_encoding": "utf8"}
        db = psycopg.connect(make_conninfo(**settings), autocommit=True)
    except psycopg.Error as error:
        raise IoError(f"the catalogue at {address} cannot be reached: {address.redacted(one_line(error))}") from None
    try:
        session = {**_OF_THE_SESSION, "statement_timeout": "0" if writes else str(_READ_MS)}
        calls = ", ".join(["set_config(%s, %s, false)"] * len(session))
        db.execute(f"SELECT {calls}", [text for pair in session.items() for text in pair])
        # What was acknowledged is not lost when the database's machine is.
        db.execute("SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'")
    except psycopg.Error as error:
        db.close()
        raise IoError(f"the catalogue at {address} failed: {address.redacted(one_line(error))}") from None
    return db


def check_server(address: Address) -> None:
    """Raises ConfigError where what answers is none that a catalogue can be in, and IoError."""
    first = connect(address)
    try:
        if first.info.server_version < _VERSION_MIN:
            raise ConfigError(f"the catalogue at {address} needs PostgreSQL {_VERSION_MIN // 10000} or later")
        if first.info.parameter_status("server_encoding") != "UTF8":
            raise ConfigError(f"the catalogue at {address} needs a database whose encoding is UTF8")
        if _is_pooled(address, first):
            raise ConfigError(
                f"between here and the catalogue at {address} is a pooler that gives each transaction another session, such as "
                "PgBouncer in transaction mode: name PostgreSQL itself, or a pool in session mode"
            )
    except psycopg.Error as error:
        raise IoError(f"the catalogue at {address} failed: {address.redacted(one_line(error))}") from None
    finally:
        first.close()


def _is_pooled(address: Address, first: psycopg.Connection) -> bool:
    """Whether two of our connections have one session in turns. Settings, locks and notices of a session would get mixed up."""
    if first.info.backend_pid == _session(first):
        return False  # No pooler names the session's own process when it greets.
    before = _session(first)
    with connect(address) as second:
        second.execute("BEGIN")  # A pooler gives it a session for as long as the transaction lasts: the one that is free.
        return _session(second) == before or _session(first) != before


def _session(db: psycopg.Connection) -> int:
    """The process that serves it at the moment."""
    row = db.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None, "a SELECT without FROM has one row"
    return int(row[0])
