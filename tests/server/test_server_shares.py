"""By the table of limits: one peer, two or eight that take all they can get are refused, and another one has its share."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server.server_kit import Peer, Reader, RunningServer, Sample, hello, status
from support.secure import bearer, entry, write_tokens
from support.sqlite_of import sqlite_of
from support.unfinished_calls import UnfinishedCalls
from support.waiting import wait_until

from slotstream.server.access import bodies, connections
from slotstream.server.access.gate import Shares
from slotstream.server.access.limits import LIMITS, Limit
from slotstream.server.config import ServerConfig
from slotstream.store.samples import SampleStore
from slotstream.v1 import samples_pb2 as read_pb
from slotstream.wire.errors import TooMany

OPTIONS: dict[str, Any] = {
    "streams_max": 4,
    "peer_streams_max": 3,
    "peer_open_samples_max": 3,
    "reads_max": 8,
    "peer_reads_max": 4,
    "requests_max": 3,
    "connections_max": 12,
}
SHORT = Sample("short", namespace="long")
LONG = Sample("long", rows=256_000, namespace="long")  # 64 MB: more than gRPC takes of one call before anybody reads it.
TOO_MANY = (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY")
STORE_FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL")  # Leases are the store's, which limits all of them.
OTHER_ADDRESS = "127.0.0.2"
# Two peers may have all of it together; and three quarters, and one more for each of eight peers, are not all of it.
WIDE_OPTIONS: dict[str, Any] = {
    "streams_max": 32,
    "peer_streams_max": 16,
    "peer_open_samples_max": 16,
    "reads_max": 40,
    "peer_reads_max": 20,
    "requests_max": 16,
    "connections_max": 400,
}
CROWDS = [2, 8]


class Arena:
    """A server, and peers that hold what they got until the end."""

    def __init__(self, server: RunningServer, stack: ExitStack) -> None:
        self.server = server
        self.stack = stack
        self._peers: dict[str, Peer] = {}
        self._stored: set[str] = set()
        self._numbers = iter(range(1, 1000))

    def store(self, sample: Sample) -> None:
        """In a namespace that everybody may read, unless it is there."""
        if sample.sample_id not in self._stored:
            self._stored.add(sample.sample_id)
            self.peer("owner").put(sample, len(self._stored), chunk_rows=32_000)

    def peer(self, who: str) -> Peer:
        if who not in self._peers:
            self._peers[who] = self.stack.enter_context(Peer(self.server.address, metadata=bearer(who)))
        return self._peers[who]

    def reader(self, who: str) -> Reader:
        return self.stack.enter_context(Reader(self.server.address, metadata=bearer(who)))

    def holds(self, shares: Shares, who: str, call: Any) -> bool:
        """Whether a call that was just begun is held; asserts that one that is not is refused for its share."""
        before = shares._by_peer[who]
        begun = call()
        wait_until(lambda: shares._by_peer[who] > before or begun.done())
        if not begun.done():
            self.stack.callback(begun.cancel)
            return True
        assert status(begun) == TOO_MANY
        return False


def _succeeds(call: Callable[[], object], *refusals: tuple[grpc.StatusCode, str]) -> bool:
    """Asserts that what does not is refused for its share, or with one of `refusals`."""
    refusal = None
    try:
        call()
    except grpc.RpcError as error:
        refusal = status(error)
    assert refusal in (None, TOO_MANY, *refusals)
    return refusal is None


def _stream(arena: Arena, who: str) -> bool:
    peer = arena.stack.enter_context(Peer(arena.server.address, greet=False, metadata=bearer(who)))
    peer.say(hello())
    return _succeeds(peer.hear)


def _open_sample(arena: Arena, who: str) -> bool:
    peer, number = arena.peer(who), next(arena._numbers)
    sample = Sample(f"{who}-{number}", namespace=who)
    peer.say(sample.open(number), sample.chunk(number, number, 0, 1))
    failed = None
    while (reply := peer.hear()).WhichOneof("kind") != "ack":  # The chunk of a sample that failed is acked too.
        failed = reply.failed
    shares = arena.server.server._ingest._shared.open_shares
    if failed is None and (shares._by_peer[who] >= shares._peer_max or shares._total >= shares._total_max * 3 // 4):
        peer.say(Sample("last", namespace=who).open(number + 1000, layer_ids=()))  # Answered after what came before it.
        failed = peer.failed()
        failed = failed if failed.sample == number else None
    assert failed is None or failed.code == "TOO_MANY"
    return failed is None


def _read(arena: Arena, who: str) -> bool:
    arena.store(LONG)

    def call() -> Any:
        return arena.reader(who).frames(namespace="long", sample_id=LONG.sample_id)

    return arena.holds(arena.server.server._samples._calls.read_shares, who, call)


def _waiting_read(arena: Arena, who: str) -> bool:
    def call() -> Any:
        return arena.reader(who).frames(namespace=who, sample_id="not-yet", wait_s=60.0)

    return arena.holds(arena.server.server._samples._waiting_shares, who, call)


def _request(arena: Arena, who: str) -> bool:
    def call() -> Any:
        silent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method: Any = arena.reader(who).channel.stream_unary("/slotstream.v1.Samples/Stat", None, None)
        return method.future(iter(silent.get, None), metadata=bearer(who))

    return arena.holds(arena.server.server._samples._calls.request_shares, who, call)


def _verification(arena: Arena, who: str) -> bool:
    def call() -> Any:
        return arena.reader(who)._verify(read_pb.VerifyRequest(namespace=who), timeout=60)

    return arena.holds(arena.server.server._samples._admin._verify_shares, who, call)


def _lease(arena: Arena, who: str) -> bool:
    arena.store(SHORT)
    request = read_pb.LeaseRequest(namespace="long", sample_id="short", holder=f"h{next(arena._numbers)}", seconds=600)
    return _succeeds(lambda: arena.reader(who).lease(request, timeout=60), STORE_FULL)


TOKEN_DRIVERS: dict[str, Callable[[Arena, str], bool]] = {
    "ingest streams": _stream,
    "open samples": _open_sample,
    "reads": _read,
    "reads that wait for samples": _waiting_read,
    "requests": _request,
    "verifications": _verification,
    "leases": _lease,
}
ADDRESS_METHODS = {"health watches": "/grpc.health.v1.Health/Watch", "health checks": "/grpc.health.v1.Health/Check"}


@contextmanager
def _arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: Sequence[str], options: dict[str, Any]) -> Iterator[Arena]:
    goes_on = threading.Event()

    def endless(self: SampleStore, namespace: str) -> Iterator[Any]:
        assert goes_on.wait(60)
        yield from ()

    monkeypatch.setattr(SampleStore, "verify_all", endless)
    monkeypatch.setattr(bodies, "_PRESSED_S", 60.0)  # A request without an end is held here for what it holds.
    rights = ("ingest", "read", "admin")
    tokens = write_tokens(tmp_path / "t", *(entry(who, [who, "long"], *rights) for who in (*peers, "owner")))
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(tmp_path / "data", tokens_file=tokens, **options))
        stack.callback(goes_on.set)
        yield Arena(server, stack)


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    options = OPTIONS | {"connections_max": 100}
    with _arena(tmp_path, monkeypatch, ("greedy", "modest"), options) as arena:
        arena.server.server._samples._leases._of_peer = 3
        yield arena


@pytest.fixture
def wide_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    peers = [*(f"greedy-{number}" for number in range(max(CROWDS))), "modest"]
    with _arena(tmp_path, monkeypatch, peers, WIDE_OPTIONS) as arena:
        arena.server.server._ingest._shared.open_shares._total_max = 32
        book = arena.server.server._samples._leases
        book._of_peer, book._total = 20, 80
        yield arena


def test_every_limit_of_the_table_is_tried() -> None:
    assert {limit.what for limit in LIMITS} == {*TOKEN_DRIVERS, *ADDRESS_METHODS, "connections"}


@pytest.mark.parametrize("what", TOKEN_DRIVERS)
def test_a_token_that_takes_all_it_gets_leaves_others_their_share(arena: Arena, what: str) -> None:
    (limit,) = [limit for limit in LIMITS if limit.what == what]
    of_peer = 3 if what == "leases" else limit.of_peer(arena.server.config)
    assert of_peer < limit.total(arena.server.config)
    take = TOKEN_DRIVERS[what]
    assert [take(arena, "greedy") for _ in range(of_peer)] == [True] * of_peer
    assert not take(arena, "greedy")
    assert take(arena, "modest")


def test_a_namespace_has_half_of_the_leases(wide_arena: Arena) -> None:
    """However many peers take them; and what they take keeps nobody from those of another namespace."""
    wide_arena.peer("owner").put(Sample("own", namespace="owner"), 1000)
    for number in range(8):
        while _lease(wide_arena, f"greedy-{number}"):
            pass
    of_namespace = sqlite_of(wide_arena.server.server.store).ask(
        lambda db: dict(db.execute("SELECT namespace, count(*) FROM leases GROUP BY namespace").fetchall())
    )
    assert of_namespace == {"long": 30 + 8 - 2}  # The first two took three quarters of the half.
    own = [read_pb.LeaseRequest(namespace="owner", sample_id="own", holder=f"h{n}", seconds=600) for n in range(20)]
    for request in own:
        wide_arena.reader("owner").lease(request, timeout=60)


def test_admin_ends_leases_of_any_holder(wide_arena: Arena) -> None:
    """Somebody else's, whose names nobody knows; then the sample can be deleted, and the peer has its leases again."""
    for _ in range(20):
        assert _lease(wide_arena, "greedy-0")
    assert not _lease(wide_arena, "greedy-0")
    lease = partial(wide_arena.reader("owner").lease, timeout=60)
    lease(read_pb.LeaseRequest(namespace="long", sample_id="short"))
    assert wide_arena.reader("owner").stat(read_pb.StatRequest(namespace="long", sample_id="short")).leased_until_unix_ns == 0
    assert _lease(wide_arena, "greedy-0")
    lease(read_pb.LeaseRequest(namespace="long", sample_id="short", holder=f"h{next(wide_arena._numbers) - 1}"))
    assert wide_arena.reader("owner").stat(read_pb.StatRequest(namespace="long", sample_id="short")).leased_until_unix_ns == 0


