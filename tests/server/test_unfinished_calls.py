"""Messages that never end: what they cost the server, and who has to wait for them."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import bare_grpc
from support.ports import free_port
from support.server import ServerProcess
from support.unfinished_calls import UnfinishedCalls

from slotstream.client import connect
from slotstream.server.access import bodies
from slotstream.server.access.bodies import EOF, Bodies
from slotstream.server.access.connections import Connections
from slotstream.server.access.shared_connections import NoSockets, SharedConnections
from slotstream.server.config import ServerConfig
from slotstream.wire.errors import BadParams, TooLarge, TooMany, TooSlow

CALLS = 150
GROWTH_BYTES_MAX = 96 << 20  # 44 to 72 MiB were seen, the most beside other work.
METHODS = [
    "/slotstream.v1.Samples/Stat",
    "/slotstream.v1.Samples/Read",
    "/slotstream.v1.Samples/Verify",
    "/slotstream.v1.Ingest/Stream",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
]
UNAUTHENTICATED = "16"
TOKENS = """[[tokens]]
name = "reader"
token = "0123456789abcdef"
namespaces = "*"
rights = ["read"]
"""


def _memory(pid: int, what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    path.write_text(TOKENS)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("with_tokens", [False, True], ids=["anybody", "tokens"])
def test_calls_that_never_end_take_little_memory(tmp_path: Path, tokens: Path, method: str, with_tokens: bool) -> None:
    options = ["--tokens", str(tokens)] if with_tokens else []
    access: dict[str, Any] = {"token": "0123456789abcdef"} if with_tokens else {}
    with ServerProcess(tmp_path / "data", *options, address=f"127.0.0.1:{free_port()}", **access) as server:
        idle = _memory(server.process.pid, "VmRSS")
        with UnfinishedCalls(server.address, method, CALLS) as attack, connect(server.address, **access) as client:
            attack.push(quiet_s=2.0, limit_s=5.0)
            assert list(client.list()) == []  # Others have theirs.
            attack.push(quiet_s=2.0, limit_s=20.0)
        assert _memory(server.process.pid, "VmHWM") - idle < GROWTH_BYTES_MAX
        if with_tokens and "Health" not in method:
            assert set(attack.statuses.values()) == {UNAUTHENTICATED}
            assert len(attack.statuses) == CALLS


def test_what_grpc_alone_takes_of_them() -> None:
    """A window of megabytes for each call, which it makes as wide as that at once. security.md says so."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, bare_grpc.__file__, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server, ExitStack() as stack:
        stack.callback(server.kill)
        assert server.stdout is not None
        server.stdout.readline()
        idle = _memory(server.pid, "VmRSS")
        with UnfinishedCalls(address, bare_grpc.METHOD, CALLS) as attack:
            attack.push(quiet_s=2.0, limit_s=30.0)
            assert not attack.is_closed
        assert _memory(server.pid, "VmHWM") - idle > CALLS * (2 << 20)


class _Call:
    """A call whose message comes when `message` is set."""

    def __init__(self) -> None:
        self.message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def read(self) -> Any:
        return await self.message

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def add_done_callback(self, callback: object) -> None:
        """It goes on for as long as its test."""


def _run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def _read(of: Bodies, call: _Call, caller: str = "a", limit_s: float = 60.0) -> asyncio.Task[bytes]:
    context: Any = call
    return asyncio.create_task(of.read(context, caller, limit_s))


def test_the_messages_of_a_caller_are_asked_for_one_by_one_and_those_of_others_beside_them() -> None:
    async def test() -> None:
        of = Bodies(10)
        calls = [_Call() for _ in range(4)]
        tasks = [_read(of, call, caller) for call, caller in zip(calls, "aaab", strict=True)]
        calls[1].message.set_result(b"second")
        calls[3].message.set_result(b"other")
        assert await tasks[3] == b"other"
        assert not tasks[1].done()
        calls[0].message.set_result(b"first")
        assert await tasks[1] == b"second"
        tasks[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        assert (of._reading, of._waiting, of._turns) == ({}, {}, {})

    _run(test())


def test_what_a_message_may_not_be() -> None:
    async def test() -> None:
        of = Bodies(10)
        for message, kind in ((b"x" * 11, TooLarge), (EOF, BadParams)):
            call = _Call()
            call.message.set_result(message)
            with pytest.raises(kind):
                await _read(of, call)
        with pytest.raises(TooSlow):
            await _read(of, _Call(), limit_s=0.01)

    _run(test())


def test_a_message_that_does_not_come_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        of = Bodies(10, resident=lambda: 0)
        stuck = _read(of, _Call())
        behind = _Call()
        behind.message.set_result(b"here")
        assert await _read(of, behind) == b"here"
        with pytest.raises(TooSlow):
            await stuck
        alone = _read(of, last := _Call())
        last.message.set_result(b"")
        assert await alone == b""

    monkeypatch.setattr(bodies, "_PRESSED_S", 0.01)
    _run(test())


def test_calls_that_say_nothing_may_take_what_a_call_takes() -> None:
    async def test() -> None:
        resident = 100
        of = Bodies(10, one_by_one=False, growth_bytes=50, call_bytes=20, resident=lambda: resident)
        silent = [_read(of, _Call()) for _ in range(5)]
        await asyncio.sleep(0)
        resident += 5 * 20 + 49
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in silent)
        resident += 1
        codes = [type(error) for error in await asyncio.gather(*silent, return_exceptions=True)]
        assert codes == [TooSlow] * 5

    _run(test())


