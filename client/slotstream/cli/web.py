"""`slotstream web`: becomes `python -m slotstream.web`, which is a process of its own."""

from __future__ import annotations

import argparse
import os
import sys

from slotstream.cli.common import add_server_argument, add_tls_arguments

DEFAULT_LISTEN = "127.0.0.1:50152"


def add_web_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default=DEFAULT_LISTEN, help="where browsers reach it (default: %(default)s)"
    )
    parser.add_argument(
        "--host",
        metavar="NAME",
        action="append",
        default=[],
        help="a name by which browsers reach it, as of a proxy; repeatable (default: the host of --listen)",
    )
    parser.add_argument("--https-cert", metavar="FILE", help="PEM certificate that browsers are shown (default: no TLS)")
    parser.add_argument("--https-key", metavar="FILE", help="its PEM private key (default: no TLS)")
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL=DIR",
        action="append",
        default=[],
        help="show this model's tokens as text, by the tokenizer.json of a folder; repeatable (default: show their ids)",
    )
    parser.add_argument(
        "--allow-anonymous",
        action="store_true",
        help="let visitors in without a token where the server wants none (default: only where they reach the server as well)",
    )
    add_server_argument(parser)
    add_tls_arguments(parser)
    parser.epilog = """\
Visitors log in with their own tokens; see docs/web.md. It needs pip install 'slotstream[web]', and no torch.

examples:
  slotstream web --server 127.0.0.1:50151
  slotstream web --tokenizer Qwen/Qwen3-8B=/models/Qwen3-8B
  slotstream web --listen 0.0.0.0:8443 --host samples.example.org --https-cert cert.pem --https-key key.pem
"""


def run_web(arguments: argparse.Namespace) -> int:
    words = [sys.executable, "-P", "-m", "slotstream.web", *arguments.words]
    sys.stdout.flush()
    os.execv(sys.executable, words)
