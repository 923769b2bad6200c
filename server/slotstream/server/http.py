"""Plain HTTP, without TLS and tokens: the metrics and the probes, a few pages on a port and a thread of their own each.

GET and HEAD of a page that is there get it; everything else is 404. No answer repeats what was asked.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from slotstream.wire.errors import ConfigError

_log = logging.getLogger(__name__)
_ASK_S = 5.0  # How long a caller may take to ask, and to take the answer.
_CALLERS_MAX = 32
TEXT = (("Content-Type", "text/plain; charset=utf-8"),)


class Answer(NamedTuple):
    status: HTTPStatus
    body: bytes
    headers: Sequence[tuple[str, str]] = TEXT


Page = Callable[[Message], Answer]  # Gets the headers of the request. Runs on the caller's thread.


def serve_pages(name: str, address: str, pages: Mapping[str, Page]) -> tuple[str, Callable[[], None]]:
    """Serve `pages`, by path, on `address` (host:port), which the option `--NAME` gave.

    Returns the real address and what stops it. Raises ConfigError.
    """
    host, _, port = address.rpartition(":")
    try:
        server = _Server(host.strip("[]"), int(port), pages)
    except OSError as error:
        raise ConfigError(f"--{name}: cannot listen on {address}: {error.strerror or error}") from error
    thread = threading.Thread(target=server.serve_forever, name=name, daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"{host}:{server.server_address[1]}", stop


class _Server(ThreadingHTTPServer):
    """Callers beyond _CALLERS_MAX put the oldest out: nobody can keep the kubelet waiting."""

    daemon_threads = True
    request_queue_size = 128
    block_on_close = False

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self._callers: deque[socket.socket] = deque(maxlen=_CALLERS_MAX)
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._callers) == _CALLERS_MAX:
            with contextlib.suppress(OSError):  # It went by itself.
                self._callers[0].shutdown(socket.SHUT_RDWR)
        self._callers.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a caller went away", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _ASK_S
    server: _Server

    def _get(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        try:
            answer = page(self.headers)
        except Exception:
            _log.exception("a fault in the server failed an HTTP request")
            return self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
        self._say(answer)

    do_GET = do_HEAD = _get

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Python's own words would repeat the request, and it says 501 of a method that has no page."""
        status = HTTPStatus.NOT_FOUND if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._say(Answer(status, b"unknown" if status is HTTPStatus.NOT_FOUND else status.phrase.lower().encode()))

    def _say(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in (*answer.headers, ("Content-Length", str(len(answer.body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def version_string(self) -> str:
        return "slotstream"

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
