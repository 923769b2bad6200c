"""`slotstream doctor`: asks, one thing after another, what must be right between this machine and a server."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from slotstream.cli.common import (
    add_access_arguments,
    add_json_argument,
    add_server_argument,
    note,
    open_client,
    print_json,
    servers_named,
    shown,
    size_text,
)
from slotstream.wire.address import is_local
from slotstream.wire.errors import (
    ConfigError,
    PermissionDenied,
    ProtocolViolation,
    SlotStreamError,
    Unauthenticated,
)
from slotstream.wire.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from slotstream.client import Client, Status
    from slotstream.client.diagnosis import Diagnosis
    from slotstream.wire.access import Access

RIGHTS = ("ingest", "read", "delete", "admin")
_CLOCKS_APART_S = 5.0
_EXPIRY_S = 7 * 86400.0
_PROCESS_S = 300.0  # An import of vLLM from a cold disk.
_ASKED_OF_THE_SERVER = ("port", "tls", "token", "versions", "clock", "disk")
_NIXL = """
import sys
from slotstream.wire import nixl
try:
    nixl.try_out()
except nixl.NixlFault as error:
    sys.exit(str(error))
"""
_SEAMS = "slotstream.connector.seam_check"


class Finding(NamedTuple):
    """One line. `result`: ok, warn or fail; `todo`: what to change, "" where nothing is."""

    check: str
    result: str
    message: str
    todo: str = ""


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_argument(parser)
    add_access_arguments(parser)
    parser.add_argument(
        "--right", action="append", choices=RIGHTS, default=[], help="the token must have it; repeatable (default: any token)"
    )
    parser.add_argument(
        "--namespace", metavar="NAME", help=f"the token must cover it (default: with --right, {DEFAULT_NAMESPACE})"
    )
    add_json_argument(parser)
    parser.epilog = """\
Asks in this order: does a server answer at the port, TLS, the token and its rights, versions, clocks, the server's disk, NIXL,
and vLLM. The last two are asked of this machine, in processes of their own. Each line says ok, warn or fail, and what to do.
Of several servers (--server a:1,b:1) each one is asked.
Exits with 1 where something fails. What cannot be asked because of that is named at the end.

examples:
  slotstream doctor                                         # where vLLM is installed, before it starts
  slotstream doctor --right ingest --namespace train --token-file vllm.token
  slotstream doctor --server storage:50151 --tls-ca ca.pem --json | jq 'select(.result != "ok")'
