"""Limits of time and of what one message may hold: each reached limit has its code, and nobody else notices."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.server_kit import FAILED, Peer, Reader, RunningServer, Sample, hello, status
from support.files import files_below
from support.waiting import wait_until

from slotstream.v1 import ingest_pb2 as pb
from slotstream.v1 import samples_pb2 as read_pb
from slotstream.wire.names import CONTROL_BYTES_MAX, ROWS_MAX

S = Sample()
TOO_SLOW = (grpc.StatusCode.DEADLINE_EXCEEDED, "TOO_SLOW")


def test_a_stream_that_never_says_hello_is_ended(tmp_path: Path) -> None:
    with RunningServer(tmp_path, hello_s=0.1) as running:
        with Peer(running.address, greet=False) as silent:
            assert silent.ending() == TOO_SLOW
        assert running.metric("refused_streams_total", code="TOO_SLOW") == 1
        with Peer(running.address) as peer:
            peer.put(S, 1)


def test_a_stream_that_stops_in_the_middle_of_a_sample_is_ended(tmp_path: Path) -> None:
    with (
        RunningServer(tmp_path, stream_idle_s=0.4) as running,
        Reader(running.address) as reader,
        Peer(running.address) as idle,
        Peer(running.address) as stuck,
    ):
        idle.put(Sample("done"), 1)
        stuck.say(S.open(1), S.chunk(1, 1, 0, 20))
        assert stuck.ending() == TOO_SLOW
        wait_until(lambda: running.metric("open_samples") == 0)
        assert reader.state("s") == (FAILED, "INTERRUPTED")
        # One that has nothing open may be silent for as long as it likes.
        idle.put(Sample("later"), 2)
    assert not files_below(tmp_path, ".partial")


def test_a_sample_that_trickles_in_for_too_long_fails_alone(tmp_path: Path) -> None:
    with RunningServer(tmp_path, sample_s_max=0.4) as running, Reader(running.address) as reader:
        with Peer(running.address) as peer:
            peer.say(S.open(1), S.chunk(1, 1, 0, 20))
            failed = peer.failed()
            assert (failed.sample, failed.code, failed.retryable) == (1, "TOO_SLOW", True)
            peer.say(S.chunk(1, 2, 20, 40), S.commit(1))
            peer.put(Sample("t"), 2)
        assert reader.state("s") == (FAILED, "TOO_SLOW")


def test_a_reader_that_takes_nothing_is_let_go(tmp_path: Path) -> None:
    long = Sample(rows=256_000)  # 64 MB: more than gRPC takes of one call before anybody reads it.
    with RunningServer(tmp_path, read_stall_s=0.2) as running, Peer(running.address) as peer:
        peer.put(long, 1, chunk_rows=8000)
        with Reader(running.address) as reader, Reader(running.address) as other:
            frames = reader.frames(sample_id="s")
            next(frames)
            wait_until(lambda: running.metric("requests_total", method="Read", code="TOO_SLOW") == 1)
            assert running.metric("reads") == 0
            assert other.read("s")[1] == long.data
            with pytest.raises(grpc.RpcError):
                list(frames)


def test_a_commit_of_more_than_any_sample_has_is_dropped(running: RunningServer, peer: Peer) -> None:
    with Peer(running.address) as rude:
        rude.say(S.open(1), S.chunk(1, 1, 0, 40), S.commit(1, token_ids=[1] * (ROWS_MAX + 1)))
        assert rude.ending() == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL")
    peer.say(S.open(2), S.chunk(2, 2, 0, 40), S.commit(2, metadata={str(n): "" for n in range(20_000)}))
    assert peer.failed().code == "TOO_LARGE"
    peer.put(S, 3)


def test_an_open_that_is_too_long_ends_its_stream(running: RunningServer) -> None:
    """Unparsed: a parser would make an object of every tag."""
    with Peer(running.address) as rude:
        rude.say(S.open(1, tags={f"{n:08}": "x" for n in range(CONTROL_BYTES_MAX // 10)}))
        assert rude.ending() == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL")


def test_a_hello_that_is_too_long_ends_its_stream(running: RunningServer) -> None:
    with Peer(running.address, greet=False) as rude:
        rude.say(pb.IngestRequest(hello=pb.Hello(protocol=1, engine_id="x" * CONTROL_BYTES_MAX)))
        assert rude.ending() == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL")


@pytest.mark.parametrize("method", ["Read", "Stat", "List", "Delete", "Verify"])
@pytest.mark.parametrize(
    ("raw", "code"), [(b"\xff" * 20, "BAD_PARAMS"), (bytes(CONTROL_BYTES_MAX + 1), "TOO_LARGE")], ids=["garbage", "long"]
)
def test_a_request_that_is_none_or_too_long_has_its_code(running: RunningServer, method: str, raw: bytes, code: str) -> None:
    with grpc.insecure_channel(running.address) as channel:
        kind: Any = channel.unary_stream
        call = kind(f"/slotstream.v1.Samples/{method}")(raw, timeout=60)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert status(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, code)


def test_a_peer_may_have_so_many_reads(tmp_path: Path) -> None:
    with RunningServer(tmp_path, peer_reads_max=1) as running, Reader(running.address) as reader:
        waiting = reader.frames(sample_id="not-yet", wait_s=60.0)
        wait_until(lambda: running.metric("waiting_reads") == 1)
        assert reader.refused(lambda: reader.frames(sample_id="x")) == ("RESOURCE_EXHAUSTED", "TOO_MANY")
        assert len(reader.list(read_pb.ListRequest()).samples) == 0
        waiting.cancel()  # type: ignore[attr-defined]
        wait_until(lambda: running.metric("reads") == 0)
        assert reader.refused(lambda: reader.frames(sample_id="x"))[1] == "NOT_FOUND"


def test_a_peer_may_have_so_many_streams_without_tokens_too(tmp_path: Path) -> None:
    with RunningServer(tmp_path, peer_streams_max=1) as running:
        with Peer(running.address), Peer(running.address, greet=False) as second:
            assert second.ending() == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY")
        wait_until(lambda: running.metric("ingest_streams") == 0)
        with Peer(running.address, greet=False) as peer:
            peer.say(hello())
            assert peer.hear().HasField("welcome")


def test_a_page_that_is_too_long_is_made_of_fewer_samples(
    running: RunningServer, peer: Peer, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1000 samples of all the tags and metadata that they may have, a page would not fit a message."""
    monkeypatch.setattr("slotstream.server.samples.service._PAGE_BYTES_MAX", 30_000)
    for number in range(9):
        peer.put(Sample(f"s{number}", rows=2, metadata={"k": "v" * 10_000}), number + 1)
    seen: list[str] = []
    page_token = ""
    while True:
        page = reader.list(read_pb.ListRequest(page_size=1000, page_token=page_token))
        assert page.ByteSize() <= 30_000
        seen += [info.sample_id for info in page.samples]
        page_token = page.next_page_token
        if not page_token:
            break
    assert sorted(seen) == [f"s{number}" for number in range(9)]


