"""`slotstream export`: samples as the files that trainers read."""

from __future__ import annotations

import argparse
from pathlib import Path

from slotstream.cli.common import (
    add_access_arguments,
    add_filter_arguments,
    add_server_argument,
    complain_about,
    note,
    open_client,
    progress_bar,
)
from slotstream.cli.get import layers_argument

_FORMATS = ("speculators", "specforge", "modelopt", "safetensors", "npz")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=_FORMATS, required=True, help="whose files to write")
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="the folder to write them to")
    parser.add_argument(
        "-j",
        "--jobs",
        metavar="N",
        type=int,
        default=8,
        help="files at a time, each with its sample in memory (default: %(default)s)",
    )
    parser.add_argument(
        "--layers",
        metavar="IDS",
        type=layers_argument,
        help="layers wanted, such as 2,18,33; a draft's last row comes by itself (default: all that the samples have)",
    )
    parser.add_argument(
        "--loss-mask",
        choices=("all", "output"),
        help="the mask of samples that were stored without one (default: refuse them, where the format takes a mask)",
    )
    parser.add_argument(
        "--index-only",
        action="store_true",
        help="speculators: write the index alone, and leave the rows in the store (default: write them too)",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        help="the server's data directory, to take rows out of its files, which is faster (default: the server sends them)",
    )
    add_filter_arguments(parser)
    add_server_argument(parser)
    add_access_arguments(parser)
    parser.epilog = """\
DIR gets `manifest.jsonl`, which names the samples, and a file for each. A run that was killed is gone on with by the same
command. Each format takes its own row as the model's last: docs/consumers.md.

examples:
  slotstream export --format specforge --to train --tag split=train
  slotstream export --format speculators --to data --layers 2,18,33 --loss-mask output
"""


def run_export(arguments: argparse.Namespace) -> int:
    from slotstream.client.exports.run import Options, export
    from slotstream.client.members import Filters

    filters = Filters.of(arguments.namespace, arguments.model, dict(arguments.tag), arguments.since, arguments.until)
    layers = None if arguments.layers is None else tuple(arguments.layers)
    options = Options(arguments.format, layers, filters, arguments.loss_mask, arguments.index_only, arguments.jobs)
    with open_client(arguments, arguments.data) as client, progress_bar() as bar:
        task = bar.add_task(str(arguments.to), total=None)
        result = export(client, arguments.to, options, lambda done, of: bar.update(task, completed=done, total=of))
    for failure in result.failures:
        complain_about("export", failure.name, failure.error)
    entries = result.manifest.entries
    rows = sum(entry.rows for entry in entries)
    there = len(entries) - len(result.failures)
    print(f"{arguments.to}: {there} of {len(entries)} samples as {arguments.format}, {result.written} written now; {rows} rows")
    if result.failures:
        note("What failed is not there: a new export to another folder leaves it out.")
    return 1 if result.failures else 0
