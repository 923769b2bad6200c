"""`slotstream ls` and `stat`: what is stored."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slotstream.cli.common import (
    add_access_arguments,
    add_filter_arguments,
    add_json_argument,
    add_namespace_argument,
    add_server_argument,
    age_text,
    complain_about,
    layers_text,
    note,
    open_client,
    print_json,
    print_table,
    shown,
    size_text,
)
from slotstream.cli.namespaces import check_known, naming_others
from slotstream.wire.errors import ProtocolViolation, SampleNotFound, SlotStreamError
from slotstream.wire.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from slotstream.client import Client, SampleInfo

_STATES = ("arriving", "committed", "failed")
_LATEST_S = 253_402_300_799  # The end of the year 9999, the last that a datetime can be in.
_COLUMNS = ("SAMPLE", "NAMESPACE", "STATE", "TOKENS", "LAYERS", "SIZE", "AGE", "MODEL", "TAGS")
_STATE_STYLES = {"arriving": "yellow", "committed": "green", "failed": "red"}


def add_ls_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_argument(parser)
    add_access_arguments(parser)
    add_filter_arguments(parser)
    parser.add_argument("--state", choices=_STATES, type=str.lower, help="only samples in this state (default: any)")
    parser.add_argument(
        "--request", metavar="ID", help="only samples of the request that vLLM answered with this id (default: any)"
    )
    parser.add_argument(
        "--limit", metavar="N", type=_limit, default=100, help="at most N samples; 0: all (default: %(default)s)"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("-q", "--quiet", action="store_true", help="print the ids alone, one a line (default: a table)")
    add_json_argument(shape)
    parser.epilog = """\
examples:
  slotstream ls --since 15m --state failed
  slotstream ls --request cmpl-8a52d3
  slotstream ls --tag run=eagle3 --tag split=train --limit 0 --json | jq -r .sample_id
"""


def run_ls(arguments: argparse.Namespace) -> int:
    limit = arguments.limit or None
    with open_client(arguments) as client, naming_others(client, arguments.namespace):
        listed = client.list(
            namespace=arguments.namespace,
            model=arguments.model,
            state=arguments.state,
            created_from=arguments.since,
            created_until=arguments.until,
            tags=dict(arguments.tag),
            request=arguments.request,
            limit=None if limit is None else limit + 1,  # One more, to know whether there is more.
        )
        within_limit = itertools.islice(listed, limit)
        shown_any = _print_listed(within_limit, as_json=arguments.json, quiet=arguments.quiet)
        if not shown_any:
            note(_why_nothing(client, arguments))
        if limit is not None and next(listed, None) is not None:
            note(f"There are more than {limit}: raise --limit, or narrow the list with --since, --state, --tag.")
    return 0


def _print_listed(samples: Iterator[SampleInfo], *, as_json: bool, quiet: bool) -> bool:
    """Whether there was any."""
    if not as_json and not quiet:
        return _print_table(list(samples))
    found = False
    for info in samples:
        found = True
        if quiet:
            print(info.sample_id, flush=True)
        else:
            print_json(_plain(info))
    return found


def _why_nothing(client: Client, arguments: argparse.Namespace) -> str:
    since, until = arguments.since, arguments.until
    if since is not None and until is not None and since >= until:
        return "--since is not before --until, so that no sample can match; 2m is earlier than 30s"
    try:
        check_known(client, arguments.namespace)
    except SampleNotFound as error:
        return str(error)
    if next(client.list(namespace=arguments.namespace, limit=1), None) is None:
        return "This server holds no sample yet."
    return "No sample matches."


def add_stat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sample_id", metavar="ID", nargs="*", help="ids of samples, or of requests (default: none, show what the server holds)"
    )
    add_server_argument(parser)
    add_access_arguments(parser)
    add_namespace_argument(parser, any_by_default=True, may_name_one=True)
    add_json_argument(parser)
    parser.epilog = """\
examples:
  slotstream stat my-sample other-sample --json | jq .metadata
  slotstream stat --namespace train       # what that namespace holds
  slotstream stat                         # by namespace: samples, bytes, rules; free space, quarantine, scrubbing