def _takes_all_it_gets(take: Callable[[], bool]) -> int:
    """How many those are."""
    taken = 0
    while take():
        taken += 1
        assert taken < 100
    return taken


@pytest.mark.parametrize("count", CROWDS)
@pytest.mark.parametrize("what", TOKEN_DRIVERS)
def test_tokens_that_take_all_they_get_leave_one_to_a_newcomer(wide_arena: Arena, what: str, count: int) -> None:
    """And those that came late have got one each."""
    take = TOKEN_DRIVERS[what]
    taken = [_takes_all_it_gets(partial(take, wide_arena, f"greedy-{number}")) for number in range(count)]
    assert min(taken) >= 1
    assert take(wide_arena, "modest")


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.what)
@pytest.mark.parametrize("count", CROWDS)
def test_what_is_there_by_default_is_not_all_taken_by_so_many(tmp_path: Path, limit: Limit, count: int) -> None:
    shares = limit.shares(ServerConfig(data_dir=tmp_path))
    assert shares._total_max < 1 << 20
    for number in range(count):
        with suppress(TooMany):
            while True:
                shares.take(f"greedy-{number}")
    shares.take("modest")


@pytest.mark.parametrize("what", ADDRESS_METHODS)
def test_an_address_that_takes_all_it_gets_leaves_others_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(bodies, "_PRESSED_S", 60.0)
    with RunningServer(tmp_path / "data") as server:
        service = server.server._health
        shares = {"health watches": service._watches, "health checks": service._checks}[what]
        shares._peer_max, shares._total_max = 3, 4
        service._bodies._growth_bytes = 1 << 40
        with UnfinishedCalls(server.address, ADDRESS_METHODS[what], 5, source=OTHER_ADDRESS) as greedy:
            greedy.push(quiet_s=0.5, limit_s=0.5)
            wait_until(lambda: shares._by_peer[OTHER_ADDRESS] == 3)
            assert list(greedy.statuses.values()) == ["8"] * 2
            with grpc.insecure_channel(server.address) as channel:
                stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
                answer = stub.Check(request, timeout=60) if "checks" in what else next(stub.Watch(request, timeout=60))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


