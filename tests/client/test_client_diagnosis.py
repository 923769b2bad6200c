"""What stands between a client and its server is said in one sentence, and gRPC's own words are not."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from server.server_kit import RunningServer
from support.answering import answering
from support.secure import Authority

from slotstream.cli import main as cli
from slotstream.client import ServerUnavailable, connect
from slotstream.client.diagnosis import Diagnosis, diagnose
from slotstream.wire.access import Access


def _complaint(address: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What a command says, and a client that waits for its connection."""
    assert cli.main(["ls", "--server", address, *options]) == 1
    said = capsys.readouterr().err
    assert said.startswith("slotstream ls: ")
    assert said.endswith(" (UNAVAILABLE)\n") or said.endswith(" (SERVER_UNAVAILABLE)\n")
    assert said.count("\n") == 1
    for words in ("TSI_", "ipv4:", "Socket closed", "failed to connect", "no server answers"):
        assert words not in said
    names = {"--tls-ca": "tls_ca", "--tls-cert": "tls_cert", "--tls-key": "tls_key"}
    access: dict[str, Any] = {names[option]: value for option, value in zip(options[::2], options[1::2], strict=True)}
    with pytest.raises(ServerUnavailable) as caught:
        connect(address, connect_timeout_s=0.5, **access)
    assert str(caught.value) in said
    return said


def test_a_wrong_authority_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    pair = ours.issue("server")
    with RunningServer(tmp_path / "data", tls_cert=pair.cert, tls_key=pair.key) as server:
        said = _complaint(server.address, capsys, "--tls-ca", os.fspath(theirs.path))
        assert f"the certificate is not signed by {theirs.path}" in said
        assert "does it want TLS (tls_ca)?" in _complaint(server.address, capsys)
        assert diagnose(server.address, Access(os.fspath(ours.path))) is None
        elsewhere = server.address.replace("127.0.0.1", "127.0.0.2")
        found = diagnose(elsewhere, Access(os.fspath(ours.path)))
        assert found is None or found.what == "unreachable"  # It listens on 127.0.0.1 alone.


def test_a_certificate_for_another_host_or_from_another_time_is_said(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    good, old = ours.issue("server"), ours.issue("old", not_after=datetime.now(UTC) - timedelta(days=1))
    access = Access(os.fspath(ours.path))
    with RunningServer(
        tmp_path / "data", tls_cert=good.cert, tls_key=good.key, listen="0.0.0.0:0", tls_client_ca=ours.path
    ) as server:
        port = server.address.rpartition(":")[2]
        found = diagnose(f"127.0.0.2:{port}", access)
        assert found is not None
        assert found.sentence.startswith("the certificate is not for 127.0.0.2")
        found = diagnose(f"127.0.0.1:{port}", access)
        assert found is not None
        assert found.what == "wants_certificate"
    with RunningServer(tmp_path / "data", tls_cert=old.cert, tls_key=old.key) as server:
        found = diagnose(server.address, access)
        assert found is not None
        assert "has expired" in found.sentence


def test_tls_to_a_server_without_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path / "ours")
    with RunningServer(tmp_path / "data") as server:
        assert "this server speaks no TLS" in _complaint(server.address, capsys, "--tls-ca", os.fspath(authority.path))
        assert diagnose(server.address, Access()) is None
        with connect(server.address) as client:
            assert list(client.list()) == []


def test_the_metrics_port_is_no_slotstream_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path / "ours")
    with RunningServer(tmp_path / "data", metrics_listen="127.0.0.1:0") as server:
        assert server.server.metrics_address is not None
        assert "this is no slotstream port" in _complaint(server.server.metrics_address, capsys)
        said = _complaint(server.server.metrics_address, capsys, "--tls-ca", os.fspath(authority.path))
        assert "this server speaks no TLS" in said


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x", None])
def test_what_speaks_something_else_is_no_slotstream_port(answer: bytes | None) -> None:
    with answering(answer) as address:
        found = diagnose(address, Access())
    assert found is not None
    assert found.what == "no_slotstream"


@pytest.mark.parametrize("is_secured", [False, True])
def test_a_server_that_takes_no_more_connections_is_not_taken_for_one_that_wants_something(
    tmp_path: Path, is_secured: bool
) -> None:
    access = Access(os.fspath(Authority(tmp_path / "ours").path)) if is_secured else Access()
    with answering(b"") as address:
        found = diagnose(address, access)
    assert found is not None
    assert found.what == "hung_up"
    assert "takes no more connections now" in found.sentence
    assert "tls_c" not in found.sentence


def test_a_peer_that_hangs_up_behind_the_handshake_is_no_reason_to_ask_for_a_certificate(tmp_path: Path) -> None:
    """As a server does that has more connections of an address than it may have."""
    authority = Authority(tmp_path / "ours")
    pair = authority.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                with suppress(ssl.SSLError):
                    peer = context.wrap_socket(listener.accept()[0], server_side=True)
                    peer.recv(100)
                    peer.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    found = diagnose(f"127.0.0.1:{listener.getsockname()[1]}", Access(os.fspath(authority.path)))
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    assert found is not None
    assert (found.what, "certificate" in found.sentence) == ("hung_up", False)


def test_where_nobody_listens_nothing_else_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert diagnose(address, Access()) == Diagnosis("unreachable", "Connection refused")
    assert diagnose(f"unix:{tmp_path}/none", Access()) == Diagnosis("unreachable", "No such file or directory")
    with pytest.raises(ServerUnavailable, match=f"^no server answers at {address}: Connection refused$"):
        connect(address, connect_timeout_s=0.2)
