"""What many visitors may take at a time: windows, tokens that are tried, connections."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
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
from slotstream.web.window import READS_MAX, WAITING_MAX, WINDOW_BYTES_MAX, WindowReader
from slotstream.wire.errors import TooLarge


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


def _look(url: str) -> Visitor:
    visitor = Visitor(url)
    assert visitor.post("/login", {"token": ""}).status == 303
    return visitor


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> _Gate:
    """Each window's read waits there."""
    gate, read = _Gate(), window._read

    def slow(*arguments: Any) -> Any:
        with gate.held():
            return read(*arguments)

    monkeypatch.setattr(window, "_read", slow)
    return gate


_REFUSED = "too many windows are being read: try again (TOO_MANY)"


def test_two_windows_are_read_at_a_time_and_32_wait(
    server: ServerProcess, ingest: IngestClient, namespace: str, gate: _Gate
) -> None:
    """The next one is told so at once, beside the sample's facts."""
    ingest.store(SyntheticSample("s", namespace=namespace))
    path, many = f"/samples/{namespace}/s", READS_MAX + WAITING_MAX
    with site_of(server.address, HandClock(), allow_anonymous=True) as url, ThreadPoolExecutor(many + 5) as pool:
        visitor = _look(url)
        looks = [pool.submit(visitor.get, path) for _ in range(many + 5)]
        refused = [look.result(60) for look in itertools.islice(as_completed(looks, 60), 5)]
        wait_until(lambda: gate.inside == READS_MAX)
        for answer in (*refused, visitor.get(path)):
            assert (answer.status, _REFUSED in answer.body, "Facts" in answer.body) == (200, True, True)
        gate.opens.set()
        answers = [look.result(60) for look in looks]
    assert sum(_REFUSED in answer.body for answer in answers) == 5
    assert sum("rows 0 to 39 of 40" in answer.body for answer in answers) == many
    assert (gate.most, gate.came) == (READS_MAX, many) == (2, 34)


def test_who_waits_for_a_window_does_not_wait_for_ever(
    server: ServerProcess, ingest: IngestClient, namespace: str, gate: _Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest.store(SyntheticSample("s", namespace=namespace))
    monkeypatch.setattr(window, "WAIT_S", 0.05)
    path = f"/samples/{namespace}/s"
    with site_of(server.address, HandClock(), allow_anonymous=True) as url, ThreadPoolExecutor(READS_MAX) as pool:
        visitor = _look(url)
        looks = [pool.submit(visitor.get, path) for _ in range(READS_MAX)]
        wait_until(lambda: gate.inside == READS_MAX)
        assert _REFUSED in visitor.get(path).body
        gate.opens.set()
        assert all("rows 0 to 39" in look.result(60).body for look in looks)
        assert "rows 0 to 39" in visitor.get(path).body  # Who gave up holds no place.


class _Wide(SyntheticSample):
    """Rows of 4 MiB."""

    def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
        return bytes(self.row_bytes) * ((self.num_tokens if stop is None else stop) - start)


_WIDE = _Wide("wide", dtype="F32", layer_ids=(1,), hidden_size=1 << 20, num_tokens=6)


def test_a_window_reads_16_mib_at_most(tmp_path: Path) -> None:
    """As the server counts what it sends."""
    with ServerProcess(tmp_path / "data", "--metrics", "127.0.0.1:0") as server:
        with IngestClient(server.address) as sender:
            sender.store(_WIDE, rows_per_chunk=1)
        with WebProcess(server.address, "--allow-anonymous") as page:
            visitor = _look(page.url)
            for query, rows, shown in (("", 4, "rows 0 to 3"), ("?row=5", 2, "rows 4 to 5"), ("?start=1", 4, "rows 1 to 4")):
                before = server.metric("slotstream_sent_bytes_total")
                assert f"{shown} of 6" in visitor.get(f"/samples/default/wide{query}").body
                sent = server.metric("slotstream_sent_bytes_total") - before
                assert rows * _WIDE.row_bytes <= sent < rows * _WIDE.row_bytes + 4096
    assert 4 * _WIDE.row_bytes == WINDOW_BYTES_MAX == 16 << 20


def test_a_sample_that_takes_the_name_of_a_smaller_one_is_not_read(
    server: ServerProcess, ingest: IngestClient, namespace: str
) -> None:
    """Between the look at its facts and the read of its rows."""
    with connect(server.address) as client:
        ingest.store(replace(_WIDE, namespace=namespace, hidden_size=16))
        before = client.stat("wide", namespace=namespace)
        client.delete("wide", namespace=namespace)
        ingest.store(replace(_WIDE, namespace=namespace), rows_per_chunk=1)
        with pytest.raises(TooLarge, match="another one now"):
            asyncio.run(WindowReader().read(client, before, 0, 6, None))


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
