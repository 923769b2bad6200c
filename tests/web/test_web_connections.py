"""Connections that bring no request, or take no answer, end."""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Iterator
from typing import ClassVar

import pytest
from support.server import ServerProcess
from support.web import HandClock, Visitor, site_of

from slotstream.web.connections import HEAD_BYTES_MAX, ImpatientProtocol


class Hasty(ImpatientProtocol):
    REQUEST_S: ClassVar[float] = 0.2
    ANSWER_S: ClassVar[float] = 0.2
    LOOK_S: ClassVar[float] = 0.05


@pytest.fixture(scope="module")
def hasty(store: ServerProcess) -> Iterator[str]:
    with site_of(store.address, HandClock(), Hasty) as url:
        yield url


def _connected(url: str) -> socket.socket:
    at = urllib.parse.urlsplit(url)
    assert at.hostname is not None
    assert at.port is not None
    return socket.create_connection((at.hostname, at.port), timeout=60)


def _until_closed(connection: socket.socket) -> bytes:
    taken = b""
    try:
        while piece := connection.recv(1 << 16):
            taken += piece
    except ConnectionResetError:
        pass
    return taken


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nHost: 127", b"GET /login HTTP/1.1\r\nX: y\r\n"])
def test_a_connection_without_a_whole_request_ends(hasty: str, head: bytes) -> None:
    with _connected(hasty) as connection:
        connection.sendall(head)
        assert _until_closed(connection) == b""


def test_a_second_request_must_come_too(hasty: str) -> None:
    with _connected(hasty) as connection:
        host = urllib.parse.urlsplit(hasty).netloc.encode()
        connection.sendall(b"GET /static/icon.svg HTTP/1.1\r\nHost: " + host + b"\r\n\r\nGET /static")
        assert _until_closed(connection).count(b"HTTP/1.1 200") == 1


def test_a_body_that_does_not_come_ends(hasty: str) -> None:
    with _connected(hasty) as connection:
        host = urllib.parse.urlsplit(hasty).netloc
        lines = (
            "POST /login HTTP/1.1",
            f"Host: {host}",
            f"Origin: http://{host}",
            "Content-Type: application/x-www-form-urlencoded",
            "Content-Length: 100",
        )
        connection.sendall("\r\n".join((*lines, "", "token=")).encode())
        assert _until_closed(connection) == b""


def test_a_long_head_is_refused(hasty: str) -> None:
    with _connected(hasty) as connection:
        connection.sendall(b"GET /login HTTP/1.1\r\nX: " + b"x" * (HEAD_BYTES_MAX + 1))
        assert _until_closed(connection).startswith(b"HTTP/1.1 400 ")


def test_others_are_served(hasty: str) -> None:
    assert Visitor(hasty).get("/login").status == 200