@pytest.mark.parametrize("one_by_one", [True, False])
def test_where_they_make_the_process_grow_a_callers_calls_are_refused(one_by_one: bool) -> None:
    async def test() -> None:
        resident = 100
        of = Bodies(10, one_by_one=one_by_one, growth_bytes=50, resident=lambda: resident)
        greedy = [_read(of, _Call()) for _ in range(5)]
        modest = _read(of, call := _Call(), "b")
        await asyncio.sleep(0)
        resident = 151
        codes = [type(error) for error in await asyncio.gather(*greedy, return_exceptions=True)]
        assert codes == ([TooSlow] + [TooMany] * 4 if one_by_one else [TooSlow] * 5)
        call.message.set_result(b"here")
        assert await modest == b"here"

    _run(test())


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_caller_that_was_refused_is_refused_for_a_moment_and_others_are_not(one_by_one: bool) -> None:
    async def test() -> None:
        resident = 0
        of = Bodies(10, one_by_one=one_by_one, growth_bytes=50, resident=lambda: resident)
        greedy = [_read(of, _Call()) for _ in range(3)]
        await asyncio.sleep(0)
        resident = 60
        await asyncio.gather(*greedy, return_exceptions=True)
        with pytest.raises(TooMany):
            await _read(of, _Call())
        other = _Call()
        other.message.set_result(b"here")
        assert await _read(of, other, "b") == b"here"
        of._refused_until["a"] = asyncio.get_running_loop().time()
        assert await _read(of, other) == b"here"

    _run(test())


@pytest.mark.parametrize("one_by_one", [True, False])
def test_where_the_process_grows_on_their_connection_is_closed(monkeypatch: pytest.MonkeyPatch, one_by_one: bool) -> None:
    async def test() -> None:
        resident = 0
        closed: list[str] = []
        again = asyncio.Event()

        class Closing(NoSockets):
            def hang_up(self, peers: Iterable[str]) -> None:
                closed.extend(peers)
                if len(closed) > 1:
                    again.set()

        connections = SharedConnections(Closing())
        of = Bodies(10, one_by_one=one_by_one, growth_bytes=50, connections=connections, resident=lambda: resident)
        greedy = [_read(of, _Call()) for _ in range(3)]
        await asyncio.sleep(0)
        resident = 149
        await asyncio.gather(*greedy, return_exceptions=True)
        assert not closed
        of._refused_until.clear()
        resident = 0
        greedy = [_read(of, _Call()) for _ in range(3)]
        await asyncio.sleep(0)
        resident = 150
        await asyncio.gather(*greedy, return_exceptions=True)
        assert closed == [_Call().peer()]
        with pytest.raises(TooMany):  # One that comes too late to be looked at.
            await _read(of, _Call())
        await again.wait()
        assert closed == [_Call().peer()] * 2

    monkeypatch.setattr(bodies, "_HANG_UP_BYTES", 100)
    _run(test())


def test_a_call_that_may_say_nothing_gives_its_turn_away_and_is_waited_for() -> None:
    async def test() -> None:
        of = Bodies(10, one_by_one=False, resident=lambda: 0)
        silent = [_Call() for _ in range(100)]
        tasks = [_read(of, call) for call in silent]
        last = _Call()
        last.message.set_result(b"here")
        assert await _read(of, last) == b"here"
        for call in silent:
            call.message.set_result(b"late")
        assert await asyncio.gather(*tasks) == [b"late"] * 100
        assert (of._reading, of._waiting, of._turns) == ({}, {}, {})

    _run(test())


def test_only_connections_that_brought_much_are_closed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        port = listening.getsockname()[1]
        watching = Connections(ServerConfig(data_dir=tmp_path, listen=f"127.0.0.1:{port}"))
        watching.start([f"127.0.0.1:{port}"])
        stack.callback(watching.stop)
        ends = []
        for nbytes in (3 << 20, 3 << 20, 1):
            far = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            near = stack.enter_context(listening.accept()[0])
            sending = threading.Thread(target=far.sendall, args=(bytes(nbytes),))
            sending.start()
            while nbytes:
                nbytes -= len(near.recv(nbytes))
            sending.join()
            ends.append((far, near))
        (greedy, _), _, (modest, _) = ends
        watching.hang_up(f"ipv4:127.0.0.1:{end.getsockname()[1]}" for end in (greedy, modest))
        assert greedy.recv(1) == b""
        for far, near in ends[1:]:
            near.sendall(b"x")
            assert far.recv(1) == b"x"


def test_a_process_without_a_descriptor_left_closes_none_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    watching = Connections(ServerConfig(data_dir=tmp_path))
    monkeypatch.setattr(Path, "iterdir", full)
    watching.hang_up(["ipv4:127.0.0.1:1"])
