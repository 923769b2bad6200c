"""Several peers that take all they get leave something to one who has nothing: by the table of limits, for two and eight."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.server_kit import Peer, Reader, RunningServer, Sample
from support.secure import bearer, entry, write_tokens
from support.waiting import wait_until

from slotstream.client import connect
from slotstream.server.access.limits import CONNECTIONS, LEASES, LIMITS, Limit
from slotstream.server.config import ServerConfig
from slotstream.server.samples.leases import LeaseBook
from slotstream.store.records import SampleKey
from slotstream.store.upkeep import lifetimes
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import StoreFull, TooMany


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize(
    "limit", [limit for limit in LIMITS if limit not in (CONNECTIONS, LEASES)], ids=lambda limit: limit.what
)
def test_a_newcomer_finds_room(tmp_path: Path, limit: Limit, count: int) -> None:
    config = ServerConfig(data_dir=tmp_path)
    shares = limit.shares(config)
    total, of_peer = limit.total(config), limit.of_peer(config)
    taken = 0
    for number in range(count):
        for _ in range(of_peer):
            try:
                shares.take(f"greedy{number}")
                taken += 1
            except TooMany:
                break
    assert taken <= total - total // 4 + count
    shares.take("newcomer")
    shares.give_back("greedy0")  # What others give back is theirs again, as far as it is not a newcomer's.
    if taken + 1 >= total - total // 4:
        with pytest.raises(TooMany):
            shares.take("newcomer")


@pytest.mark.parametrize("count", [2, 8])
def test_a_newcomer_gets_a_lease(tmp_path: Path, count: int) -> None:
    book = LeaseBook(ServerConfig(data_dir=tmp_path))
    taken = 0
    for number in range(count):
        for holder in range(2500):
            try:
                book.take(f"greedy{number}", SampleKey("n", "s"), f"h{holder}", 600)
                taken += 1
            except TooMany:
                break
    assert taken <= 7500 + count
    book.take("newcomer", SampleKey("n", "s"), "h", 600)
    book.release(SampleKey("n", "s"))
    for holder in range(2500):
        book.take("greedy0", SampleKey("n", "s"), f"h{holder}", 600)


def test_one_namespace_has_at_most_half_of_the_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetimes, "LEASES_MAX", 8)
    with RunningServer(tmp_path) as server, Peer(server.address) as peer, connect(server.address) as client:
        for number, space in enumerate("ab", 1):
            peer.put(Sample("s", namespace=space), number)
        for holder in range(4):
            client.lease("s", 600, namespace="a", holder=f"h{holder}")
        client.lease("s", 300, namespace="a", holder="h0")  # In place of its own.
        with pytest.raises(StoreFull, match="half as many in one namespace"):
            client.lease("s", 600, namespace="a", holder="more")
        client.lease("s", 600, namespace="b", holder="h")


def test_admin_ends_the_leases_of_all_holders(tmp_path: Path) -> None:
    tokens = write_tokens(
        tmp_path / "t", entry("reads", ["n"], "read", "ingest"), entry("may", ["n"], "read", "delete", "admin")
    )
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(tmp_path / "data", tokens_file=tokens))
        peer = stack.enter_context(Peer(server.address, metadata=bearer("reads")))
        reads, may = (stack.enter_context(Reader(server.address, metadata=bearer(who))) for who in ("reads", "may"))
        peer.put(Sample("s", namespace="n"), 1)
        for holder in ("a", "b"):
            reads.lease(pb.LeaseRequest(namespace="n", sample_id="s", holder=holder, seconds=600))
        of_all = pb.LeaseRequest(namespace="n", sample_id="s")
        delete = pb.DeleteRequest(namespace="n", sample_id="s")
        assert reads.refused(lambda: reads.lease(of_all))[1] == "PERMISSION_DENIED"
        assert may.refused(lambda: may.delete(delete))[1] == "LEASED"
        assert may.lease(of_all) == pb.LeaseReply()
        may.delete(delete)


@pytest.mark.parametrize("count", [2, 8])
def test_silent_connections_of_several_addresses_go_before_a_newcomers(tmp_path: Path, count: int) -> None:
    with RunningServer(tmp_path, connections_max=40) as server, ExitStack() as stack:
        host, _, port = server.address.rpartition(":")
        honest = stack.enter_context(Reader(server.address))
        honest.list(pb.ListRequest())  # It asked for something, and keeps its connection.
        for number in range(39):
            silent = stack.enter_context(socket.socket())
            silent.bind((f"127.0.0.{2 + number % count}", 0))
            silent.connect((host, int(port)))

        def comes() -> bool:
            with grpc.insecure_channel(server.address) as channel:
                call: Any = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
                try:
                    call(b"", timeout=5)
                except grpc.RpcError:
                    return False
                return True

        wait_until(comes)
        honest.list(pb.ListRequest())
