"""The page as visitors meet it: a real `python -m slotstream.web`, or its application in this process, over real HTTP."""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn

from slotstream.client.client import Client
from slotstream.client.rpc import Rpc
from slotstream.web.connections import ImpatientProtocol, uvicorn_config
from slotstream.web.sessions import Sessions, WrongTokens
from slotstream.web.settings import WebSettings
from slotstream.web.site import Site
from slotstream.wire.access import Access
from support.secure import token
from support.server import INTERRUPTIBLE


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: str

    @property
    def location(self) -> str:
        return str(self.headers["Location"])


class Visitor:
    """Somebody with a browser's habits: keeps cookies, and says from where a form was sent. Follows no redirect."""

    def __init__(self, url: str, *, ca: Path | None = None) -> None:
        self.url = url
        self.cookies: dict[str, str] = {}
        self._ca = ca

    def get(self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Answer:
        return self._ask(method, path, dict(headers or {}), None)

    def post(self, path: str, form: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None) -> Answer:
        """`headers` in place of the Origin that a browser sends."""
        sent = {"Content-Type": "application/x-www-form-urlencoded"} | dict(
            {"Origin": self.url} if headers is None else headers
        )
        return self._ask("POST", path, sent, urllib.parse.urlencode(form or {}))

    def log_in(self, name: str) -> Self:
        """With the token of that name; as in support.secure."""
        answer = self.post("/login", {"token": token(name)})
        assert answer.status == 303, answer.body
        return self

    def _ask(self, method: str, path: str, headers: dict[str, str], body: str | None) -> Answer:
        at = urllib.parse.urlsplit(self.url)
        assert at.hostname is not None
        connection = (
            http.client.HTTPSConnection(at.hostname, at.port, timeout=60, context=ssl.create_default_context(cafile=self._ca))
            if at.scheme == "https"
            else http.client.HTTPConnection(at.hostname, at.port, timeout=60)
        )
        if self.cookies:
            headers = {"Cookie": "; ".join(f"{key}={value}" for key, value in self.cookies.items()), **headers}
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            for line in answer.headers.get_all("Set-Cookie", []):
                key, _, value = line.partition(";")[0].partition("=")
                self.cookies[key] = value.strip('"')
                if "max-age=0" in line.lower():
                    del self.cookies[key]
            return Answer(answer.status, answer.headers, answer.read().decode())


class WebProcess:
    """`slotstream web` of the server at `server`, also where a shell runs the tests in the background; `url` until the end."""

    def __init__(self, server: str, *options: str) -> None:
        command = [sys.executable, "-c", INTERRUPTIBLE, "web", "--server", server, "--listen", "127.0.0.1:0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        first = self.process.stderr.readline()
        found = re.match(r"(https?://\S+) shows the samples of ", first)
        if found is None:
            self.process.kill()
            raise AssertionError(f"the page did not start: {first}{self.process.stderr.read()}")
        self.url = found[1]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """The exit code, and what it said since it started."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.stop()


class HandClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@contextlib.contextmanager
def site_of(server: str, clock: HandClock, protocol: type[ImpatientProtocol] = ImpatientProtocol, **more: Any) -> Iterator[str]:
    """The application in this process, by a clock of the test's own; its URL."""
    settings = WebSettings(listen="127.0.0.1:0", server=server, access=Access(), **more)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with Client(Rpc(server, timeout_s=30.0, access=Access()), stall_timeout_s=60.0) as client:
        site = Site(settings, client, sessions=Sessions(clock), wrong_tokens=WrongTokens(clock))
        runner = uvicorn.Server(uvicorn_config(site.app(port), protocol))
        thread = threading.Thread(target=runner.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            runner.should_exit = True
            thread.join(60)
            listener.close()
