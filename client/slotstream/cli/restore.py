"""`slotstream restore`: the server takes out of its quarantine what verifies again."""

from __future__ import annotations

import argparse
import dataclasses

from slotstream.cli.common import (
    add_access_arguments,
    add_json_argument,
    add_namespace_argument,
    add_server_argument,
    note,
    open_client,
    print_json,
    shown,
)
from slotstream.cli.namespaces import check_known, naming_others
from slotstream.wire.errors import SampleNotFound
from slotstream.wire.names import DEFAULT_NAMESPACE


def add_restore_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sample_id", metavar="ID", nargs="?", help="one sample (default: every file of the quarantine)")
    add_server_argument(parser)
    add_access_arguments(parser)
    add_namespace_argument(parser, any_by_default=True, may_name_one=True)
    add_json_argument(parser)
    parser.epilog = """\
A file goes back when every byte of it verifies, when it is the one that was put aside, and when its id is free. Prints one line
a file, then a summary on stderr. Exits with 1 when a file stays in the quarantine.

examples:
  slotstream restore
  slotstream restore my-sample --namespace train
"""


def run_restore(arguments: argparse.Namespace) -> int:
    restored = kept = 0
    with open_client(arguments) as client, naming_others(client, arguments.namespace):
        for one in client.restore(arguments.sample_id, namespace=arguments.namespace):
            restored += one.restored
            kept += not one.restored
            if arguments.json:
                print_json(dataclasses.asdict(one))
            else:
                word = "restored" if one.restored else one.damage or "kept"
                print(shown(f"{word}  {one.namespace}/{one.sample_id}  {one.message or ''}".rstrip()), flush=True)
        if not restored + kept:
            if arguments.sample_id is not None:
                key = f"{arguments.namespace or DEFAULT_NAMESPACE}/{arguments.sample_id}"
                raise SampleNotFound(f"the quarantine holds no file of {key}")
            check_known(client, arguments.namespace)
    note(f"{restored} samples restored, {kept} files stay in the quarantine")
    return 1 if kept else 0
