"""The Status call of real servers: what it tells whom, of engines, failures and the disk, also of several processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.server_kit import Peer, Reader, RunningServer, Sample, batch, hello, status
from support.descendants import descendants
from support.secure import bearer, entry, write_tokens
from support.waiting import wait_until

from slotstream.server.metrics import Metrics
from slotstream.v1 import ingest_pb2 as pb
from slotstream.v1 import samples_pb2 as read_pb

TOKENS = (
    entry("writer-a", ["a"], "ingest"),
    entry("reader-ab", ["b", "a"], "read"),
    entry("admin-a", ["a"], "ingest", "read", "delete", "admin"),
    entry("reader", ["*"], "read"),
    entry("root", ["*"], "ingest", "read", "delete", "admin"),
)


def ask(address: str, who: str = "") -> read_pb.StatusReply:
    with Reader(address, metadata=bearer(who) if who else ()) as reader:
        reply: read_pb.StatusReply = reader.status(read_pb.StatusRequest(), timeout=30)
        return reply


def until(address: str, condition: Callable[[read_pb.ServerStatus], Any]) -> read_pb.ServerStatus:
    """What the server says of itself, once `condition` holds of it."""
    seen: list[read_pb.ServerStatus] = []

    def holds() -> bool:
        try:
            seen[:] = [ask(address).server]
        except grpc.RpcError as error:
            if status(error)[0] is grpc.StatusCode.UNAVAILABLE:
                return False  # A process that was killed a moment ago had the connection.
            raise
        return bool(condition(seen[0]))

    wait_until(holds)
    return seen[0]


def test_without_admin_of_every_namespace_a_token_hears_of_itself_alone(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", *TOKENS)
    with RunningServer(tmp_path / "data", tokens_file=tokens) as server:
        with Peer(server.address, metadata=bearer("root")) as peer:
            peer.put(Sample("s", namespace="a"), 1)
            peer.put(Sample("s", namespace="c"), 2)
        told = {who: ask(server.address, who) for who in ("writer-a", "reader-ab", "admin-a", "reader", "root")}
        with Reader(server.address, metadata=bearer("nobody")) as nobody:
            refused = nobody.refused(lambda: nobody.status(read_pb.StatusRequest()))
    assert refused == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    assert {(one.version, one.health) for one in told.values()} == {(version("slotstream"), "ok")}
    assert {who: one.HasField("server") for who, one in told.items()} == {who: who == "root" for who in told}
    covers = {who: (list(one.covers), [(u.namespace, u.samples) for u in one.namespaces]) for who, one in told.items()}
    assert covers == {
        "writer-a": (["a"], []),
        "reader-ab": (["a", "b"], [("a", 1), ("b", 0)]),
        "admin-a": (["a"], [("a", 1)]),
        "reader": ([], [("a", 1), ("c", 1)]),
        "root": ([], [("a", 1), ("c", 1)]),
    }
    assert list(told["reader-ab"].rights) == ["read"]
    assert told["root"].server.tokens
    assert not told["root"].server.tls


def test_an_engine_is_told_from_its_hello_to_an_hour_after_its_end(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "data") as server:
        assert list(ask(server.address).server.engines) == []
        greeting = pb.Hello(protocol=1, engine_id="engine-1", worker_rank=2, vllm_version="0.33", slotstream_version="0.1.0")
        with Peer(server.address, greet=False) as peer:
            peer.say(pb.IngestRequest(hello=greeting))
            peer.hear()
            sample = Sample("open")
            peer.put(Sample("s"), 1)
            peer.say(sample.open(2), sample.chunk(2, 9, 0, 4))
            peer.acks(1)
            (engine,) = ask(server.address).server.engines
            assert (engine.engine_id, engine.rank, engine.vllm_version) == ("engine-1", 2, "0.33")
            assert (engine.slotstream_version, engine.transport, engine.address) == ("0.1.0", "grpc", "127.0.0.1")
            assert (engine.connected, engine.open_samples, engine.last_sample) == (True, 1, "default/s")
        server_status = until(server.address, lambda it: not it.engines[0].connected)
        assert len(server_status.engines) == 1
        with Peer(server.address, greet=False) as peer:
            peer.say(pb.IngestRequest(hello=greeting))
            peer.hear()
            (engine,) = ask(server.address).server.engines
            assert (engine.connected, engine.streams, engine.last_sample) == (True, 2, "")


def test_a_report_is_taken_alone_and_in_a_batch_and_shows_in_status(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "data") as server, Peer(server.address) as peer:
        assert peer.welcome.reports
        assert not ask(server.address).server.engines[0].HasField("report")
        peer.say(pb.IngestRequest(report=pb.EngineReport(host="a", layer_ids=[2, 18], links_lost=4)))
        (engine,) = until(server.address, lambda it: it.engines[0].HasField("report")).engines
        assert (engine.report.host, list(engine.report.layer_ids), engine.report.links_lost) == ("a", [2, 18], 4)
        sample = Sample()
        later = pb.IngestRequest(report=pb.EngineReport(host="b"))
        peer.say(batch(sample.open(1), later), sample.chunk(1, 1, 0, sample.rows), sample.commit(1))
        peer.committed()
        assert ask(server.address).server.engines[0].report.host == "b"


def test_reports_alone_keep_no_stream_alive_that_has_samples_open(tmp_path: Path) -> None:
    report = pb.IngestRequest(report=pb.EngineReport(host="a"))
    ended = threading.Event()
    with RunningServer(tmp_path / "data", stream_idle_s=0.5) as server, Peer(server.address) as peer:

        def report_on() -> None:
            while not ended.wait(0.02):
                peer.say(report, batch(report, report))

        sample = Sample()
        peer.say(sample.open(1), sample.chunk(1, 1, 0, 4))
        peer.acks(1)
        reporting = threading.Thread(target=report_on)
        reporting.start()
        try:
            assert peer.ending() == (grpc.StatusCode.DEADLINE_EXCEEDED, "TOO_SLOW")
        finally:
            ended.set()
            reporting.join()


def test_failures_counts_and_reads_are_told(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "data") as server:
        with Peer(server.address) as peer, Reader(server.address) as reader:
            peer.put(Sample("s"), 1)
            peer.say(Sample("bad").open(2, layer_ids=()))
            peer.failed()
            waiting = reader.frames(sample_id="later", wait_s=60.0)
            told = until(server.address, lambda it: it.waiting_reads)
            waiting.cancel()  # type: ignore[attr-defined]
        assert dict(told.failed) == {"BAD_LAYERS": 1}
        assert (told.reads, told.waiting_reads) == (1, 1)
        assert told.samples_per_s > 0
        assert told.received_bytes_per_s > told.samples_per_s
        assert 0 < told.rates_s <= told.counted_s <= told.uptime_s + 1
        assert 0 < told.free_bytes <= told.disk_bytes
        assert (told.processes, told.processes_wanted) == (1, 1)


def test_a_disk_that_is_full_or_away_is_the_servers_health(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "data"):
        pass  # A new store would not start on a full disk.
    with RunningServer(tmp_path / "data", free_bytes_min=1 << 60) as server:
        assert ask(server.address).health == "full"
    with RunningServer(tmp_path / "other") as server:
        (tmp_path / "other").rename(tmp_path / "moved")
        wait_until(lambda: ask(server.address).health == "disk")
        told = ask(server.address)
        assert not told.server.HasField("free_bytes")
        (tmp_path / "moved").rename(tmp_path / "other")
        wait_until(lambda: ask(server.address).health == "ok")


def test_a_server_that_drains_says_so(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "data", drain_s=60.0) as server, Peer(server.address) as peer:
        sample = Sample()
        peer.say(sample.open(1), sample.chunk(1, 1, 0, 4))
        peer.acks(1)
        drained = server.start_drain()
        wait_until(lambda: ask(server.address).health == "draining")
        peer.say(sample.chunk(1, 2, 4, sample.rows), sample.commit(1))
        peer.committed()
        drained.result(60)


@pytest.mark.timeout(240)
def test_where_the_catalogue_does_not_answer_all_else_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr("slotstream.server.samples.status._CATALOGUE_S", 0.05)
    monkeypatch.setattr("slotstream.server.samples.status.StatusCall._usages", lambda *_: answers.wait(60) and [])
    try:
        with RunningServer(tmp_path / "data") as server:
            told = ask(server.address)
            assert (told.namespaces_unknown, list(told.namespaces), told.health) == (True, [], "ok")
            assert told.HasField("server")
            answers.set()
            assert not ask(server.address).namespaces_unknown
    finally:
        answers.set()


def test_what_other_processes_counted_is_told_where_this_one_counted_nothing() -> None:
    here, there = Metrics(None), Metrics(None)
    there.samples.labels("committed", "").inc(5)
    there.samples.labels("failed", "SLOT_MISMATCH").inc(3)
    here.merge(1, there.values())
    counted = here.counted(0.0, None)
    assert (counted.committed, counted.failed) == (5, {"SLOT_MISMATCH": 3})


def test_several_processes_tell_of_all_engines(tmp_path: Path) -> None:
    peers = 10  # Spread over three processes by the kernel: all in one of them is a chance of one in 20,000.
    with RunningServer(tmp_path / "data", workers=3) as server:
        with ExitStack() as stack:
            for number in range(peers):
                peer = stack.enter_context(Peer(server.address, greet=False))
                greeting = hello()
                greeting.hello.engine_id = f"engine-{number}"
                peer.say(greeting)
                peer.hear()
                peer.put(Sample(f"s{number}"), 1)
            told = until(server.address, lambda it: sum(bool(one.last_sample) for one in it.engines) == peers)
            assert {one.engine_id: one.last_sample for one in told.engines} == {
                f"engine-{number}": f"default/s{number}" for number in range(peers)
            }
            assert all(one.connected for one in told.engines)
            assert (told.processes, told.processes_wanted) == (3, 3)
            own = server.server.metrics._own.get_sample_value("slotstream_ingest_streams")
            assert own is not None
            assert own < peers  # The others took their part.
            victims = descendants(os.getpid(), "slotstream.server.processes.worker")
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            until(server.address, lambda it: sum(one.connected for one in it.engines) == own)
            until(server.address, lambda it: it.processes == it.processes_wanted)
        until(server.address, lambda it: not any(one.connected for one in it.engines) and len(it.engines) == own)
