"""`slotstream rebuild`: bring a catalogue in PostgreSQL up to what the bucket holds. It prints its plan and asks."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from slotstream.cli.common import note, shown, size_text
from slotstream.wire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from slotstream.store.cluster.rebuilding import Plan

_CATALOGUE = "SLOTSTREAM_SERVE_CATALOGUE"
_STORE = "SLOTSTREAM_SERVE_STORE"
_SHOWN = 20
_TOLD_EVERY_S = 10.0


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """`--store` and `--catalogue`, as `slotstream serve` takes them."""
    parser.add_argument("--store", metavar="URL", help=f"s3://BUCKET/PREFIX of the objects (default: what {_STORE} says)")
    parser.add_argument(
        "--catalogue",
        metavar="URL",
        help=f"postgresql://USER@HOST:PORT/DATABASE, without a password (default: what {_CATALOGUE} says)",
    )


def add_rebuild_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and change nothing (default: ask, then do it)")
    parser.add_argument(
        "--yes",
        action="store_true",
        help="do not ask (default: ask; where stdin is no terminal, change nothing and exit with 2)",
    )
    parser.epilog = f"""\
For a catalogue that was lost (make its tables first: slotstream migrate), or restored from a dump. Samples that are stored
whole, and that the catalogue does not know, are committed again, with their tags, metadata and times. What the catalogue alone
knew is lost: reads, acks, leases, and samples that failed. Samples that were deleted after the dump may come back. No object is
ever removed, and servers may run meanwhile. Credentials for the bucket come from the environment, as the AWS CLI's; the
password of the database comes from the file that PGPASSFILE names, or stands in {_CATALOGUE}.

exit codes: 0 all is compared; 1 not done, or objects are left that are no samples

examples:
  slotstream rebuild --store s3://bucket/samples --catalogue postgresql://slotstream@db.example/slotstream --dry-run
"""


def pair_of(arguments: argparse.Namespace) -> tuple[str, str]:
    """The two URLs. Raises ConfigError."""
    try:
        from slotstream.store.cluster.opening import check_command_line
    except ModuleNotFoundError as error:
        raise ConfigError("this needs botocore, urllib3, awscrt and psycopg: pip install 'slotstream[s3,postgres]'") from error

    if arguments.catalogue is not None:
        check_command_line(arguments.catalogue)
    store, catalogue = arguments.store or os.environ.get(_STORE), arguments.catalogue or os.environ.get(_CATALOGUE)
    if not store:
        raise ConfigError(f"name the bucket: --store URL, or {_STORE}")
    if not catalogue:
        raise ConfigError(f"name the database: --catalogue URL, or {_CATALOGUE}")
    return store, catalogue


def told_now_and_then(text: str) -> Callable[[int], None]:
    """Says `text` with a number in it, every ten seconds."""
    last = time.monotonic()

    def tell(number: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _TOLD_EVERY_S:
            last = time.monotonic()
            note(text.format(number))

    return tell


def run_rebuild(arguments: argparse.Namespace) -> int:
    store, catalogue = pair_of(arguments)
    from slotstream.store.cluster.opening import opened_pair
    from slotstream.store.cluster.rebuilding import Rebuild

    with opened_pair(store, catalogue) as (blobs, rows):
        rebuild = Rebuild(rows, blobs)
        plan = rebuild.plan(told_now_and_then("{} objects looked at"))
        for line in _plan_lines(plan):
            print(shown(line), flush=True)
        if not (plan.unknown or plan.is_behind):
            note("Nothing is to be done.")
            return 1 if plan.lost or plan.foreign else 0
        if arguments.dry_run or not (arguments.yes or _confirmed()):
            note("Nothing was changed.")
            return 0 if arguments.dry_run else 1
        outcome = rebuild.carry_out(plan, told_now_and_then("{} objects read"))
    note(f"{outcome.added} samples were committed again, {outcome.dropped} rows without an object were dropped.")
    for name, why in outcome.left[:_SHOWN]:
        note(f"left as it is: {name}: {why}")
    if len(outcome.left) > _SHOWN:
        note(f"left as they are: {len(outcome.left) - _SHOWN} more")
    return 1 if outcome.left else 0


def _plan_lines(plan: Plan) -> list[str]:
    lines = [f"{plan.same} samples are the same in the catalogue and in the bucket."]
    if plan.known:
        lines.append(f"{plan.known} objects are arriving or going away: they are left to the servers.")
    if plan.unknown:
        lines.append(
            f"{plan.objects} objects ({size_text(plan.nbytes)}) are unknown to the catalogue: the whole ones become samples."
        )
    if plan.lost:
        what = "they are dropped" if plan.is_behind else "they are left: see slotstream verify"
        lines.append(f"{len(plan.lost)} samples of the catalogue have no object: {what}.")
        lines += [f"  {record.key}" for record in plan.lost[:_SHOWN]]
    if plan.foreign:
        lines.append(f"{len(plan.foreign)} objects have no name of a sample's, and are left.")
        lines += [f"  {name}" for name in plan.foreign[:_SHOWN]]
    if plan.is_behind:
        lines.append("The catalogue is older than the bucket, or is new: nothing is deleted until this is done.")
    return lines


def _confirmed() -> bool:
    """Raises ConfigError where nobody can be asked."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("nothing was changed: stdin is no terminal, so nobody can be asked; say --yes")
    print("Change the catalogue so? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
