"""`slotstream status`: how the server is, which engines are connected, and what is wrong. Exits with 0 where nothing is."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slotstream.cli import units
from slotstream.cli.common import (
    add_access_arguments,
    add_json_argument,
    add_server_argument,
    layers_text,
    note,
    open_client,
    print_json,
    print_table,
    servers_named,
    shown,
    size_text,
    time_text,
)
from slotstream.wire.errors import SlotStreamError

if TYPE_CHECKING:
    from slotstream.client import Client, EngineStatus, ServerStatus, SharedStore, Status

_CLEAR = "\x1b[H\x1b[2J"
ENGINE_COLUMNS = ("ENGINE", "RANK", "HOST", "LAYERS", "TRANSPORT", "STAGING", "LINK", "OPEN", "LAST SAMPLE")


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_argument(parser)
    add_access_arguments(parser)
    parser.add_argument(
        "--watch", metavar="SECONDS", type=_every, help="show it again and again, until Ctrl-C (default: show it once)"
    )
    add_json_argument(parser)
    parser.epilog = """\
Of several servers (--server a:1,b:1) each one is asked, and has its own part.
Exits with 1 where it finds a problem. With --json, `problems` holds the stable names of those found: see docs/status.md.
Engines, rates, failures and the disk are told to a token with admin in every namespace.

examples:
  slotstream status
  slotstream status --watch 2
  slotstream status --json | jq -r '.problems[]'
"""


def run_status(arguments: argparse.Namespace) -> int:
    servers = servers_named(arguments)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(open_client(arguments, server=server)) for server in servers]
        if arguments.watch is None:
            return _show_all(_ask(clients), as_json=arguments.json)
        _watch(clients, arguments)
    return 0


def _watch(clients: Sequence[Client], arguments: argparse.Namespace) -> None:
    """Until Ctrl-C. A server that is away is said, and asked again: that is when somebody watches."""
    while True:
        try:
            answers = _ask(clients)
        except SlotStreamError as error:
            if error.status not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                raise
            note(f"slotstream status: {error} ({error.code})")
        else:
            if sys.stdout.isatty() and not arguments.json:
                print(_CLEAR, end="")
            _show_all(answers, as_json=arguments.json)
            sys.stdout.flush()
        time.sleep(arguments.watch)


def _ask(clients: Sequence[Client]) -> list[tuple[str, Status | SlotStreamError]]:
    """Each server's address, and how it is. Of several one may fail to say so; where there is one alone, this raises that."""
    answers: list[tuple[str, Status | SlotStreamError]] = []
    for client in clients:
        try:
            answers.append((client.address, client.status()))
        except SlotStreamError as error:
            if len(clients) == 1:
                raise
            answers.append((client.address, error))
    return answers


def _show_all(answers: Sequence[tuple[str, Status | SlotStreamError]], *, as_json: bool) -> int:
    """Prints it; the exit code."""
    code = 0
    for number, (address, answer) in enumerate(answers):
        if number and not as_json:
            print()
        if isinstance(answer, SlotStreamError):
            code = 1
            _show_none(address, f"{answer} ({answer.code})", as_json=as_json)
        else:
            code |= _show(answer, address, as_json=as_json, named=len(answers) > 1)
    return code


def _show_none(address: str, why: str, *, as_json: bool) -> None:
    """What there is to print of one of several servers that does not say how it is."""
    if as_json:
        print_json({"address": address, "problems": ["no_answer"], "explained": {"no_answer": why}})
        return
    print(f"{'server':<{_WIDTH}}  - at {shown(address)}\n\n{'no_answer':<{_WIDTH}}  {shown(_named(address, why))}")


def _named(address: str, sentence: str) -> str:
    return sentence if address in sentence else f"{address}: {sentence}"


def _show(status: Status, address: str, *, as_json: bool, named: bool) -> int:
    """Prints it; the exit code. `named`: of several servers, so that each problem says whose it is."""
    problems = status.problems
    if as_json:
        whose = {"address": address} if named else {}
        print_json({**whose, **dataclasses.asdict(status), "problems": list(problems), "explained": problems})
        return 1 if problems else 0
    if named:
        problems = {name: _named(address, sentence) for name, sentence in problems.items()}
    print("\n".join(f"{name:<{_WIDTH}}  {text}" for name, text in facts(status, address)))
    if status.server is not None and status.server.engines:
        print()
        print_table(ENGINE_COLUMNS, map(engine_row, status.server.engines), right=("RANK", "STAGING", "OPEN"))
        if status.server.engines_left_out:
            print(f"and {status.server.engines_left_out} more")
    print(
        "\n"
        + "\n".join(f"{name:<{_WIDTH}}  {shown(sentence)}" for name, sentence in problems.items() or [("problems", "none")])
    )
    return 1 if problems else 0


_WIDTH = 19  # Of the longest name of a problem.


