"""`python -m slotstream.web`, which `slotstream web` becomes: the page's own process, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys

from slotstream.cli.common import CommandFailed, note
from slotstream.cli.main import EXIT_INTERRUPTED, guarded
from slotstream.cli.parser import Parser
from slotstream.cli.web import add_web_arguments

_CALL_S = 10.0
_STALL_S = 20.0
_BACKLOG = 128


def main() -> int:
    """The exit code, as of all commands."""
    parser = Parser(prog="slotstream web", description="Show samples to a browser.")
    add_web_arguments(parser)
    arguments = parser.parse_args()
    return guarded("web", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    try:
        import jinja2  # noqa: F401
        import numpy  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise CommandFailed(f"the page cannot import {error.name}: pip install 'slotstream[web]'") from error
    from slotstream.client.client import Client
    from slotstream.client.rpc import Rpc
    from slotstream.web.connections import Server, uvicorn_config
    from slotstream.web.settings import WebSettings
    from slotstream.web.site import Site

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = WebSettings.from_arguments(arguments)
    # Not `connect`, which takes the token of the environment: the operator's is of no use to visitors.
    client = Client(Rpc(settings.server, timeout_s=_CALL_S, access=settings.access), stall_timeout_s=_STALL_S)
    with client, _listening(settings.listen) as listener:
        host, port = settings.listen.rpartition(":")[0], listener.getsockname()[1]
        app = Site(settings, client).app(port)
        config = uvicorn_config(app, ssl_certfile=settings.https_cert, ssl_keyfile=settings.https_key)
        said = f"{'https' if settings.https else 'http'}://{host}:{port} shows the samples of {settings.server}"
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn sends itself again what it ended by.
        try:
            Server(config, lambda: note(said)).run([listener])
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    return 0


def _listening(listen: str) -> socket.socket:
    """A socket that takes connections. Raises CommandFailed."""
    host, _, port = listen.rpartition(":")
    bare = host.strip("[]")
    try:
        family = socket.getaddrinfo(bare, int(port), type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((bare, int(port)), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise CommandFailed(f"cannot listen on {listen}: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