"""


def run_doctor(arguments: argparse.Namespace) -> int:
    asked: list[Finding] = []

    def say(finding: Finding) -> None:
        asked.append(finding)
        if arguments.json:
            print_json(finding._asdict())
        else:
            print(f"{finding.check:<8}  {finding.result:<4}  {shown(finding.message)}")
            if finding.todo:
                print(f"{'':16}{shown(finding.todo)}")
        sys.stdout.flush()

    unasked: list[str] = []
    servers = _servers(arguments)
    if isinstance(servers, Finding):
        say(servers)
        unasked += _unasked(asked)
        servers = ()
    for server in servers:
        before = len(asked)
        named = say if len(servers) == 1 else functools.partial(_say_of, server, say)
        _ask_server(arguments, server, named)
        of_server = "" if len(servers) == 1 else f" of {server}"
        unasked += [f"{name}{of_server}" for name in _unasked(asked[before:])]
    say(_nixl())
    say(_vllm())
    if unasked:
        note(f"Not asked, because of what failed: {', '.join(unasked)}")
    return 1 if any(finding.result == "fail" for finding in asked) else 0


def _say_of(server: str, say: Callable[[Finding], None], finding: Finding) -> None:
    """Of several servers: which one it is."""
    say(finding if server in finding.message else finding._replace(message=f"{server}: {finding.message}"))


def _unasked(asked: Sequence[Finding]) -> list[str]:
    """Questions to a server that are not among these."""
    return [name for name in _ASKED_OF_THE_SERVER if name not in {finding.check for finding in asked}]


# Of the server: each check returns its finding, and whether the next one can be asked.


def _ask_server(arguments: argparse.Namespace, server: str, say: Callable[[Finding], None]) -> None:
    from slotstream.client.diagnosis import diagnose

    opened = _opened(arguments, server)
    if isinstance(opened, Finding):
        say(_reached(server))
        say(opened)
        return
    with opened as client:
        found = diagnose(client.address, client.access)
        if found is not None and found.what in _PORT_TODO:
            say(Finding("port", "fail", f"{client.address}: {found.sentence}", _PORT_TODO[found.what]))
            return
        answer = _answer(client) if found is None else None
        if isinstance(answer, Finding) and answer.check == "port":
            say(answer)
            return
        say(Finding("port", "ok", f"{client.address} answers"))
        say(tls := _tls(client.address, client.access, found))
        if tls.result == "fail":
            return
        if answer is not None and not isinstance(answer, Finding):
            say(_rights(answer, arguments))
            say(_versions(answer))
            say(_clock(answer))
            say(_disk(answer))
            if (shared := _shared(answer)) is not None:
                say(shared)
        elif answer is not None:
            say(answer)
            if answer.result == "ok":
                todo = "upgrade servers first, then connectors and clients"
                say(Finding("versions", "warn", "the server is of an earlier version, and cannot be asked how it is", todo))


_PORT_TODO = {
    "unreachable": "start slotstream serve there, or give its address: --server, or $SLOTSTREAM_SERVER; is a firewall between?",
    "no_slotstream": "give the address that serve --listen names, not that of --metrics or --probes",
    "hung_up": "wait, or close connections that nobody uses; serve --connections-max allows more",
}
_TLS_TODO = {
    "no_tls": "leave --tls-ca and $SLOTSTREAM_TLS_CA out, or have the server speak TLS: serve --tls-cert, --tls-key",
    "wants_tls": "give the authorities of its certificate: --tls-ca FILE, or $SLOTSTREAM_TLS_CA",
    "certificate": "give the authorities that signed it (--tls-ca), or the server one for this host (docs/security.md)",
    "wants_certificate": "give --tls-cert and --tls-key, which an authority of its --tls-client-ca signed",
}


def _servers(arguments: argparse.Namespace) -> tuple[str, ...] | Finding:
    """The addresses to ask; or what is wrong with them."""
    try:
        return servers_named(arguments)
    except ConfigError as error:
        return Finding("port", "fail", str(error), "write --server, or $SLOTSTREAM_SERVER, as host:port or unix:/path")


def _opened(arguments: argparse.Namespace, server: str) -> Client | Finding:
    """A client that has not connected yet; or why there can be none with these options and this environment."""
    try:
        return open_client(arguments, server=server)
    except ConfigError as error:
        if str(error).startswith("token"):
            return Finding("token", "fail", str(error), "slotstream token makes one; --token-file names the file that holds it")
        return Finding("tls", "fail", str(error), "mend the files that --tls-ca, --tls-cert and --tls-key name")


def _reached(address: str) -> Finding:
    """The port, where no client can be made for another reason."""
    from slotstream.client.diagnosis import diagnose
    from slotstream.wire.access import Access

    found = diagnose(address, Access())
    if found is not None and found.what == "unreachable":
        return Finding("port", "fail", f"{address}: {found.sentence}", _PORT_TODO["unreachable"])
    return Finding("port", "ok", f"{address} answers")


def _tls(address: str, access: Access, found: Diagnosis | None) -> Finding:
    from slotstream.client.diagnosis import certificate_expires

    if found is not None:
        return Finding("tls", "fail", found.sentence, _TLS_TODO[found.what])
    if access.tls_ca is None:
        if access.call_metadata() and not is_local(address):
            return Finding("tls", "warn", "the token travels unencrypted", "have the server speak TLS, and give --tls-ca")
        return Finding("tls", "ok", "none is used, nor wanted")
    expires = certificate_expires(address, access)
    if expires is None:
        return Finding("tls", "ok", "the certificate is signed by the authorities given")
    left_s = expires - time.time()
    message = f"the server's certificate is good for {left_s / 86400:.1f} days"
    if left_s < _EXPIRY_S:
        return Finding("tls", "warn", message, "replace --tls-cert and --tls-key of the server; it reads them again by itself")
    return Finding("tls", "ok", message)


def _answer(client: Client) -> Status | Finding:
    """How the server is; where it does not say, what there is to say of the port or of the token."""
    try:
        return client.status()
    except Unauthenticated as error:
        return Finding("token", "fail", str(error), "give --token-file, whose entry is in the file that serve --tokens names")
    except ProtocolViolation:
        pass  # It knows no Status.
    except SlotStreamError as error:
        return _unanswered(client, error)
    try:
        next(client.list(limit=1), None)
    except PermissionDenied:
        pass  # The token is known, and may do other things.
    except Unauthenticated as error:
        return Finding("token", "fail", f"{error} ({error.code})", "give --token-file, with a token that the server knows")
    except ProtocolViolation:
        return Finding("port", "fail", f"{client.address}: this is no slotstream port", _PORT_TODO["no_slotstream"])
    except SlotStreamError as error:
        return _unanswered(client, error)
    return Finding("token", "ok", "the server takes it, or wants none")


def _unanswered(client: Client, error: SlotStreamError) -> Finding:
    return Finding("port", "fail", f"{client.address} gives no answer: {error} ({error.code})", "see the server's log")


def _rights(status: Status, arguments: argparse.Namespace) -> Finding:
    covers = "every namespace" if status.covers is None else ", ".join(status.covers)
    message = f"it may {', '.join(status.rights) or 'do nothing'} in {covers}"
    todo = "change its entry in the tokens file, or give another one (docs/security.md)"
    if missing := [right for right in arguments.right if right not in status.rights]:
        return Finding("token", "fail", f"{message}, and not {', '.join(missing)}", todo)
    namespace = arguments.namespace or (DEFAULT_NAMESPACE if arguments.right else None)
    if namespace is not None and status.covers is not None and namespace not in status.covers:
        return Finding("token", "fail", f"{message}, and not in {namespace}", todo)
    return Finding("token", "ok", message)


def _versions(status: Status) -> Finding:
    from importlib.metadata import version

    ours, theirs = version("slotstream"), status.version
    others = {engine.slotstream_version for engine in status.server.engines if engine.connected} if status.server else set()
    message = f"here {ours}, server {theirs}" + (f", engines {', '.join(sorted(others))}" if others else "")
    steps = [_minors_ahead(theirs, other) for other in (ours, *others)]
    if any(step is not None and abs(step) > 1 for step in steps):
        return Finding("versions", "fail", message, "they work together one minor version apart: upgrade what is older")
    if any(step is not None and step < 0 for step in steps):
        return Finding("versions", "warn", message, "upgrade servers first, then connectors and clients")
    return Finding("versions", "ok", message)


def _minors_ahead(one: str, other: str) -> int | None:
    """By how many minor versions `one` is ahead of `other`; None where that cannot be told."""
    try:
        (major, minor), (other_major, other_minor) = (map(int, text.split(".")[:2]) for text in (one, other))
    except ValueError:
        return None
    return minor - other_minor if major == other_major else 100 * (major - other_major)


def _clock(status: Status) -> Finding:
    apart_s = (time.time_ns() - status.now_unix_ns) / 1e9
    message = f"this machine's and the server's are {abs(apart_s):.1f} s apart"
    if status.server is not None and status.server.clock:
        todo = "set it right; if it is, start the server with --accept-clock"
        return Finding("clock", "fail", f"the server doubts its own: {status.server.clock}", todo)
    if abs(apart_s) > _CLOCKS_APART_S:
        return Finding("clock", "warn", message, "have both follow NTP: ages, leases and --since go by the server's")
    if status.server is None:
        message += "; whether the server doubts its own, only admin of every namespace is told"
    return Finding("clock", "ok", message)


def _disk(status: Status) -> Finding:
    server, problems = status.server, status.problems
    for name in ("disk_away", "disk_full", "draining"):
        if name in problems:
            return Finding("disk", "fail", problems[name], "docs/storage.md says what the server does meanwhile")
    if server is None or server.free_bytes is None or server.disk_bytes is None:
        return Finding("disk", "ok", "samples fit; how much is free, only admin of every namespace is told")
    message = f"{size_text(server.free_bytes)} free of {size_text(server.disk_bytes)}"
    if "disk_filling" in problems:
        todo = "make room, or set retention rules (docs/storage.md)"
        return Finding("disk", "warn", f"{message}; {problems['disk_filling']}", todo)
    return Finding("disk", "ok", message)


def _shared(status: Status) -> Finding | None:
    """Of the bucket and the catalogue that a server shares with others; None where it does not, or this token is not told."""
    if status.server is None or (shared := status.server.shared) is None:
        return None
    for name, result in (("engine_away", "fail"), ("catalogue_behind", "warn"), ("uploads_left", "warn")):
        if name in status.problems:
            return Finding("shared", result, status.problems[name], "docs/storage.md says what several servers need")
    who = "this server leads" if shared.leads else "another server leads"
    message = f"{shared.bucket} and {shared.catalogue} answer; {who}; {shared.attempts_arriving} uploads arrive"
    return Finding("shared", "ok", f"{message}, with {size_text(shared.scratch_bytes)} in scratch here")


# Of this machine, in processes of their own: what is broken there ends that process, and not this one.


def _nixl() -> Finding:
    from slotstream.wire.nixl import INSTALL, is_installed

    if not is_installed():
        return Finding("nixl", "warn", "not installed here: rows go over gRPC", f"where vLLM and the server run: {INSTALL}")
    done = _python("-c", _NIXL)
    if done is None:
        return Finding("nixl", "fail", "it hangs when it is set up", _NIXL_TODO)
    if done.returncode == 0:
        return Finding("nixl", "ok", "it can be set up here")
    return Finding("nixl", "fail", _last_line(done) or f"its process ended with {done.returncode}", _NIXL_TODO)


_NIXL_TODO = "mend its installation (docs/transports.md), or choose transport grpc on both sides"


def _vllm() -> Finding:
    done = _python("-m", _SEAMS)
    try:
        told = json.loads(done.stdout.splitlines()[-1]) if done is not None else {"problems": ["it hangs when it is imported"]}
    except (ValueError, IndexError):
        assert done is not None
        told = {"problems": [_last_line(done) or f"its process ended with {done.returncode}"]}
    version, problems = told.get("version"), told.get("problems") or []
    if problems:
        todo = "use vLLM 0.32 or 0.33, as pip install 'slotstream[vllm]' brings it"
        return Finding("vllm", "fail", "; ".join(map(str, problems)), todo)
    if version is None:
        return Finding("vllm", "warn", "not installed here", "ask where vLLM runs, with its own Python")
    if not told.get("known"):
        message = f"{version}, which slotstream was never tried with; everything that it reaches into is there"
        return Finding("vllm", "warn", message, "use vLLM 0.32 or 0.33, or look at the first samples with care")
    return Finding("vllm", "ok", f"{version}, and everything that slotstream reaches into is there")


def _python(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    """This Python in a process of its own, which finds the modules that this one finds. None: it did not end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = functools.partial(subprocess.run, capture_output=True, text=True, errors="replace", check=False)
    try:
        return run([sys.executable, "-P", *arguments], env=environment, stdin=subprocess.DEVNULL, timeout=_PROCESS_S)
    except subprocess.TimeoutExpired:
        return None


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
