"""What an error of PostgreSQL means: trouble that may pass, a disk that is full, or a fault of our own."""

from __future__ import annotations

import psycopg

from slotstream.wire.errors import InternalFault, IoError, SlotStreamError, StoreFull

# Two transactions met: neither did wrong, and the one that was undone is done again. A lock that does not come is one, too.
_MET = frozenset({"40001", "40P01", "23505", "55P03"})
_DISK_FULL = "53100"
# Beside the classes of connections, resources and interventions: no table or right any more, and a standby that only reads.
_PASSING_CLASSES = frozenset({"08", "28", "53", "57", "58", "XX", "40", "55", "25"})
_PASSING_CODES = frozenset({"42P01", "42501", "3D000", "3F000", "42883", "23505"})


class RowDamaged(IoError):
    """A row of the catalogue does not match its checksum, or cannot be one of ours."""


def is_met(error: psycopg.Error) -> bool:
    """Whether the transaction is undone, and may be done again at once."""
    return error.sqlstate in _MET


def is_lost(error: psycopg.Error, db: psycopg.Connection) -> bool:
    """Whether the connection is gone, or about to: of what is FATAL the server has said its last word."""
    return db.closed or isinstance(error, psycopg.InterfaceError) or error.diag.severity_nonlocalized in ("FATAL", "PANIC")


def failure(error: psycopg.Error) -> SlotStreamError:
    """The expected failure that `error` is: StoreFull, IoError, else InternalFault."""
    code = error.sqlstate
    if code == _DISK_FULL:
        return StoreFull("the disk of the catalogue's database is full")
    lost = code is None and isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    if lost or (code is not None and (code[:2] in _PASSING_CLASSES or code in _PASSING_CODES)):
        return IoError(f"the catalogue's database does not answer as it should: {one_line(error)}")
    return InternalFault(f"the catalogue failed: {one_line(error)}")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
