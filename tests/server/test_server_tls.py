"""TLS: who gets a connection, and certificates that are replaced while the server runs."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.server_kit import RunningServer
from support.secure import Authority, entry, health_of, token, write_tokens
from transport.recorder import WAIT_S, Recorder

from slotstream.client import PermissionDenied, ServerUnavailable, Unauthenticated, connect
from slotstream.server.access.tls import expiry_unix_s
from slotstream.transport.base import LinkUp
from slotstream.transport.channel import open_channel
from slotstream.transport.grpc import GrpcSink
from slotstream.transport.targets import Target
from slotstream.v1 import ingest_pb2
from slotstream.wire.access import Access
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import PROTOCOL_VERSION

HELLO = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="an-engine")
NO_CONNECTION = grpc.StatusCode.UNAVAILABLE


def _only(authority: Authority) -> Access:
    return Access(os.fspath(authority.path))


def test_a_server_with_a_certificate_speaks_tls_and_nothing_else(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    pair = ours.issue("server")
    with RunningServer(tmp_path / "data", tls_cert=pair.cert, tls_key=pair.key) as running:
        assert health_of(running.address, _only(ours)) == 1
        assert health_of(running.address, _only(theirs)) == NO_CONNECTION
        assert health_of(running.address, Access()) == NO_CONNECTION
        with connect(running.address, tls_ca=ours.path) as client:
            assert list(client.list()) == []
        with pytest.raises(ServerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            connect(running.address, tls_ca=theirs.path, connect_timeout_s=1.0)
        with connect(running.address, connect_timeout_s=0) as client, pytest.raises(ServerUnavailable, match="want TLS"):
            list(client.list())


def test_with_a_client_authority_only_its_certificates_get_a_connection(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    server, good, bad = ours.issue("server"), ours.issue("good", "trainer-7"), theirs.issue("bad")
    options: dict[str, Any] = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": ours.path}
    with RunningServer(tmp_path / "data", **options) as running:
        assert health_of(running.address, good.access(ours)) == 1
        assert health_of(running.address, bad.access(ours)) == NO_CONNECTION
        assert health_of(running.address, _only(ours)) == NO_CONNECTION
        with connect(running.address, tls_ca=ours.path, tls_cert=good.cert, tls_key=good.key) as client:
            assert list(client.list()) == []
    # With tokens as well, both are needed.
    tokens = write_tokens(tmp_path / "tokens.toml", entry("reader-a", ["a"], "read"))
    with RunningServer(tmp_path / "data", tokens_file=tokens, **options) as running:
        files: dict[str, Any] = {"tls_ca": ours.path, "tls_cert": good.cert, "tls_key": good.key}
        with connect(running.address, **files) as client, pytest.raises(Unauthenticated):
            list(client.list())
        with connect(running.address, token=token("reader-a"), **files) as client:
            assert list(client.list()) == []
            with pytest.raises(PermissionDenied):
                client.stat("s", namespace="b")
        assert health_of(running.address, Access(os.fspath(ours.path), token=token("reader-a"))) == NO_CONNECTION


def test_a_certificates_name_is_its_holders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, and as who shares the limits: one peer's streams leave room for another's."""
    caplog.set_level(logging.INFO)
    authority = Authority(tmp_path / "ca")
    server = authority.issue("server")
    options: dict[str, Any] = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": authority.path}
    sinks: list[GrpcSink] = []
    with RunningServer(tmp_path / "data", peer_streams_max=1, **options) as running:
        try:
            for name in ("trainer-7", "trainer-8"):
                access = authority.issue("mine", name).access(authority)
                sink, recorder = GrpcSink(running.address, HELLO, access=access), Recorder()
                sinks.append(sink)
                sink.start(recorder)
                recorder.wait(LinkUp)
            third = authority.issue("mine", "trainer-8").access(authority)
            with open_channel(Target(running.address, running.address), third) as channel:
                stream: Any = channel.stream_stream
                replies = stream("/slotstream.v1.Ingest/Stream")(iter(()))
                with pytest.raises(grpc.RpcError) as refused:
                    next(replies)
            assert "1 ingest streams at a time" in str(refused.value)
        finally:
            for sink in sinks:
                sink.close(WAIT_S)
    for name in ("trainer-7", "trainer-8"):
        assert f"stream of {name} at ipv4:127.0.0.1" in caplog.text


