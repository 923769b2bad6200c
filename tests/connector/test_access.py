"""The connector's side of tokens and TLS: what fails, what it says, and that it comes back by itself."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.secure import Authority, entry, token, write_tokens
from support.server import ServerProcess
from support.worker_rig import Rig, cached_rows, make_rig
from transport.recorder import WAIT_S

from slotstream.client import connect
from slotstream.connector.faults import SampleFault
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.plan import SampleFinish, SampleOpen, StepPlan
from slotstream.connector.planning.server_health import ServerHealth
from slotstream.demo.processes import free_port
from slotstream.transport.grpc import GrpcSink
from slotstream.v1 import ingest_pb2
from slotstream.wire.access import Access
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import PROTOCOL_VERSION

HELLO = ingest_pb2.Hello(protocol=PROTOCOL_VERSION, engine_id="an-engine")


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the connector logs, at every level."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    logger = logging.getLogger("vllm.slotstream")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(before)


def _until(rig: Rig, faults: int) -> list[SampleFault]:
    """The next `faults` failures."""
    found: list[SampleFault] = []

    def heard() -> bool:
        found.extend(rig.worker.take_faults())
        return len(found) >= faults

    _wait(heard)
    return found


def _wait(condition: Callable[[], bool]) -> None:
    import time

    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def test_samples_wait_for_a_token_that_is_right(tmp_path: Path, logged: list[logging.LogRecord]) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", entry("engine", ["default"], "ingest", "read"))
    mine = tmp_path / "engine.token"
    mine.write_text(token("wrong") + "\n")
    with ServerProcess(tmp_path / "data", "--tokens", str(tokens)) as server:
        rig = make_rig(sink=GrpcSink(server.address, HELLO, access=Access(token_file=os.fspath(mine))))
        try:
            for number in range(4):
                rig.capture(f"s{number}", 8)
            _wait(lambda: any("the bearer token is not one that this server knows" in r.getMessage() for r in logged))
            assert rig.worker._sender.gauges()["capture_off:UNAUTHENTICATED"] == 1
            mine.unlink()  # No file, then one that is right: each is looked at on the next attempt.
            rig.capture("s4", 8)
            mine.write_text(token("engine"))
            with connect(server.address, token=token("engine")) as client:
                for number in range(5):
                    with client.read(f"s{number}") as reader:
                        assert b"".join(block.data for block in reader) == rig.rows(f"s{number}", 0, 8)
            assert rig.worker.take_faults() == []
            # A namespace that is not the token's: the sample fails, the link stays.
            write_tokens(tokens, entry("engine", ["other"], "ingest"))
            rig.capture("elsewhere", 8)
            (fault,) = _until(rig, 1)
            assert fault.code == "PERMISSION_DENIED"
            assert rig.worker._sender.link_up
            assert rig.worker._sender.gauges()["capture_off:UNAUTHENTICATED"] == 0
            assert rig.worker.take_stats()["link_up"] == 1
            assert rig.worker.take_stats() == {}
            server.process.kill()  # Nothing is captured any more: the link is told all the same, once.
            _wait(lambda: not rig.worker._sender.link_up)
            assert rig.worker.take_stats()["link_up"] == 0
            assert rig.worker.take_stats() == {}
        finally:
            rig.worker.close()
    said = [record.getMessage() for record in logged]
    assert sum("UNAUTHENTICATED" in line for line in said) == 1
    assert sum("PERMISSION_DENIED" in line for line in said) == 1
    assert not [line for line in said if token("wrong") in line or token("engine") in line]


def test_tls_with_a_certificate_and_a_token(tmp_path: Path) -> None:
    authority, others = Authority(tmp_path / "ca"), Authority(tmp_path / "others")
    pair, mine = authority.issue("server"), authority.issue("mine")
    tokens = write_tokens(tmp_path / "tokens.toml", entry("engine", ["default"], "ingest", "read"))
    files: dict[str, Any] = {
        "tls_ca": os.fspath(authority.path),
        "tls_cert": os.fspath(mine.cert),
        "tls_key": os.fspath(mine.key),
    }
    server_options = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-client-ca", str(authority.path))
    address = f"127.0.0.1:{free_port()}"
    trusting = tmp_path / "trusting.pem"
    trusting.write_bytes(others.path.read_bytes())
    with ServerProcess(tmp_path / "data", *server_options, "--tokens", str(tokens), address=address, **files) as server:
        access = Access(os.fspath(trusting), files["tls_cert"], files["tls_key"], token("engine"))
        watch = ServerHealth(server.address, access)
        rig = make_rig(sink=GrpcSink(server.address, HELLO, access=access))
        try:
            rig.capture("untrusted", 8)
            _wait(lambda: "handshake" in str(watch.problem()))
            trusting.write_bytes(authority.path.read_bytes())
            with connect(server.address, token=token("engine"), **files) as client, client.read("untrusted") as reader:
                assert reader.num_rows == 8
            _wait(lambda: watch.problem() is None)
            trusting.unlink()  # The link that is up stays up.
            rig.capture("still", 8)
            with connect(server.address, token=token("engine"), **files) as client, client.read("still") as reader:
                assert reader.num_rows == 8
        finally:
            rig.worker.close()
            watch.close()


def test_the_logs_of_both_ends_hold_no_prompt_id_or_secret(tmp_path: Path, logged: list[logging.LogRecord]) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", entry("engine", ["default"], "ingest"))
    marks = {"prompt": "PROMPTMARK"}
    ids = (9_871_230_000_000, 9_871_230_000_001)
    with ServerProcess(tmp_path / "data", "--tokens", str(tokens), "--log-level", "debug") as server:
        rig = make_rig(sink=GrpcSink(server.address, HELLO, access=Access(token=token("engine"))))
        try:
            # Stored; the same id with other content; more ids than rows; tags that the server refuses.
            for number, (token_ids, tags) in enumerate(
                ((ids, marks), (ids, marks), ((*ids, ids[0]), marks), (ids, {"PROMPTMARK\n": "x"}))
            ):
                table = rig.table(f"r{number}", 2)
                rig.write(rig.slots(f"r{number}", 0, 2))
                plan = StepPlan(
                    (SampleOpen(f"r{number}", "default", f"s{number // 2}", 0, 2, True, tags, {"text": "PROMPTMARK"}),),
                    (cached_rows(f"r{number}", 0, 2, 0, table),),
                    (SampleFinish(f"r{number}", token_ids, {"more": "PROMPTMARK"}),),
                )
                rig.step(plan, rig.slots(f"r{number}", 0, 2))
            codes = {fault.code for fault in _until(rig, 3)}
        finally:
            rig.worker.close()
        server.stop()
        log = server.log()
    said = "\n".join(record.getMessage() for record in logged)
    assert codes == {"ALREADY_EXISTS", "MISSING_ROWS", "BAD_TAGS"}
    assert "s0" in log
    assert "DEBUG" in log
    assert "s0" in said
    for secret in ("PROMPTMARK", "98712300000", token("engine")):
        assert secret not in log
        assert secret not in said


def test_the_options_are_checked_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLOTSTREAM_TOKEN", raising=False)
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("mine")
    ca, cert, key = map(os.fspath, (authority.path, pair.cert, pair.key))
    good = tmp_path / "token"
    good.write_text(token("engine") + "\n")
    (tmp_path / "empty").touch()
    for wrong, named in (
        ({"tls_ca": 3}, "tls_ca"),
        ({"tls_ca": str(tmp_path / "none")}, "tls_ca"),
        ({"tls_ca": str(good)}, "tls_ca"),
        ({"tls_ca": ca, "server": "unix:/s"}, "tls_ca"),
        ({"tls_ca": ca, "tls_cert": cert}, "tls_cert and tls_key"),
        ({"tls_ca": ca, "tls_key": key}, "tls_cert and tls_key"),
        ({"tls_cert": cert, "tls_key": key}, "tls_cert needs tls_ca"),
        ({"tls_ca": ca, "tls_cert": cert, "tls_key": cert}, "tls_cert and tls_key"),
        ({"token_file": str(tmp_path / "none")}, "token_file"),
        ({"token_file": str(tmp_path / "empty")}, "token_file"),
    ):
        with pytest.raises(ConfigError, match=f"^connector option {named}") as caught:
            ConnectorOptions.from_extra(wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="unknown connector options"):
        ConnectorOptions.from_extra({"token": token("engine")})  # It would show in `ps`.
    options = ConnectorOptions.from_extra({"tls_ca": ca, "tls_cert": cert, "tls_key": key, "token_file": str(good)})
    assert options.access == Access(ca, cert, key, None, str(good))
    assert options.access.call_metadata() == (("authorization", f"Bearer {token('engine')}"),)


def test_the_token_of_the_environment_is_used_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTSTREAM_TOKEN", token("engine"))
    options = ConnectorOptions.from_extra({})
    assert options.access.call_metadata() == (("authorization", f"Bearer {token('engine')}"),)
    assert token("engine") not in repr(options) + repr(options.access) + json.dumps(str(options))
    monkeypatch.setenv("SLOTSTREAM_TOKEN", "not a token")
    with pytest.raises(ConfigError, match="SLOTSTREAM_TOKEN") as caught:
        ConnectorOptions.from_extra({})
    assert "not a token" not in str(caught.value)
