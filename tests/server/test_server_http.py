"""What the ports of metrics and probes answer: their own pages, 404 to everything else, and nothing of what was asked."""

from __future__ import annotations

import gzip
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from slotstream.server.health.probes import Probes, serve_probes
from slotstream.server.http import Answer, serve_pages
from slotstream.server.metrics import Metrics, serve_metrics

TIMEOUT_S = 30
PORTS = ("metrics", "probes")


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, str]]:
    """The address of each."""
    with ExitStack() as closing:
        metrics, stop_metrics = serve_metrics(Metrics(None), "127.0.0.1:0")
        closing.callback(stop_metrics)
        probes, stop_probes = serve_probes(Probes(), "127.0.0.1:0")
        closing.callback(stop_probes)
        yield {"metrics": metrics, "probes": probes}


def _ask(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(f"http://{address}{path}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def _say(address: str, said: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as peer, peer.makefile("rb") as heard:
        peer.sendall(said)
        return heard.read()


def test_a_scraper_gets_the_format_and_the_encoding_that_it_asks_for(ports: dict[str, str]) -> None:
    address = ports["metrics"]
    status, headers, plain = _ask(address, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert b"slotstream_open_samples 0.0\n" in plain
    assert _ask(address, "/metrics?a=b")[2] == plain
    _, headers, body = _ask(address, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    _, headers, packed = _ask(address, "/metrics", **{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed) == plain
    status, headers, nothing = _ask(address, "/metrics", "HEAD")
    assert (status, int(headers["Content-Length"]), nothing) == (200, len(plain), b"")


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/favicon.ico"),
        ("GET", "/metrics/"),
        ("GET", "/livez/metrics"),
        ("HEAD", "/other"),
        ("POST", "/metrics"),
        ("OPTIONS", "/metrics"),
        ("PUT", "/livez"),
        ("BREW", "/readyz"),
    ],
)
def test_everything_else_is_not_found(ports: dict[str, str], port: str, method: str, path: str) -> None:
    status, headers, body = _ask(ports[port], path, method)
    assert (status, body) == (404, b"" if method == "HEAD" else b"unknown")
    assert headers["Content-Type"] == "text/plain; charset=utf-8"


def test_each_port_has_its_own_pages_only(ports: dict[str, str]) -> None:
    assert [_ask(ports["metrics"], path)[0] for path in ("/metrics", "/livez", "/readyz")] == [200, 404, 404]
    assert [_ask(ports["probes"], path)[0] for path in ("/metrics", "/livez", "/readyz")] == [404, 200, 503]


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize(
    ("said", "begins"),
    [
        (b"<EVIL> /metrics HTTP/1.0\r\n\r\n", b"HTTP/1.0 404 Not Found\r\n"),
        (b"GET /<EVIL> HTTP/1.0\r\n\r\n", b"HTTP/1.0 404 Not Found\r\n"),
        (b"GET /metrics HTTP/1.0\r\n" + b"EVIL: 1\r\n" * 200 + b"\r\n", b"HTTP/1.0 431 "),
        (b"GET /" + b"EVIL" * 20_000 + b" HTTP/1.0\r\n\r\n", b"HTTP/1.0 414 "),
        # Of no version that is known: no head.
        (b"GET /metrics <EVIL>\r\n\r\n", b"bad request"),
        (b"GET /metrics HTTP/9<EVIL>\r\n\r\n", b"bad request"),
        (b"GET /metrics HTTP/1.0 <EVIL>\r\n\r\n", b"bad request"),
        (b"<EVIL> /metrics\r\n\r\n", b"bad request"),
    ],
)
def test_an_error_repeats_nothing_of_what_was_asked(ports: dict[str, str], port: str, said: bytes, begins: bytes) -> None:
    heard = _say(ports[port], said)
    assert heard.startswith(begins)
    assert b"EVIL" not in heard


def test_a_page_that_fails_is_an_answer() -> None:
    def broken(_: object) -> Answer:
        raise RuntimeError("a secret")

    address, stop = serve_pages("metrics", "127.0.0.1:0", {"/metrics": broken})
    try:
        status, _, body = _ask(address, "/metrics")
    finally:
        stop()
    assert (status, body) == (500, b"internal server error")