def test_new_connections_get_the_new_certificate_and_old_ones_go_on(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "one", "first"), Authority(tmp_path / "two", "second")
    pair = first.issue("server")
    with (
        RunningServer(tmp_path / "data", tls_cert=pair.cert, tls_key=pair.key) as running,
        connect(running.address, tls_ca=first.path) as client,
    ):
        assert list(client.list()) == []
        replacement = second.issue("server")
        for mine, new in ((pair.cert, replacement.cert), (pair.key, replacement.key)):
            new.replace(mine)
        assert health_of(running.address, _only(second)) == 1
        assert health_of(running.address, _only(first)) == NO_CONNECTION
        assert list(client.list()) == []  # On the connection that it has.


def test_a_new_client_authority_counts_for_new_connections(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    server, ourselves, others = ours.issue("server"), ours.issue("us"), theirs.issue("them")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(ours.path.read_bytes())
    options: dict[str, Any] = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": trusted}
    with RunningServer(tmp_path / "data", **options) as running:
        assert health_of(running.address, ourselves.access(ours)) == 1
        assert health_of(running.address, others.access(ours)) == NO_CONNECTION
        trusted.write_bytes(theirs.path.read_bytes())
        assert health_of(running.address, others.access(ours)) == 1
        assert health_of(running.address, ourselves.access(ours)) == NO_CONNECTION


@pytest.mark.parametrize("broken", ["another key", "garbage", "gone", "empty"])
def test_a_broken_new_certificate_leaves_the_old_one_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    caplog.set_level(logging.INFO)
    authority = Authority(tmp_path / "ca")
    pair, other = authority.issue("server"), authority.issue("other")
    with RunningServer(tmp_path / "data", tls_cert=pair.cert, tls_key=pair.key) as running:
        assert health_of(running.address, _only(authority)) == 1
        if broken == "gone":
            pair.key.unlink()
        else:
            pair.key.write_bytes({"another key": other.key.read_bytes(), "garbage": b"\xff" * 99, "empty": b""}[broken])
        for _ in range(3):
            assert health_of(running.address, _only(authority)) == 1
        said = [record for record in caplog.records if "the certificate of before stays in use" in record.message]
        assert len(said) == 1
        assert "PRIVATE KEY" not in caplog.text
        authority.issue("server")
        assert health_of(running.address, _only(authority)) == 1
        assert "new certificates from" in caplog.text


@pytest.mark.parametrize("which", ["tls_cert", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nxxxx\n-----END CERTIFICATE-----\n"])
def test_files_that_cannot_be_used_keep_it_from_starting(tmp_path: Path, which: str, content: bytes | None) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("server")
    options: dict[str, Any] = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": authority.path}
    options[which] = tmp_path / "wrong.pem"
    if content is not None:
        options[which].write_bytes(content)
    with pytest.raises(ConfigError, match=f"--{which.replace('_', '-')}"):
        RunningServer(tmp_path / "data", **options)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("year", [2031, 2049, 2050, 2120])  # DER writes years from 2050 on in another form.
def test_the_metrics_say_when_the_certificate_in_use_expires(tmp_path: Path, year: int) -> None:
    authority = Authority(tmp_path)
    until = datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC)
    pair = authority.issue("server", not_after=until)
    with RunningServer(tmp_path / "data", tls_cert=pair.cert, tls_key=pair.key) as running:
        assert running.metric("certificate_expiry_timestamp_seconds") == until.timestamp()
        authority.issue("server", not_after=until.replace(month=3))  # As cert-manager does: the new one counts once it is used.
        assert health_of(running.address, _only(authority)) == 1
        assert running.metric("certificate_expiry_timestamp_seconds") == until.replace(month=3).timestamp()


def test_a_certificate_that_cannot_be_read_expires_never(tmp_path: Path) -> None:
    pem = Authority(tmp_path).issue("server").cert.read_bytes()
    assert expiry_unix_s(pem) > 0
    assert expiry_unix_s(b"") == 0
    lines = pem.splitlines(keepends=True)
    assert expiry_unix_s(b"".join([*lines[:3], *lines[-1:]])) == 0
