"""Retention, leases, the scrubber and a lost disk, as readers and operators meet them."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.server_kit import COMMITTED, FAILED, NOT_SERVING, SERVING, Peer, Reader, RunningServer, Sample, health, status
from support.waiting import wait_until

from slotstream.cli import main as cli
from slotstream.client import Client, Leased, SampleFailed, SampleNotFound, connect
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.retention import Policy, Rule
from slotstream.v1 import samples_pb2 as read_pb
from slotstream.wire.errors import BadParams

Start = Callable[..., RunningServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server with these options; it is stopped with the test."""
    servers: list[RunningServer] = []

    def begin(**options: Any) -> RunningServer:
        servers.append(RunningServer(tmp_path / "data", **options))
        return servers[-1]

    yield begin
    for server in servers:
        server.__exit__(None, None, None)


def _rules(**namespaces: Rule) -> Policy:
    return Policy(namespaces=namespaces)


def _put(server: RunningServer, *names: str, namespace: str = "default") -> None:
    with Peer(server.address) as peer:
        for number, name in enumerate(names):
            peer.put(Sample(name, namespace=namespace), number + 1)


def _gone(client: Client, name: str, namespace: str = "default") -> bool:
    try:
        client.stat(name, namespace=namespace)
    except SampleNotFound:
        return True
    return False


def test_quotas_hold_while_samples_arrive(start: Start) -> None:
    server = start(retention=_rules(default=Rule(samples_max=2), kept=Rule()))
    _put(server, "x", namespace="kept")
    _put(server, "a", "b", "c", "d")
    with connect(server.address) as client:
        wait_until(lambda: _gone(client, "a") and _gone(client, "b"))
        assert [info.sample_id for info in client.list(namespace="default")] == ["d", "c"]
        assert not _gone(client, "x", "kept")
        wait_until(lambda: server.metric("deleted_samples_total", reason="samples") == 2)
        nbytes = {usage.namespace: usage.bytes for usage in client.usage().namespaces}
    assert nbytes["default"] == 2 * nbytes["kept"]
    assert server.metric("stored_bytes") == sum(nbytes.values())


def test_a_sample_goes_after_its_reads_of_every_row(start: Start) -> None:
    server = start(retention=_rules(default=Rule(delete_after_reads=2)))
    _put(server, "a", "b")
    with connect(server.address) as client:
        client.get("a", stop=10)
        client.get("a", start=10)
        client.get("a", layers=[9])
        wait_until(lambda: client.stat("a").reads == 1)
        client.get("a")
        wait_until(lambda: _gone(client, "a"))
        assert client.stat("b").reads == 0
    with connect(server.address, data_dir=server.data_dir) as client:
        client.get("b", stop=10)
        client.get("b")
        wait_until(lambda: client.stat("b").reads == 1)
        client.get("b")
        wait_until(lambda: _gone(client, "b"))
    wait_until(lambda: server.metric("deleted_samples_total", reason="reads") == 2)
    wait_until(lambda: server.metric("deleted_bytes_total", reason="reads") > 10_000)


def test_an_ack_deletes_where_the_rule_says_so_and_is_noted_elsewhere(start: Start) -> None:
    server = start(retention=_rules(once=Rule(delete_on_ack=True, age_s_max=3600)))
    for namespace in ("once", "kept"):
        _put(server, "a", "b", namespace=namespace)
    with connect(server.address) as client:
        sample = client.get("a", namespace="once", ack=True)
        assert sample.hidden_states.shape == (40, 2, 64)  # It was all here before the server was told.
        client.get("a", namespace="kept", ack=True)
        wait_until(lambda: _gone(client, "a", "once"))
        kept = client.stat("a", namespace="kept")
        assert kept.acked_unix_ns is not None
        assert kept.expires_unix_ns is None
        rest = client.stat("b", namespace="once")
        assert (rest.acked_unix_ns, rest.leased_until_unix_ns) == (None, None)
        assert rest.committed_unix_ns is not None
        assert rest.expires_unix_ns == rest.committed_unix_ns + 3600 * 10**9
        with pytest.raises(SampleNotFound):
            client.ack("a", namespace="once")


