"""The tables, version by version. A migration only adds, so a server runs with every schema that is not older than its own.

`migrations/NNNN_name.sql` are done in their order, each in one transaction with the row that says so. A start only looks.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from importlib import resources

import psycopg

from slotstream.store.catalogue import page_token
from slotstream.store.catalogue.postgres.address import Address
from slotstream.store.catalogue.postgres.connecting import SCHEMA, check_server, connect
from slotstream.store.catalogue.postgres.failures import one_line
from slotstream.wire.errors import ConfigError, IoError

_NAME = re.compile(r"([0-9]{4})_\w+\.sql")
_LOCK = "slotstream migrate"  # One at a time.


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    sql: str


def migrations() -> list[Migration]:
    """All that this version knows, in their order."""
    folder = resources.files("slotstream.store.catalogue.postgres") / "migrations"
    found = [(match, file) for file in folder.iterdir() if (match := _NAME.fullmatch(file.name))]
    known = sorted(
        (Migration(int(match[1]), file.name, file.read_text("utf-8")) for match, file in found), key=lambda m: m.number
    )
    assert [migration.number for migration in known] == list(range(1, len(known) + 1)), "a migration is missing"
    return known


def migrate(url: str) -> list[str]:
    """Bring the catalogue at `url` up to this version; the names of what was done. Raises ConfigError and IoError."""
    address = Address(url)
    check_server(address)
    db = connect(address, writes=True)
    try:
        return _migrate(db, migrations())
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigError(f"the user of {address} may not make the tables: {address.redacted(one_line(error))}") from None
    except psycopg.Error as error:
        raise IoError(f"the catalogue at {address} could not be migrated: {address.redacted(one_line(error))}") from None
    finally:
        db.close()


def _migrate(db: psycopg.Connection, known: list[Migration]) -> list[str]:
    done = []
    db.execute("SELECT set_config('lock_timeout', '60s', false)")
    db.execute("SELECT pg_advisory_lock(hashtext(%s))", (_LOCK,))
    if schema_of(db) == 0:
        db.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
        db.execute(
            "CREATE TABLE IF NOT EXISTS migrations "
            "(number integer PRIMARY KEY, name text NOT NULL, done_at timestamptz NOT NULL DEFAULT now())"
        )
    for migration in known[schema_of(db) :]:
        with db.transaction():
            db.execute(migration.sql.encode())
            db.execute("INSERT INTO migrations (number, name) VALUES (%s, %s)", (migration.number, migration.name))
        done.append(migration.name)
    key = secrets.token_hex(page_token.KEY_BYTES)
    db.execute("INSERT INTO meta VALUES ('page_key', %s) ON CONFLICT DO NOTHING", (key,))
    return done


def schema_of(db: psycopg.Connection) -> int:
    """The number of the last migration that was done; 0 where there is none."""
    row = db.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{SCHEMA}.migrations",)).fetchone()
    if row is None or not row[0]:
        return 0
    row = db.execute("SELECT coalesce(max(number), 0) FROM migrations").fetchone()
    return 0 if row is None else int(row[0])


def check_schema(db: psycopg.Connection, address: Address) -> None:
    """Raises ConfigError for an older schema than this version needs. A newer one only has more."""
    found, needed = schema_of(db), len(migrations())
    if found < needed:
        has = f"schema {found}" if found else "no tables"
        raise ConfigError(
            f"the catalogue at {address} has {has}, and this version needs schema {needed}: "
            "run slotstream migrate --catalogue URL"
        )
