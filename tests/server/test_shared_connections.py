"""A connection that several callers use, as behind a proxy: one of them never ends its calls, and the others go on."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server.server_kit import Peer, Sample, hello
from support.ports import free_port
from support.server import ServerProcess
from support.unfinished_calls import UnfinishedCalls
from support.waiting import wait_until

from slotstream.server.access import connections, shared_connections
from slotstream.server.access.connections import Connections
from slotstream.server.access.shared_connections import SharedConnections
from slotstream.server.config import ServerConfig
from slotstream.server.health.healthcheck import HealthService
from slotstream.v1 import ingest_pb2 as pb
from slotstream.v1 import samples_pb2 as read_pb

CALLS = 150
STREAM, READ = "/slotstream.v1.Ingest/Stream", "/slotstream.v1.Samples/Read"
WATCH = "/grpc.health.v1.Health/Watch"
METHODS = ["/slotstream.v1.Samples/Stat", STREAM, "/grpc.health.v1.Health/Check"]
HONEST, GREEDY = "honest-0123456789", "greedy-0123456789"
TOKENS = f"""[[tokens]]
name = "honest"
token = "{HONEST}"
namespaces = ["default"]
rights = ["ingest", "read"]
[[tokens]]
name = "greedy"
token = "{GREEDY}"
namespaces = ["other"]
rights = ["read"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    data = tmp_path_factory.mktemp("data")
    with ServerProcess(data, "--tokens", str(tokens), address=f"127.0.0.1:{free_port()}", token=HONEST) as running:
        yield running


def _reply(proxy: UnfinishedCalls, stream: int) -> pb.IngestReply:
    message = proxy.hear(stream)
    assert message is not None, (proxy.is_closed, proxy.statuses)
    return pb.IngestReply.FromString(message)


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_over_the_connection_of_unfinished_calls_goes_on(server: ServerProcess, method: str) -> None:
    sample = Sample(f"stream-{METHODS.index(method)}")
    with UnfinishedCalls(server.address, method, 0) as proxy:
        stream = proxy.call(STREAM, hello().SerializeToString(), HONEST)
        assert _reply(proxy, stream).HasField("welcome")
        proxy.say(stream, sample.open(1).SerializeToString())
        proxy.begin(method, CALLS, GREEDY)
        proxy.push(quiet_s=2.0, limit_s=20.0)
        proxy.say(stream, sample.chunk(1, 1, 0, 40))
        proxy.say(stream, sample.commit(1).SerializeToString())
        replies = [_reply(proxy, stream) for _ in range(2)]
        assert replies[1].HasField("committed"), replies
        wait_until(lambda: proxy.is_connected and not proxy.open, "the end of every one of the others")


def test_a_read_over_the_connection_of_unfinished_calls_goes_on(server: ServerProcess) -> None:
    sample = Sample("read")
    access = (("authorization", f"Bearer {HONEST}"),)
    with UnfinishedCalls(server.address, READ, 0) as proxy, Peer(server.address, metadata=access) as sender:
        sender.say(sample.open(1), sample.chunk(1, 1, 0, 40))
        sender.acks(1)
        request = read_pb.ReadRequest(sample_id=sample.sample_id, wait_s=60.0)
        read = proxy.call(READ, request.SerializeToString(), HONEST)
        proxy.begin(METHODS[0], CALLS, GREEDY)
        proxy.push(quiet_s=2.0, limit_s=20.0)
        sender.say(sample.commit(1))
        sender.hear_until("committed")
        assert proxy.hear(read) is not None, (proxy.is_closed, proxy.statuses)


@pytest.mark.parametrize("method", [READ, WATCH])
def test_a_good_call_of_its_own_saves_no_connection(server: ServerProcess, method: str) -> None:
    with UnfinishedCalls(server.address, READ, 0) as attack:
        request = read_pb.ReadRequest(namespace="other", sample_id="none", wait_s=60.0)
        if method == READ:
            attack.call(method, request.SerializeToString(), GREEDY)
        else:  # A test before this one may have its address refused for half a second.
            wait_until(lambda: attack.hear(attack.call(method, b"", GREEDY)) is not None, "a Watch")
        for _ in range(50):
            attack.begin(METHODS[0], CALLS, GREEDY)
            attack.push(quiet_s=0.5, limit_s=20.0)
            if attack.is_closed:
                return
    pytest.fail("the connection is still there")


class _Sockets:
    """What is done to connections. `changed` is set each time."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.throttled: set[str] = set()
        self.asked: list[str] = []  # Each looks at every descriptor.
        self.is_short = False  # Of descriptors.
        self.changed = asyncio.Event()

    def hang_up(self, peers: Iterable[str]) -> None:
        self.asked.append("hang up")
        self.closed.extend(peers)

    def throttle(self, peers: Iterable[str], *, on: bool) -> bool:
        self.asked.append("on" if on else "off")
        if not self.is_short:
            self.throttled = self.throttled | set(peers) if on else self.throttled - set(peers)
        self.changed.set()
        return not self.is_short


class _Context:
    """A call over a connection."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._done: list[Callable[[Any], None]] = []

    def peer(self) -> str:
        return self._peer

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._done.append(callback)

    def end(self) -> None:
        for callback in self._done:
            callback(self)


def _run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def _begin(of: SharedConnections, caller: str, *, came: bool = False, peer: str = "proxy", saves: bool = True) -> _Context:
    context: Any = _Context(peer)
    of.begin(context, caller, saves=saves).came = came
    return context  # type: ignore[no-any-return]


def test_where_somebody_else_has_a_call_only_what_grows_on_is_closed() -> None:
    async def test() -> None:
        sockets, resident = _Sockets(), 100
        of = SharedConnections(sockets, lambda: resident)
        _begin(of, "honest", came=True)
        greedy = [_begin(of, "greedy") for _ in range(3)]
        of.hang_up({"proxy": {"greedy"}})
        assert (sockets.closed, sockets.throttled) == ([], {"proxy"})
        sockets.changed.clear()
        for context in greedy:
            resident += 1000  # Until they have ended, it may.
            of.hang_up({"proxy": {"greedy"}})
            context.end()
        await sockets.changed.wait()
        assert (sockets.closed, sockets.throttled) == ([], set())
        resident += 99
        of.hang_up({"proxy": {"greedy"}})
        assert sockets.closed == []
        resident += 1
        of.hang_up({"proxy": {"greedy"}})
        assert sockets.closed == ["proxy"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_connections, "_GROWTH_BYTES", 100)
        patch.setattr(shared_connections, "_QUIET_S", 0.01)
        patch.setattr(shared_connections, "_CUTTING_S", 3600.0)
        _run(test())


def test_calls_that_do_not_end_keep_a_connection_only_for_so_long() -> None:
    async def test() -> None:
        sockets, resident = _Sockets(), 0
        of = SharedConnections(sockets, lambda: resident)
        _begin(of, "honest", came=True)
        _begin(of, "greedy")
        of.hang_up({"proxy": {"greedy"}})
        sockets.changed.clear()
        await sockets.changed.wait()
        resident = 100
        of.hang_up({"proxy": {"greedy"}})
        assert sockets.closed == ["proxy"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_connections, "_GROWTH_BYTES", 100)
        patch.setattr(shared_connections, "_QUIET_S", 0.01)
        patch.setattr(shared_connections, "_CUTTING_S", 0.02)
        _run(test())


def test_what_saves_no_connection() -> None:
    """A good call of the same caller, one of the health service, one whose message did not come, and one that has ended."""

    async def test() -> None:
        sockets = _Sockets()
        of = SharedConnections(sockets, lambda: 0)
        _begin(of, "greedy", came=True)
        _begin(of, "health", came=True, saves=False)
        _begin(of, "honest")
        _begin(of, "honest", came=True).end()
        of.hang_up({"proxy": {"greedy"}, "another": {"greedy"}})
        assert (sockets.closed, sockets.throttled) == (["proxy", "another"], set())

    _run(test())


def test_a_call_of_the_health_service_saves_no_connection(tmp_path: Path) -> None:
    """It asks for no token, and its caller has another name there: everybody could save their own."""

    async def test() -> None:
        sockets = _Sockets()
        of = SharedConnections(sockets, lambda: 0)
        health = HealthService(ServerConfig(data_dir=tmp_path), connections=of)
        health.serve("")
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((health.handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            (peer,) = of._calls
            of.hang_up({peer: {"greedy"}})
            assert (sockets.closed, sockets.throttled) == ([peer], set())
        await server.stop(None)

    _run(test())


def test_however_many_connections_there_are_descriptors_are_looked_at_once() -> None:
    """For each of: what is closed, what is throttled, what is not any more. The event loop waits for it."""

    async def test() -> None:
        sockets = _Sockets()
        of = SharedConnections(sockets, lambda: 0)
        shared = [f"proxy {number}" for number in range(100)]
        for peer in shared:
            _begin(of, "honest", came=True, peer=peer)
        alone = [f"alone {number}" for number in range(100)]
        of.hang_up({peer: {"greedy"} for peer in shared + alone})
        assert (sockets.closed, sockets.throttled) == (alone, set(shared))
        while sockets.throttled:
            sockets.changed.clear()
            await sockets.changed.wait()
        assert sockets.asked == ["hang up", "on", "off"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_connections, "_QUIET_S", 0.01)
        _run(test())


def test_a_throttle_that_cannot_be_ended_is_ended_later() -> None:
    async def test() -> None:
        sockets = _Sockets()
        of = SharedConnections(sockets, lambda: 0)
        honest = _begin(of, "honest", came=True)
        of.hang_up({"proxy": {"greedy"}})
        sockets.is_short = True
        while sockets.asked != ["on", "off", "off"]:
            sockets.changed.clear()
            await sockets.changed.wait()
        honest.end()  # The connection may be there still, for a later call.
        of.hang_up({"another": {"greedy"}})
        assert sockets.throttled == {"proxy"}
        sockets.is_short = False
        while sockets.throttled:
            sockets.changed.clear()
            await sockets.changed.wait()
        assert of._looking is None  # There is no more to do.

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_connections, "_QUIET_S", 0.01)
        patch.setattr(shared_connections, "_AGAIN_S", 0.01)
        patch.setattr(shared_connections, "_SPARED_S", 0.0)
        _run(test())


@contextmanager
def _no_descriptor_left() -> Iterator[None]:
    """But that with which the list of them is read."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    listing = list(Path("/proc/self/fd").iterdir())

    class Descriptors:
        def iterdir(self) -> Iterator[Path]:
            return iter(listing)

        def __truediv__(self, name: str) -> Path:
            return Path("/proc/self/fd") / name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "_DESCRIPTORS", Descriptors())
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_throttled_connection_takes_next_to_nothing_until_it_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        watching = Connections(ServerConfig(data_dir=tmp_path, listen=address))
        watching.start([address])
        stack.callback(watching.stop)
        pairs = []
        for _ in range(2):
            far = stack.enter_context(socket.create_connection(listening.getsockname()))
            pairs.append((far, stack.enter_context(listening.accept()[0])))
        peer = f"ipv4:127.0.0.1:{pairs[0][0].getsockname()[1]}"

        def windows() -> list[int]:
            return [near.getsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP) for _, near in pairs]

        before = windows()
        assert watching.throttle([peer], on=True)
        assert windows()[0] <= 4 << 10
        assert windows()[1] == before[1]
        with caplog.at_level(logging.WARNING), _no_descriptor_left():
            assert not watching.throttle([peer], on=False)
            assert not watching.throttle([peer], on=False)
        assert [record.getMessage() for record in caplog.records] == [
            "connections that were slowed down stay slow until this can be undone: [Errno 24] Too many open files"
        ]
        assert windows()[0] <= 4 << 10
        assert watching.throttle([peer], on=False)
        assert windows()[0] >= before[0]
        pairs[0][1].close()
        assert watching.throttle([peer], on=False)  # It is gone: nothing is left to do.


def test_a_connection_that_asks_while_connections_are_counted_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would count as one that never asked for anything, and go first."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        watching = Connections(ServerConfig(data_dir=tmp_path, listen=address, connections_max=4))
        watching._ports = {listening.getsockname()[1]}  # Without its thread.
        known: list[tuple[str, int]] = []

        class Descriptors:
            """The list is made, and then a connection comes and asks."""

            def iterdir(self) -> Iterator[Path]:
                listed = list(Path("/proc/self/fd").iterdir())
                far = stack.enter_context(socket.create_connection(listening.getsockname()))
                stack.enter_context(listening.accept()[0])
                known.append(far.getsockname())
                watching._known.add(known[-1])
                return iter(listed)

            def __truediv__(self, name: str) -> Path:
                return Path("/proc/self/fd") / name

        monkeypatch.setattr(connections, "_DESCRIPTORS", Descriptors())
        watching._look()
        assert known
        assert watching._known == set(known)