def test_a_lease_keeps_what_every_rule_would_delete(start: Start) -> None:
    server = start(retention=_rules(default=Rule(delete_on_ack=True)))
    _put(server, "a")
    with connect(server.address) as client, connect(server.address) as other:
        until = client.lease("a", 600)
        other.lease("a", 60, holder="trainer-7")
        client.ack("a")
        assert client.stat("a").leased_until_unix_ns == until
        with pytest.raises(Leased):
            client.delete("a")
        assert client.lease("a", 0) == 0
        assert client.get("a").token_ids.tolist() == Sample("a").token_ids
        other.lease("a", 0, holder="trainer-7")
        with contextlib.suppress(SampleNotFound):  # The get may have woken the sweep just now; else this does.
            client.ack("a")
        wait_until(lambda: _gone(client, "a"))
        for seconds in (-1, 86_401, float("nan")):
            with pytest.raises(BadParams):
                client.lease("a", seconds)
        with pytest.raises(BadParams):
            client.lease("a", 1, holder="a b")


def test_a_sample_that_somebody_reads_outlasts_its_rule(start: Start) -> None:
    server = start(retention=_rules(default=Rule(delete_on_ack=True)))
    _put(server, "a", "b")
    with connect(server.address) as client:
        with server.server.store.reader(Sample("a").key):
            client.ack("a")
            client.ack("b")
            wait_until(lambda: _gone(client, "b"))
            assert client.get("a").token_ids.tolist() == Sample("a").token_ids
        with contextlib.suppress(SampleNotFound):  # The get may have woken the sweep just now; else this does.
            client.ack("a")
        wait_until(lambda: _gone(client, "a"))


def test_where_room_is_missing_what_readers_are_done_with_goes_and_the_rest_stays(start: Start) -> None:
    server = start(retention=Policy(default=Rule(delete_read_when_full=True), free_bytes_target=1 << 60))
    _put(server, "unread", "some", "whole", "acked", "leased")
    with connect(server.address) as client:
        client.lease("leased", 600)
        client.ack("leased")
        client.get("some", start=0, stop=5)  # Not every row: it is not counted.
        client.get("whole")
        client.ack("acked")
        wait_until(lambda: _gone(client, "whole") and _gone(client, "acked"))
        client.lease("leased", 0)
        wait_until(lambda: _gone(client, "leased"))
        assert sorted(info.sample_id for info in client.list()) == ["some", "unread"]
    wait_until(lambda: server.metric("deleted_samples_total", reason="free_space") == 3)


@pytest.mark.parametrize("method", ["ack", "lease", "usage"])
def test_names_that_cannot_be_are_refused(start: Start, method: str) -> None:
    server = start()
    kind = {"ack": read_pb.AckRequest, "lease": read_pb.LeaseRequest, "usage": read_pb.UsageRequest}[method]
    with Reader(server.address) as reader:
        with pytest.raises(grpc.RpcError) as refused:
            getattr(reader, method)(kind(namespace="../x"))
        assert status(refused.value) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_NAMESPACE")


