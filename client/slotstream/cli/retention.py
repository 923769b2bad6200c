"""`slotstream retention`: what rules would delete, seen before they do; and the word that they may."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from slotstream.cli.common import (
    add_access_arguments,
    add_json_argument,
    add_namespace_argument,
    add_server_argument,
    note,
    open_client,
    print_json,
    print_table,
    size_text,
)
from slotstream.wire.errors import ConfigError

if TYPE_CHECKING:
    from slotstream.client import Forecast


def add_retention_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    add_server_argument(where)
    where.add_argument(
        "--data", metavar="DIR", type=Path, help="a data directory, read without a server (default: ask the server)"
    )
    parser.add_argument(
        "--file", metavar="FILE", type=Path, help="a file of rules, as serve --retention takes it (default: the server's own)"
    )
    parser.add_argument(
        "--accept",
        action="store_true",
        help="the server's rules are right: they may delete, also more than half of a namespace (default: only look)",
    )
    add_access_arguments(parser)
    add_namespace_argument(parser, any_by_default=True)
    add_json_argument(parser)
    parser.epilog = """\
Prints how many samples and bytes each rule would delete now, by namespace. Deletes nothing. Asking a server needs the right
admin. Without a server nobody knows who reads a sample at the moment: such a sample is counted, and would stay.

examples:
  slotstream retention --file rules.toml                    # before the server gets them
  slotstream retention --data /var/lib/slotstream --file rules.toml
  slotstream retention --accept                             # the server waits for this: see slotstream stat
"""


def run_retention(arguments: argparse.Namespace) -> int:
    if arguments.accept:
        return _accept(arguments)
    found = _foreseen_in_directory(arguments) if arguments.data is not None else _foreseen_by_server(arguments)
    if arguments.json:
        for one in found:
            print_json(dataclasses.asdict(one))
        return 0
    going = [one for one in found if one.key]
    if going:
        rows = [
            (one.namespace, one.key, f"{one.samples} failed" if one.key == "failed_age_s_max" else _part(one), _size(one))
            for one in going
        ]
        print_table(("NAMESPACE", "RULE", "SAMPLES", "SIZE"), rows, right=("SAMPLES", "SIZE"))
    else:
        note("These rules would delete nothing now.")
    for name in sorted({one.namespace for one in found if one.held}):
        note(f"{name}: nothing is deleted here until somebody says slotstream retention --accept")
    for name in sorted({one.namespace for one in found if one.age_held}):
        note(f"{name}: nothing is deleted by age here, because the clock is in doubt (serve --accept-clock)")
    return 0


def _part(one: Forecast) -> str:
    return f"{one.samples} of {one.stored}"


def _size(one: Forecast) -> str:
    return size_text(one.bytes) if one.bytes else "-"


def _accept(arguments: argparse.Namespace) -> int:
    if arguments.file is not None or arguments.data is not None:
        raise ConfigError("--accept is about the rules that a server runs with: leave --file and --data out")
    with open_client(arguments) as client:
        released = client.accept_retention(namespace=arguments.namespace)
    for name in released:
        print(name)
    note("The rules act here from now on." if released else "The rules are accepted. They were held nowhere.")
    return 0


def _foreseen_by_server(arguments: argparse.Namespace) -> list[Forecast]:
    rules = None if arguments.file is None else arguments.file.read_text("utf-8")
    with open_client(arguments) as client:
        return list(client.retention(rules, namespace=arguments.namespace))


def _foreseen_in_directory(arguments: argparse.Namespace) -> list[Forecast]:
    from slotstream.client import Forecast
    from slotstream.store.directory.forecasting import preview_directory
    from slotstream.store.upkeep.retention import Policy
    from slotstream.wire.names import check_namespace

    if arguments.file is None:
        raise ConfigError("--data needs --file: a directory does not say by which rules it was served")
    found = preview_directory(arguments.data, Policy.from_text(arguments.file.read_text("utf-8"), str(arguments.file)))
    wanted = None if arguments.namespace is None else check_namespace(arguments.namespace)
    rows = [
        Forecast(one.namespace, one.key, one.samples, one.bytes, one.stored, age_held=one.namespace in found.age_held)
        for one in found.forecasts
    ]
    silent = found.age_held - {one.namespace for one in rows}
    rows += [Forecast(name, "", 0, 0, 0, age_held=True) for name in sorted(silent)]
    return [one for one in rows if wanted in (None, one.namespace)]