def _gets_in(address: str) -> bool:
    """Whether a newcomer's call is answered."""
    with Reader(address) as reader:
        try:
            reader.list(read_pb.ListRequest(), timeout=5)
        except grpc.RpcError:
            return False
        return True


def test_an_address_that_has_all_connections_loses_those_beyond_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silent ones first: who asked for something keeps its connection."""
    (limit,) = [limit for limit in LIMITS if limit.what == "connections"]
    monkeypatch.setattr(connections, "_EVERY_S", 0.05)
    with RunningServer(tmp_path / "data", connections_max=12) as server, ExitStack() as stack:
        host, _, port = server.address.rpartition(":")
        busy = stack.enter_context(UnfinishedCalls(server.address, "/grpc.health.v1.Health/Watch", 1, source=OTHER_ADDRESS))
        busy.push(quiet_s=0.2, limit_s=0.2)
        for _ in range(30):
            silent = stack.enter_context(socket.create_connection((host, int(port)), source_address=(OTHER_ADDRESS, 0)))
            silent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")  # All that a handshake asks for.

        wait_until(lambda: _gets_in(server.address))
        busy.push(quiet_s=0.2, limit_s=0.2)
        assert busy.open
        assert limit.of_peer(server.config) == 9


@pytest.mark.parametrize("count", CROWDS)
@pytest.mark.parametrize("what", ADDRESS_METHODS)
def test_addresses_that_take_all_they_get_leave_one_to_a_newcomer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, count: int
) -> None:
    monkeypatch.setattr(bodies, "_PRESSED_S", 60.0)
    with RunningServer(tmp_path / "data") as server, ExitStack() as stack:
        service = server.server._health
        shares = {"health watches": service._watches, "health checks": service._checks}[what]
        shares._peer_max, shares._total_max = 16, 32
        service._bodies._growth_bytes = 1 << 40
        for source in range(2, 2 + count):
            calls = UnfinishedCalls(server.address, ADDRESS_METHODS[what], 20, source=f"127.0.0.{source}")
            stack.enter_context(calls)

            def all_are_decided(calls: UnfinishedCalls = calls) -> bool:
                calls.push(quiet_s=0.5, limit_s=0.5)
                return len(calls.statuses) + shares._by_peer[calls.source] == 20

            wait_until(all_are_decided)
            assert shares._by_peer[calls.source] >= 1
        with grpc.insecure_channel(server.address) as channel:
            stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
            answer = stub.Check(request, timeout=60) if "checks" in what else next(stub.Watch(request, timeout=60))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "that asked for something"])
@pytest.mark.parametrize("count", CROWDS)
def test_addresses_that_have_all_connections_lose_those_beyond_three_quarters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, silent: bool
) -> None:
    """The silent ones first, of any address: one that asked for something keeps its connections."""
    monkeypatch.setattr(connections, "_EVERY_S", 0.05)
    with RunningServer(tmp_path / "data", connections_max=40) as server, ExitStack() as stack:
        host, _, port = server.address.rpartition(":")

        def watching(source: str) -> UnfinishedCalls:
            calls = UnfinishedCalls(server.address, "/grpc.health.v1.Health/Watch", 1, source=source)
            stack.enter_context(calls).push(quiet_s=0.02, limit_s=0.02)
            return calls

        busy = [watching("127.0.0.20") for _ in range(2)]
        watcher: Any = server.server._health._note
        wait_until(lambda: len(watcher.__self__._known) == 2)
        for source in range(2, 2 + count):
            for _ in range(48 // count):
                if silent:
                    opened = socket.create_connection((host, int(port)), source_address=(f"127.0.0.{source}", 0))
                    stack.enter_context(opened).sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                else:
                    with suppress(ConnectionError):
                        watching(f"127.0.0.{source}")

        for _ in range(3):
            wait_until(lambda: _gets_in(server.address))
        assert all(calls.is_connected for calls in busy)


def test_limits_name_what_the_page_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    assert [limit.what for limit in LIMITS if not _is_named(limit, page)] == []


def _is_named(limit: Limit, page: str) -> bool:
    return f"| {limit.what}; of one " in page