def test_headers_have_a_limit(running: RunningServer) -> None:
    with Reader(running.address, metadata=(("x-long", "x" * 100_000),)) as reader:
        assert reader.refused(lambda: reader.list(read_pb.ListRequest()))[0] == "RESOURCE_EXHAUSTED"


def test_connections_that_never_get_as_far_as_a_call_disturb_nobody(running: RunningServer, peer: Peer) -> None:
    host, _, port = running.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(200)]
    try:
        for number, connection in enumerate(silent):
            if number % 2:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n"[: number % 20])
        peer.put(S, 1)
    finally:
        for connection in silent:
            connection.close()


def test_there_may_be_so_many_connections(tmp_path: Path) -> None:
    with RunningServer(tmp_path, connections_max=2) as running, Reader(running.address) as reader:
        assert len(reader.list(read_pb.ListRequest()).samples) == 0
        with Peer(running.address) as peer:
            with Peer(running.address, greet=False) as third:
                assert third.ending()[0] is grpc.StatusCode.UNAVAILABLE
            peer.put(S, 1)
        wait_until(lambda: running.metric("ingest_streams") == 0)
        assert reader.read("s")[1] == S.data


def test_a_watcher_that_leaves_takes_no_news_from_others(running: RunningServer) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    request = health_pb2.HealthCheckRequest(service="slotstream.v1.Ingest")
    options = (("grpc.use_local_subchannel_pool", 1),)
    with (
        grpc.insecure_channel(running.address, options=options) as first,
        grpc.insecure_channel(running.address, options=options) as second,
    ):
        stays = health_pb2_grpc.HealthStub(first).Watch(request, timeout=60)
        leaves = health_pb2_grpc.HealthStub(second).Watch(request, timeout=60)
        assert [next(stays).status, next(leaves).status] == [1, 1]
        leaves.cancel()
        assert health_pb2_grpc.HealthStub(second).Check(request, timeout=60).status == 1
        drained = running.start_drain()
        assert next(stays).status == health_pb2.HealthCheckResponse.NOT_SERVING
        drained.result(60)
