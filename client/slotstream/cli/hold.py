"""`slotstream ack` and `lease`: what a reader says of samples, from a shell."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING

from slotstream.cli import units
from slotstream.cli.common import (
    add_access_arguments,
    add_namespace_argument,
    add_server_argument,
    complain_about,
    open_client,
)
from slotstream.cli.samples import raise_where_pointless
from slotstream.wire.errors import SlotStreamError
from slotstream.wire.names import LEASE_S_MAX

if TYPE_CHECKING:
    from slotstream.client import Client

_HOLDER = "cli"


def add_ack_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.epilog = """\
Says that a reader is done with the samples. Where the namespace's rule says delete_on_ack, the server deletes them; elsewhere
it notes that.

example:
  slotstream ack my-sample other-sample --namespace train
"""


def run_ack(arguments: argparse.Namespace) -> int:
    def ack(client: Client, sample_id: str) -> str:
        client.ack(sample_id, namespace=arguments.namespace)
        return f"acked {arguments.namespace}/{sample_id}"

    return _each("ack", arguments, ack)


def add_lease_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument(
        "--for",
        dest="seconds",
        metavar="TIME",
        type=units.seconds,
        default=3600.0,
        help=f"for how long: 10m, 1h30m, at most {LEASE_S_MAX / 3600:.0f}h; 0: give it back (default: 1h)",
    )
    parser.add_argument(
        "--holder",
        metavar="NAME",
        default=_HOLDER,
        help="in whose name; its next lease replaces its last (default: %(default)s)",
    )
    parser.epilog = """\
Keeps samples from being deleted, by rules and by name, until the lease ends.

examples:
  slotstream lease my-sample --for 1h30m
  slotstream lease my-sample --for 0
"""


def run_lease(arguments: argparse.Namespace) -> int:
    def lease(client: Client, sample_id: str) -> str:
        until = client.lease(sample_id, arguments.seconds, namespace=arguments.namespace, holder=arguments.holder)
        name = f"{arguments.namespace}/{sample_id}"
        when = datetime.datetime.fromtimestamp(until // 1_000_000_000, datetime.UTC)
        return f"leased {name} until {when:%Y-%m-%dT%H:%M:%S}Z" if until else f"gave back {name}"

    return _each("lease", arguments, lease)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sample_id", metavar="ID", nargs="+", help="sample ids")
    add_server_argument(parser)
    add_access_arguments(parser)
    add_namespace_argument(parser)


def _each(command: str, arguments: argparse.Namespace, say: Callable[[Client, str], str]) -> int:
    """Says it of every sample, and prints a line for each. 1 where one of them failed."""
    failures = 0
    with open_client(arguments) as client:
        for sample_id in arguments.sample_id:
            try:
                print(say(client, sample_id), flush=True)
            except SlotStreamError as error:
                raise_where_pointless(error)
                complain_about(command, sample_id, error)
                failures += 1
    return 1 if failures else 0
