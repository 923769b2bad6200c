"""What `slotstream certify` asks of an engine on this machine. A small HTTP server stands for the engine."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from slotstream.certify import load, run
from slotstream.certify.flags import Flags
from slotstream.demo.processes import complete, free_port, healthy

_ANSWERS = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[2])), Engine).serve_forever()
"""


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


def test_the_command_of_the_report_is_the_one_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stands_in(model: Path | str, port: int) -> list[str]:
        return [sys.executable, "-c", _ANSWERS, str(model), str(port)]

    monkeypatch.setattr(run, "vllm_command", stands_in)
    setting = run.Setting(tmp_path, 1, 0, 60.0, lambda line: None, lambda what, count: contextlib.nullcontext(lambda: None))
    with run._engine(Flags(["m", "--seed", "1"]), tmp_path / "model", setting) as (port, running, command):
        ran = Path(f"/proc/{running.process.pid}/cmdline").read_text().split("\0")[:-1]
        assert command == ran == [*stands_in(tmp_path / "model", port), "--seed", "1"]