"""


def run_stat(arguments: argparse.Namespace) -> int:
    if not arguments.sample_id:
        from slotstream.cli.usage import run_usage

        return run_usage(arguments)
    failures, namespace = 0, arguments.namespace or DEFAULT_NAMESPACE
    with open_client(arguments) as client:
        for number, sample_id in enumerate(arguments.sample_id):
            try:
                infos = known_as(client, sample_id, namespace)
            except SlotStreamError as error:
                raise_where_pointless(error)
                complain_about("stat", sample_id, error)
                failures += 1
                continue
            if arguments.json:
                for info in infos:
                    print_json(_plain(info))
                continue
            print("\n" * (number > 0), end="", flush=True)
            if len(infos) > 1:
                note(f"{len(infos)} samples are of request {shown(sample_id)}:")
                _print_table(infos)
            else:
                print("\n".join(facts(infos[0])))
    return 1 if failures else 0


def known_as(client: Client, name: str, namespace: str) -> list[SampleInfo]:
    """The sample of this id, else those of the request that vLLM answered with it. Raises SampleNotFound."""
    try:
        return [client.stat(name, namespace=namespace)]
    except SampleNotFound:
        found = samples_of_request(client, name, namespace)
        if not found:
            raise
    return [client.stat(found[0].sample_id, namespace=namespace)] if len(found) == 1 else found


def samples_of_request(client: Client, request_id: str, namespace: str) -> list[SampleInfo]:
    """None of them where the server is too old to know."""
    try:
        return list(client.list(request=request_id, namespace=namespace))
    except ProtocolViolation:
        return []


def facts(info: SampleInfo) -> list[str]:
    """Lines `name  value` with all that is known about a sample; what is unknown is left out."""
    rows: list[tuple[str, str]] = [
        ("sample", info.sample_id),
        ("namespace", info.namespace),
        ("state", info.state.lower()),
        ("error", f"{info.error_code}: {info.error_message}" if info.error_code else ""),
        ("model", info.model),
        ("tokens", ("at most " if info.state == "ARRIVING" else "") + str(info.num_tokens)),
        ("layers", ",".join(info.layer_names)),
        ("hidden size", str(info.hidden_size)),
        ("dtype", info.dtype),
        ("file", f"{size_text(info.file_bytes)} ({info.file_bytes} bytes)" if info.file_bytes else ""),
        ("created", _time_text(info.created_unix_ns)),
        ("committed", _time_text(info.committed_unix_ns) if info.committed_unix_ns else ""),
        ("reads", str(info.reads) if info.reads else ""),
        ("acked", _time_text(info.acked_unix_ns) if info.acked_unix_ns else ""),
        ("leased until", _until_text(info.leased_until_unix_ns) if info.leased_until_unix_ns else ""),
        ("expires", _until_text(info.expires_unix_ns) if info.expires_unix_ns else ""),
        ("refused", ", ".join(f"{count} {code}" for code, count in sorted(info.refused.items()))),
        *((f"tag {key}", value) for key, value in sorted(info.tags.items())),
        *((f"metadata {key}", value) for key, value in sorted(info.metadata.items())),
    ]
    kept = [(shown(name), shown(value)) for name, value in rows if value]
    width = max(len(name) for name, _ in kept)
    return [f"{name:<{width}}  {value}" for name, value in kept]


def _print_table(samples: Sequence[SampleInfo]) -> bool:
    """Whether there was any."""
    from rich.text import Text

    if not samples:
        return False
    now_ns = time.time_ns()
    rows = [
        (
            info.sample_id,
            info.namespace,
            Text(f"{info.state.lower()} {shown(info.error_code or '')}".rstrip(), style=_STATE_STYLES[info.state.lower()]),
            str(info.num_tokens),
            layers_text(info.layer_names),
            "-" if info.file_bytes is None else size_text(info.file_bytes),
            age_text(info.created_unix_ns, now_ns),
            shown(info.model),
            shown(" ".join(f"{key}={value}" for key, value in sorted(info.tags.items()))) or "-",
        )
        for info in samples
    ]
    print_table(_COLUMNS, rows, right=("TOKENS", "SIZE", "AGE"))
    return True


def _plain(info: SampleInfo) -> dict[str, Any]:
    return {**dataclasses.asdict(info), "layer_names": info.layer_names}


def raise_where_pointless(error: SlotStreamError) -> None:
    """With no server, or a token that it does not know, there is no use in asking about the other samples."""
    if error.status in ("UNAVAILABLE", "UNAUTHENTICATED"):
        raise error


def _time_text(unix_ns: int) -> str:
    when = datetime.datetime.fromtimestamp(unix_ns // 1_000_000_000, datetime.UTC)
    return f"{when:%Y-%m-%dT%H:%M:%S}Z ({age_text(unix_ns, time.time_ns())} ago)"


def _until_text(unix_ns: int) -> str:
    seconds = min(unix_ns // 1_000_000_000, _LATEST_S)
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%dT%H:%M:%S}Z"


def _limit(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of samples")
    return int(text)
