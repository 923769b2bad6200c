"""What `slotstream certify` asks of an engine on this machine. A small HTTP server stands for the engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slotstream.certify import load
from slotstream.demo.processes import complete, free_port, healthy


class _Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(b"vllm:up 1\n")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(json.dumps({"choices": [{"token_ids": [7]}]}).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_web_proxy_of_the_environments_is_not_asked(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    assert healthy(port)
    assert load.metrics(port) == "vllm:up 1\n"
    (answer,) = load.send(port, [load.Request("one", (1, 2))], 1, lambda: None)
    assert answer.tokens == (7,)
    assert complete(port, {}) == {"choices": [{"token_ids": [7]}]}
