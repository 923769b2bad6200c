"""`slotstream rm`: deletes samples, by their ids or all that filters find: those found before it asked, and no others."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from slotstream.cli import units
from slotstream.cli.common import (
    add_access_arguments,
    add_namespace_argument,
    add_server_argument,
    complain_about,
    note,
    open_client,
    shown,
    size_text,
    tag,
)
from slotstream.cli.namespaces import check_known, naming_others
from slotstream.cli.samples import raise_where_pointless
from slotstream.wire.errors import ConfigError, SlotStreamError

if TYPE_CHECKING:
    from slotstream.client import Client


class _Named(NamedTuple):
    """A sample to delete. `created_unix_ns`: only the one that was opened then; None: the one that has the id."""

    sample_id: str
    created_unix_ns: int | None = None
    nbytes: int = 0


def add_rm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sample_id", metavar="ID", nargs="*", help="sample ids (default: none, those that a filter finds)")
    add_server_argument(parser)
    add_access_arguments(parser)
    add_namespace_argument(parser)
    parser.add_argument(
        "--tag", metavar="KEY=VALUE", type=tag, action="append", default=[], help="all with this tag; repeatable (default: any)"
    )
    parser.add_argument("--state", choices=("committed", "failed"), type=str.lower, help="all in this state (default: both)")
    parser.add_argument(
        "--older-than",
        metavar="TIME",
        type=units.seconds,
        help="all that were opened so long ago: 30m, 7d (default: of any age)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the ids, one a line, and delete nothing (default: delete)"
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="do not ask (default: ask; where stdin is no terminal, delete nothing and exit with 2)",
    )
    parser.set_defaults(complain=parser.error)
    parser.epilog = """\
Filters find samples of one namespace, as they are now: what arrives meanwhile stays. Samples that are still arriving, and those
that somebody holds a lease on, stay too; the others go, and the exit code is 1.

examples:
  slotstream rm my-sample
  slotstream rm --state failed --older-than 1d
  slotstream rm --tag run=7 --dry-run > ids && xargs -r slotstream rm --yes < ids     # exactly these
"""


def run_rm(arguments: argparse.Namespace) -> int:
    by_filter = bool(arguments.tag or arguments.state or arguments.older_than is not None)
    if by_filter == bool(arguments.sample_id):
        arguments.complain("rm takes ids, or filters that find them (--tag, --state, --older-than), and not both")
    with open_client(arguments) as client, naming_others(client, arguments.namespace):
        found = _found(client, arguments) if by_filter else [_Named(sample_id) for sample_id in arguments.sample_id]
        if not found:
            check_known(client, arguments.namespace)
            note("No sample matches.")
            return 0
        what = f"sample {arguments.namespace}/{found[0].sample_id}" if len(found) == 1 else _counted(found, arguments.namespace)
        if arguments.dry_run:
            print("\n".join(one.sample_id for one in found))
            note(f"Nothing was deleted. Without --dry-run: {shown(what)}.")
            return 0
        if by_filter and arguments.yes:
            note(f"Deleting {shown(what)}.")
        if not arguments.yes and not _confirmed(what):
            note("Nothing was deleted.")
            return 1
        return _delete(client, found, arguments.namespace)


def _found(client: Client, arguments: argparse.Namespace) -> list[_Named]:
    """All of them, before the first one goes."""
    until = None if arguments.older_than is None else time.time_ns() - round(arguments.older_than * 1e9)
    listed = client.list(
        namespace=arguments.namespace, state=arguments.state, tags=dict(arguments.tag), created_until=until, page_size=1000
    )
    return [_Named(one.sample_id, one.created_unix_ns, one.file_bytes or 0) for one in listed if one.state != "ARRIVING"]


def _counted(found: list[_Named], namespace: str) -> str:
    nbytes = sum(one.nbytes for one in found)
    size = f", {size_text(nbytes)}" if nbytes else ""
    return f"{len(found)} samples of namespace {namespace}{size}"


def _confirmed(what: str) -> bool:
    """Raises ConfigError where nobody can be asked: what a pipe holds is no answer to this question."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("nothing was deleted: stdin is no terminal, so nobody can be asked; say --yes")
    print(f"Delete {shown(what)} for good? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _delete(client: Client, found: list[_Named], namespace: str) -> int:
    failures = 0
    for one in found:
        try:
            client.delete(one.sample_id, namespace=namespace, created_unix_ns=one.created_unix_ns)
        except SlotStreamError as error:
            raise_where_pointless(error)
            complain_about("rm", one.sample_id, error)
            failures += 1
        else:
            print(f"deleted {namespace}/{one.sample_id}", flush=True)
    return 1 if failures else 0
