"""`slotstream migrate`: make the tables of a catalogue in PostgreSQL, or bring them up to this version."""

from __future__ import annotations

import argparse
import os

from slotstream.cli.common import note
from slotstream.wire.errors import ConfigError

_VARIABLE = "SLOTSTREAM_SERVE_CATALOGUE"


def add_migrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--catalogue",
        metavar="URL",
        help=f"the database: postgresql://USER@HOST:PORT/DATABASE, without a password (default: what {_VARIABLE} says)",
    )
    parser.epilog = f"""\
Makes the tables in the schema "slotstream" of the database, or adds what this version needs to them. It only adds, so servers
of the version before run on meanwhile. A server never does this itself: one that meets older tables does not start.
The password comes from the file that PGPASSFILE names (~/.pgpass), or stands in {_VARIABLE}.

examples:
  slotstream migrate --catalogue postgresql://slotstream@db.example/slotstream
"""


def run_migrate(arguments: argparse.Namespace) -> int:
    try:
        from slotstream.store.catalogue.postgres.address import check_command_line
        from slotstream.store.catalogue.postgres.migrating import migrate
    except ModuleNotFoundError as error:
        raise ConfigError("a catalogue in PostgreSQL needs psycopg: pip install 'slotstream[postgres]'") from error

    if arguments.catalogue is not None:
        check_command_line(arguments.catalogue)
    url = arguments.catalogue or os.environ.get(_VARIABLE)
    if not url:
        raise ConfigError(f"name the database: --catalogue URL, or {_VARIABLE}")
    done = migrate(url)
    for name in done:
        print(name)
    note("The tables are those of this version now." if done else "The tables are those of this version already.")
    return 0
