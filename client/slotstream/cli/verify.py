"""`slotstream verify`: checks stored samples against their hashes, through the server or on a directory without one."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from slotstream.cli.common import (
    CommandFailed,
    add_access_arguments,
    add_json_argument,
    add_namespace_argument,
    add_server_argument,
    note,
    open_client,
    print_json,
    progress_bar,
    shown,
    size_text,
)
from slotstream.cli.namespaces import check_known, naming_others, unknown
from slotstream.wire.names import DEFAULT_NAMESPACE

# Part of the public interface: scripts match on these.
EXIT_CODES = {
    **{"HASH_MISMATCH": 3, "TRUNCATED": 4, "MISSING": 5, "UNREADABLE": 6, "FOREIGN": 7},
    **{"IO_ERROR": 8, "UNSUPPORTED_FORMAT": 9},
}
_NO_DAMAGE = {"IO_ERROR": "could not be read", "UNSUPPORTED_FORMAT": "of an unknown format"}


class Check(NamedTuple):
    """What checking one sample found; `damage` is empty when it is sound."""

    namespace: str
    sample_id: str  # of a foreign file: its path below the namespace
    damage: str
    message: str
    nbytes: int  # checked
    quarantined: bool = False


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sample_id", metavar="ID", nargs="?", help="one sample (default: every committed sample)")
    where = parser.add_mutually_exclusive_group()
    add_server_argument(where)
    where.add_argument(
        "--data", metavar="DIR", type=Path, help="a data directory, read without a server (default: ask the server)"
    )
    add_access_arguments(parser)
    parser.add_argument(
        "--quarantine",
        action="store_true",
        help="have the server take damaged samples out of service: they fail with DAMAGED and their files move to "
        "DIR/.quarantine (default: change nothing)",
    )
    add_namespace_argument(parser, any_by_default=True, may_name_one=True)
    add_json_argument(parser)
    parser.epilog = """\
Prints each damaged sample with its class of damage (with --json every sample), then a summary on stderr.

exit codes, by the first damage found:
  0  every sample is sound
  1  the check itself failed
  3  HASH_MISMATCH  the header, the rows or the token ids are not the bytes that were committed
  4  TRUNCATED      the file is shorter than it was committed
  5  MISSING        a committed sample has no file
  6  UNREADABLE     the file cannot be read, is too long, or is not the sample's
  7  FOREIGN        a file that the catalogue does not know
  8  IO_ERROR       nothing is damaged, but the disk did not give some file; its bytes may be sound
  9  UNSUPPORTED_FORMAT  nothing is damaged, but some file has columns or elements that this version does not know

examples:
  slotstream verify my-sample
  slotstream verify --data /var/lib/slotstream --json > report.jsonl
"""


def run_verify(arguments: argparse.Namespace) -> int:
    samples = damaged = nbytes = 0
    unchecked: Counter[str] = Counter()
    first_damage = ""
    with progress_bar("checking", "{task.fields[shown_bytes]}", "{task.completed} samples") as progress:
        task = progress.add_task("verify", total=None, shown_bytes="")
        for check in _checks(arguments):
            samples += 1
            nbytes += check.nbytes
            if check.damage in _NO_DAMAGE:
                unchecked[check.damage] += 1
            elif check.damage:
                damaged += 1
                first_damage = first_damage or check.damage
            _report(check, as_json=arguments.json)
            progress.update(task, completed=samples, shown_bytes=size_text(nbytes))
    counts = {"damaged": damaged} | {words: unchecked[code] for code, words in _NO_DAMAGE.items()}
    found = [f"{count} {what}" for what, count in counts.items() if count]
    note(f"{samples} samples checked, {size_text(nbytes)}: " + (", ".join(found) or "all sound"))
    if damaged:
        return EXIT_CODES.get(first_damage, 1)
    return next((EXIT_CODES[code] for code in _NO_DAMAGE if unchecked[code]), 0)


def _checks(arguments: argparse.Namespace) -> Iterator[Check]:
    namespace, sample_id = arguments.namespace, arguments.sample_id
    if sample_id is not None and namespace is None:
        namespace = DEFAULT_NAMESPACE
    empty = True
    if arguments.data is not None:
        if arguments.quarantine:
            raise CommandFailed("--quarantine needs a server: without one, this command changes nothing")
        from slotstream.store.directory.looking import namespaces_of, verify_directory

        for found in verify_directory(arguments.data, namespace=namespace or "", sample_id=sample_id or ""):
            empty = False
            yield Check(found.namespace, found.sample_id, found.damage, found.message, found.bytes_checked)
        if empty and namespace is not None:
            raise unknown(namespace, namespaces_of(arguments.data), "that are here")
        return
    with open_client(arguments) as client, naming_others(client, namespace):
        for told in client.verify(sample_id, namespace=namespace, quarantine=arguments.quarantine):
            empty = False
            yield Check(told.namespace, told.sample_id, told.damage or "", told.message or "", told.bytes, told.quarantined)
        if empty:
            check_known(client, namespace)


def _report(check: Check, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "namespace": check.namespace,
                "sample_id": check.sample_id,
                "damage": check.damage or None,
                "message": check.message or None,
                "bytes": check.nbytes,
                **({"quarantined": True} if check.quarantined else {}),
            }
        )
    elif check.damage:
        what = f"{check.damage}  {check.namespace}/{check.sample_id}  {check.message}".rstrip()
        print(shown(what + "; quarantined" * check.quarantined), flush=True)
