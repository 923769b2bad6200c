"""What can be wrong with a catalogue, told apart: damage of the file, trouble of the disk, and faults of our own."""

from __future__ import annotations

import sqlite3

from slotstream.store.catalogue.sqlite.row_sums import MalformedRow
from slotstream.wire.errors import InternalFault, IoError, SlotStreamError, StoreFull

# Damage of the file itself, as opposed to a full disk or a lock.
_CORRUPT_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# What a database can raise: the sqlite3 module cannot decode a message that quotes a damaged schema.
ERRORS = (sqlite3.Error, UnicodeDecodeError)
# The disk or the system, and not the file; also somebody else who has it locked. All of them may pass.
_PASSING_CODES = frozenset(
    {
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOMEM,
    }
)
_UNDECODABLE = "Could not decode to UTF-8"  # The sqlite3 module's own words, under no code.


class CatalogueCorrupt(Exception):
    """The file is not a sound catalogue: it has to be rebuilt. Seen only while opening."""


class CatalogueOld(CatalogueCorrupt):
    """The file is a catalogue of an earlier day: what its rows say is over."""


class CatalogueDamaged(IoError):
    """Damage that only came to light when its rows were read. It means: rebuild; told only where the disk refuses that."""


def catalogue_error(error: Exception) -> SlotStreamError:
    """The expected failure that `error` is: StoreFull where the disk is full, IoError, CatalogueDamaged, else InternalFault."""
    code = getattr(error, "sqlite_errorcode", 0)
    if isinstance(error, MalformedRow) or is_corrupt(error):
        return CatalogueDamaged(f"the catalogue failed: {error}")
    if code & 0xFF == sqlite3.SQLITE_FULL:  # The low byte is the kind of error, the rest its detail.
        return StoreFull("the disk is full: the catalogue cannot be written")
    if code & 0xFF in _PASSING_CODES:
        return IoError(f"the catalogue cannot be read or written: {error}")
    return InternalFault(f"the catalogue failed: {error}")


def is_corrupt(error: Exception) -> bool:
    undecodable = isinstance(error, UnicodeDecodeError) or str(error).startswith(_UNDECODABLE)
    return undecodable or getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT_CODES