def facts(status: Status, address: str) -> list[tuple[str, str]]:
    """Names and what is told of them, as far as the token is told it; fit for a terminal."""
    server = status.server
    rows = [("server", f"{shown(status.version)} at {address}, {shown(status.health)}")]
    if server is None:
        rows += [(name, "-  (needs admin of every namespace)") for name in ("engines", "rates", "disk")]
        rows += [("rights", ", ".join(status.rights) or "none")]
        rows += [("namespaces", ", ".join(status.covers or ("every one",)))]
        if status.namespaces is None:
            rows += [("", "-  (the catalogue does not answer)")]
        spaces = status.namespaces or ()
        rows += [(f"  {space.namespace}", f"{space.samples} samples, {size_text(space.bytes)}") for space in spaces]
        if status.namespaces_left_out:
            rows += [("", "and more")]
        return [(shown(name), shown(text)) for name, text in rows]
    rows[0] = (rows[0][0], f"{rows[0][1]}, {_setup(server)}")
    rows += [
        (
            "samples",
            f"{_rate(server.samples_per_s)} a second, {server.open_samples} arriving, over {time_text(server.rates_s)}",
        ),
        ("bytes", f"{_size_rate(server.received_bytes_per_s)} in, {_size_rate(server.sent_bytes_per_s)} out"),
        ("failed", f"{_counts(server.failed)} within {time_text(server.counted_s)}"),
        ("disk", _disk(server)),
        *([] if server.shared is None else [("shared", _shared(server.shared))]),
        ("readers", f"{server.reads}, of which {server.waiting_reads} wait for their sample"),
        ("retention", _retention(server)),
        ("clock", shown(server.clock or "ok")),
    ]
    return rows


def _setup(server: ServerStatus) -> str:
    tls = "no TLS"
    if server.tls:
        expires = server.certificate_expires_unix_s
        until = f" until {datetime.datetime.fromtimestamp(expires, datetime.UTC):%Y-%m-%d}" if expires else ""
        tls = f"TLS{until}"
    tokens = "tokens" if server.tokens else "no tokens"
    processes = f", {server.processes} of {server.processes_wanted} processes" if server.processes_wanted > 1 else ""
    return f"up {time_text(server.uptime_s)}, {tls}, {tokens}{processes}, {'NIXL' if server.nixl else 'gRPC alone'}"


def _disk(server: ServerStatus) -> str:
    if server.free_bytes is None or server.disk_bytes is None:
        return "does not answer"
    free = f"{size_text(server.free_bytes)} free of {size_text(server.disk_bytes)}"
    if server.hours_until_full is None:
        return f"{free}, does not fill"
    return f"{free}, full in {server.hours_until_full:.1f} hours at the rate of the last {time_text(server.counted_s)}"


def _shared(shared: SharedStore) -> str:
    leads = ", leads" if shared.leads else ""
    late = f", {shared.attempts_late} late" if shared.attempts_late else ""
    attempts = f"{shared.attempts_arriving} uploads arriving, {shared.attempts_ended} ended{late}"
    return shown(f"{shared.bucket} with {shared.catalogue}{leads}; {attempts}; {size_text(shared.scratch_bytes)} in scratch")


def _retention(server: ServerStatus) -> str:
    told = []
    if server.rules_wait_s:
        told.append(f"new rules act in {time_text(server.rules_wait_s)}")
    if server.rules_held:
        told.append(f"held in {', '.join(server.rules_held)}")
    if server.age_held:
        told.append(f"held by age in {', '.join(server.age_held)}")
    return shown("; ".join(told) or "nothing is held")


def engine_row(engine: EngineStatus) -> tuple[str, ...]:
    """One line of the table of `ENGINE_COLUMNS`."""
    link = f"{'up' if engine.connected else 'down'} {time_text(engine.since_s)}"
    if lost := engine.streams - 1 if engine.links_lost is None else engine.links_lost:
        link += f", lost {lost} time{'' if lost == 1 else 's'}"
    last = "-"
    if engine.last_sample is not None and engine.last_sample_s is not None:
        last = f"{engine.last_sample}, {time_text(engine.last_sample_s)} ago"
    row = (
        engine.engine_id,
        str(engine.rank),
        engine.host or "-",
        "-" if engine.layers is None else layers_text(engine.layers),
        engine.transport,
        _staging(engine),
        link,
        str(engine.open_samples),
        last,
    )
    return tuple(map(shown, row))


def _staging(engine: EngineStatus) -> str:
    if engine.staging_bytes is None or engine.staging_bytes_in_use is None:
        return "-"
    fill = 100 * engine.staging_bytes_in_use / max(1, engine.staging_bytes)
    return f"{fill:.0f}% of {size_text(engine.staging_bytes)}"


def _counts(failed: dict[str, int]) -> str:
    return ", ".join(f"{count} {shown(code)}" for code, count in failed.items()) or "none"


def _rate(per_s: float) -> str:
    return f"{per_s:.1f}" if per_s < 100 else f"{per_s:.0f}"


def _size_rate(bytes_per_s: float) -> str:
    return f"{size_text(round(bytes_per_s))}/s"


def _every(text: str) -> float:
    seconds = units.seconds(text)
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time from 0.1 s to a day")
    return seconds
