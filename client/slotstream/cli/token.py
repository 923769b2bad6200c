"""`slotstream token`: makes a bearer token. The token goes into a private file, its entry for the server to stdout."""

from __future__ import annotations

import argparse
import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path

from slotstream.server.access.tokens import RIGHTS, digest_of, entry_of
from slotstream.wire.names import DEFAULT_NAMESPACE

_TOKEN_BYTES = 32


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="what the server's log calls its owner")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        required=True,
        help="where to write the token itself, for connector and client; it must not exist",
    )
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        action="append",
        help=f"a namespace that it is for, or '*' for all; repeatable (default: {DEFAULT_NAMESPACE})",
    )
    parser.add_argument("--right", choices=RIGHTS, action="append", help="what it may do there; repeatable (default: read)")
    parser.epilog = """\
examples:
  slotstream token vllm-a --namespace team-a --right ingest --token-file vllm-a.token >> tokens.toml
  slotstream token alice --namespace team-a --namespace team-b --right read --right delete --token-file ~/slotstream.token

Only the token's SHA-256 is in the entry, so that a reader of the tokens file cannot use it. A file that the shell makes for >>
gets the mode 0600.
"""


def run_token(arguments: argparse.Namespace) -> int:
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    namespaces = arguments.namespace or [DEFAULT_NAMESPACE]
    entry = entry_of(arguments.name, digest_of(token), namespaces, arguments.right or ["read"])
    # Private from its first moment, and never one that somebody uses already.
    fd = os.open(arguments.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(token + "\n")
    _keep_to_owner()
    print(entry)
    return 0


def _keep_to_owner() -> None:
    """The tokens file that a shell has just made for `>>` is its owner's alone, as the server wants it; an older one stays."""
    with suppress(OSError, ValueError):  # No file: a captured or closed stdout.
        told = os.fstat(sys.stdout.fileno())
        if stat.S_ISREG(told.st_mode) and not told.st_size and told.st_uid == os.geteuid():
            os.fchmod(sys.stdout.fileno(), 0o600)
