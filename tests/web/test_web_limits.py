"""What many visitors may take at a time: windows, tokens that are tried, connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.ingest_client import IngestClient
from support.secure import token
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.waiting import wait_until
from support.web import HandClock, Visitor, WebProcess, site_of

from slotstream.client import Client, connect
from slotstream.web import window
from slotstream.web.connections import CONNECTIONS_MAX
from slotstream.web.site import Site
from slotstream.web.window import READS_MAX, WAITING_MAX, WindowReader
from slotstream.wire.errors import TooMany


class _Gate:
    """Holds those who come until it opens, and knows how many there were at most."""

    def __init__(self) -> None:
        self.opens = threading.Event()
        self._lock = threading.Lock()
        self.inside = self.most = self.came = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self.inside, self.came = self.inside + 1, self.came + 1
            self.most = max(self.most, self.inside)
        try:
            assert self.opens.wait(60)
            yield
        finally:
            with self._lock:
                self.inside -= 1


def test_two_windows_are_read_at_a_time_and_32_wait(
    server: ServerProcess, ingest: IngestClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest.store(SyntheticSample("s", namespace=namespace))
    gate, read = _Gate(), window._read

    def slow(*arguments: Any) -> Any:
        with gate.held():
            return read(*arguments)

    monkeypatch.setattr(window, "_read", slow)
    many = READS_MAX + WAITING_MAX + 5

    async def look(client: Client) -> list[Any]:
        info = client.stat("s", namespace=namespace)
        windows = WindowReader()
        looks = [asyncio.create_task(windows.read(client, info, 0, 10, None)) for _ in range(many)]
        done, _ = await asyncio.wait(looks, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(wait_until, lambda: gate.inside == READS_MAX)
        assert len(done) <= 5  # The others are being read, or wait.
        gate.opens.set()
        return await asyncio.gather(*looks, return_exceptions=True)

    with connect(server.address) as client:
        answers = asyncio.run(look(client))
    assert gate.most == READS_MAX == 2
    assert sum(isinstance(answer, TooMany) for answer in answers) == 5
    assert sum(isinstance(answer, window.Window) and answer.num_rows == 10 for answer in answers) == READS_MAX + WAITING_MAX


def test_four_tokens_are_tried_at_a_time(store: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, checked = _Gate(), Site._checked

    def slow(site: Site, word: str) -> Client:
        with gate.held():
            return checked(site, word)

    monkeypatch.setattr(Site, "_checked", slow)
    with site_of(store.address, HandClock()) as url, ThreadPoolExecutor(7) as pool:
        logins = [pool.submit(Visitor(url).post, "/login", {"token": token("alice")}) for _ in range(7)]
        wait_until(lambda: gate.inside == 4)
        assert Visitor(url).get("/login").status == 200  # Who tries none does not wait.
        gate.opens.set()
        assert {login.result(60).status for login in logins} == {303}
    assert (gate.most, gate.came) == (4, 7)


def test_more_connections_than_the_page_takes_are_told_so(store: ServerProcess) -> None:
    with WebProcess(store.address) as page, contextlib.ExitStack() as stack:
        at = urllib.parse.urlsplit(page.url)
        silent = [stack.enter_context(socket.create_connection((at.hostname, at.port))) for _ in range(CONNECTIONS_MAX - 2)]
        assert Visitor(page.url).get("/login").status == 200
        silent += [stack.enter_context(socket.create_connection((at.hostname, at.port))) for _ in range(2)]
        wait_until(lambda: Visitor(page.url).get("/login").status == 503)
        for connection in silent:
            connection.close()
        wait_until(lambda: Visitor(page.url).get("/login").status == 200)
