"""Between a server and its object store: passes requests on, and does to some what a network or a busy store does."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


@dataclass
class Answer:
    """In place of the store's."""

    status: int
    code: str = ""  # As in the body of an error.
    cut: int = 0  # Of the store's own answer so many bytes come, and the connection ends. `status` has to be 0, too.

    @property
    def body(self) -> bytes:
        return f"<Error><Code>{self.code}</Code><Message>said by the test</Message></Error>".encode() if self.code else b""


LOST = Answer(0)  # The connection ends without one.


@dataclass
class Plan:
    """What happens to the next requests of a kind, an answer each. `reaches`: the store has it done all the same."""

    method: str
    has: str  # In its path and query.
    answers: list[Answer] = field(default_factory=list)
    reaches: bool = False


class S3Proxy:
    """Until the `with` block ends. `seen`: METHOD path?query of all that came."""

    def __init__(self, endpoint: str) -> None:
        self._store = urlsplit(endpoint).netloc
        self._plans: list[Plan] = []
        self.seen: list[str] = []
        self.before: Callable[[str], None] = lambda line: None  # Called with each request before it is passed on.
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                proxy._handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def plan(self, method: str, has: str, *answers: Answer, reaches: bool = False) -> None:
        self._plans.append(Plan(method, has, list(answers), reaches))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        line = f"{request.command} {request.path}"
        self.seen.append(line)
        self.before(line)
        plan = next((p for p in self._plans if p.answers and p.method == request.command and p.has in request.path), None)
        answer = plan.answers.pop(0) if plan is not None else None
        cut = answer.cut if answer is not None else 0
        if cut:
            answer = None
        if plan is None or plan.reaches or cut:
            store = http.client.HTTPConnection(self._store, timeout=60)
            store.request(request.command, request.path, body, dict(request.headers.items()))
            real = store.getresponse()
            data = real.read()
            store.close()
        if answer is not None and answer.status == 0:
            request.close_connection = True
            return
        if answer is not None:
            request.send_response(answer.status)
            data, headers = answer.body, []
        else:
            request.send_response(real.status)
            headers = [
                h for h in real.getheaders() if h[0].lower() not in ("content-length", "connection", "transfer-encoding")
            ]
        for name, value in headers:
            request.send_header(name, value)
        length = real.headers["Content-Length"] if request.command == "HEAD" and answer is None else str(len(data))
        request.send_header("Content-Length", length or "0")
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data[:cut] if cut else data)
        if cut:
            request.close_connection = True