def test_usage_comes_in_pages(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.server.samples.admin.USAGE_PAGE", 2)
    server = start(retention=_rules(b=Rule(bytes_max=10**12, delete_on_ack=True)), scrub_every_s=0.0)
    for namespace in "abcde":
        _put(server, "x", namespace=namespace)
    with connect(server.address) as client:
        usage = client.usage()
        assert [(n.namespace, n.samples, n.failed) for n in usage.namespaces] == [(name, 1, 0) for name in "abcde"]
        assert usage.namespaces[1].limits == {"bytes_max": "1000000000000", "delete_on_ack": "true"}
        assert usage.free_bytes
        assert (usage.scrub_every_s, usage.free_bytes_target, usage.quarantined_files) == (None, None, 0)
        (alone,) = client.usage(namespace="c").namespaces
        assert alone == usage.namespaces[2]


def test_stat_without_an_id_shows_the_server(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(retention=_rules(default=Rule(samples_max=5)))
    monkeypatch.setenv("SLOTSTREAM_SERVER", server.address)
    assert cli.main(["stat"]) == 0
    assert capsys.readouterr().out.startswith("free ")
    _put(server, "a")
    assert cli.main(["stat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAMESPACE", "SAMPLES", "SIZE", "FAILED", "RULES"]
    assert lines[1].split()[:2] == ["default", "1"]
    assert lines[1].endswith("samples_max=5")
    assert lines[-1] == "scrubbing   idle"
    assert cli.main(["stat", "--json"]) == 0
    assert '"quarantined_files": 0' in capsys.readouterr().out
    with connect(server.address) as client:
        client.lease("a", 60)
        client.ack("a")
    assert cli.main(["stat", "a"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^leased until +20[0-9-]+T[0-9:]+Z$", out, re.MULTILINE)
    assert re.search(r"^acked +20[0-9-]+T", out, re.MULTILINE)


def _flip(server: RunningServer, name: str) -> None:
    path = Sample(name).key.path(server.config.data_dir)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_the_scrubber_finds_bit_rot(start: Start) -> None:
    server = start(scrub_every_s=0.05, scrub_bytes_per_s=1e12)
    _put(server, "bad", "sound")
    _flip(server, "bad")
    wait_until(lambda: server.metric("quarantined_samples_total") == 1)
    with connect(server.address) as client:
        with pytest.raises(SampleFailed) as failed:
            client.get("bad")
        assert failed.value.reason == "DAMAGED"
        assert "quarantine" in (client.stat("bad").error_message or "")
        assert client.get("sound").token_ids.tolist() == Sample("sound").token_ids
        usage = client.usage()
        assert usage.quarantined_files == 1
        assert usage.quarantined_bytes is not None
        assert usage.quarantined_bytes > 10_000
        assert usage.scrub_every_s == 0.05
    wait_until(lambda: server.metric("scrub_passes_total") >= 2)
    assert server.metric("scrubbed_bytes_total") > 10_000


def test_verify_can_quarantine(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = start()
    _put(server, "bad", "sound")
    _flip(server, "bad")
    monkeypatch.setenv("SLOTSTREAM_SERVER", server.address)
    assert cli.main(["verify"]) == 3  # Finds, and changes nothing.
    with Reader(server.address) as reader:
        assert reader.state("bad")[0] == COMMITTED
        assert cli.main(["verify", "--quarantine"]) == 3
        assert reader.state("bad") == (FAILED, "DAMAGED")
    assert capsys.readouterr().out.splitlines()[-1].endswith("; quarantined")
    assert cli.main(["verify", "--quarantine"]) == 0
    assert cli.main(["verify", "--data", str(tmp_path / "data"), "--quarantine"]) == 1


def test_a_disk_that_goes_away_is_noticed_and_nothing_is_taken_until_it_is_back(start: Start) -> None:
    server = start()
    _put(server, "old")
    data_dir = server.config.data_dir
    away = data_dir.with_name("unmounted")
    data_dir.rename(away)
    data_dir.mkdir()
    services = ("", "slotstream.v1.Ingest", "slotstream.v1.Samples")
    wait_until(lambda: all(health(server, service) == NOT_SERVING for service in services))
    with Peer(server.address) as peer:
        peer.say(Sample("new").open(1))
        failed = peer.failed()
        assert (failed.code, failed.retryable) == ("STORE_GONE", True)
    with Reader(server.address) as reader:
        assert reader.refused(lambda: reader.read("old")) == ("UNAVAILABLE", "STORE_GONE")
    assert list(data_dir.iterdir()) == []
    data_dir.rmdir()
    away.rename(data_dir)
    wait_until(lambda: all(health(server, service) == SERVING for service in services))
    _put(server, "new")
    with connect(server.address) as client:
        assert client.get("old").token_ids.tolist() == Sample("old").token_ids


def test_a_clock_in_doubt_is_said_and_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    month_ns = 30 * 86400 * 10**9
    policy = _rules(default=Rule(age_s_max=7 * 86400.0))

    def served(**options: Any) -> RunningServer:
        ahead = SampleStore.open(tmp_path / "data", wall=lambda: time.time_ns() + month_ns)
        return RunningServer(tmp_path / "data", store=ahead, retention=policy, **options)

    with RunningServer(tmp_path / "data", retention=policy) as server:
        _put(server, "a", "b")
    with served() as server, connect(server.address) as client:
        wait_until(lambda: server.metric("age_held_namespaces") == 1)
        usage = client.usage()
        assert usage.clock is not None
        assert "30 days ahead" in usage.clock
        assert usage.age_held == ("default",)
        assert [client.stat(name).sample_id for name in "ab"] == ["a", "b"]
        assert cli.main(["stat", "--server", server.address]) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert re.match(
            r"clock +the clock is 30 days ahead .*; nothing is deleted by age in default \(serve --accept-clock\)", line
        )
    assert caplog.text.count("nothing is deleted by age in ['default']") == 1
    with served(accept_clock=True) as server, connect(server.address) as client:
        wait_until(lambda: _gone(client, "a") and _gone(client, "b"))
        assert client.usage().clock is None
