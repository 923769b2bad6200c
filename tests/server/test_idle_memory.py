"""After a load a server gives memory back."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import re
from pathlib import Path

import pytest
from server.server_kit import Peer, Sample
from support.ports import free_port
from support.server import ServerProcess
from support.unfinished_calls import UnfinishedCalls
from support.waiting import wait_until

from slotstream.client import connect
from slotstream.server.malloc import give_back_when_idle
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.frames import encode_chunk
from slotstream.wire.hashing import xxh3

_CHUNK_BYTES = 8 << 20
_LOAD_CHUNKS = 24
_LEFT_BYTES_MAX = 32 << 20
_LOAD_BYTES_MIN = 64 << 20  # Else there is nothing to be given back.


def _resident(server: ServerProcess) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_a_server_gives_memory_back_after_a_load(tmp_path: Path) -> None:
    """At least half of it."""
    rows = _CHUNK_BYTES // Sample.row_bytes
    data = bytes(_CHUNK_BYTES)
    with ServerProcess(tmp_path / "data", address=f"127.0.0.1:{free_port()}") as server:
        idle = _resident(server)
        peers = [Peer(server.address) for _ in range(6)]
        sample = Sample(rows=rows * _LOAD_CHUNKS)
        most = idle
        for number, peer in enumerate(peers):
            peer.say(sample.open(1, sample_id=f"s{number}", rows_exact=False))
        for at in range(_LOAD_CHUNKS):
            header = pb.ChunkHeader(sample=1, chunk=at, first_row=at * rows, rows=rows, xxh3=xxh3(data))
            for peer in peers:
                peer.say(encode_chunk(header, data))
        for peer in peers:
            assert len(peer.acks(_LOAD_CHUNKS)) == _LOAD_CHUNKS
            most = max(most, _resident(server))
        for peer in peers:
            peer.close()
        assert most - idle > _LOAD_BYTES_MIN
        wait_until(lambda: _resident(server) - idle < (most - idle) / 2)


@pytest.mark.parametrize("method", ["/slotstream.v1.Samples/Stat", "/grpc.health.v1.Health/Check", "/no.such.Service/Call"])
def test_a_server_gives_memory_back_after_unfinished_calls_while_others_ask(tmp_path: Path, method: str) -> None:
    """Also where nobody counts the calls, where it was idle for long before, and while somebody asks for little."""
    with ServerProcess(tmp_path / "data", address=f"127.0.0.1:{free_port()}") as server, connect(server.address) as client:
        assert list(client.list()) == []
        idle = most = _resident(server)
        for _ in range(100):
            with UnfinishedCalls(server.address, method, 150) as attack:
                attack.push(quiet_s=0.2, limit_s=2.0)
            most = max(most, _resident(server))
            if most - idle > _LEFT_BYTES_MAX * 2:
                break
        wait_until(lambda: list(client.list()) == [] and _resident(server) - idle < _LEFT_BYTES_MAX)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps so much")
def test_memory_that_grows_while_the_server_is_idle_is_given_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        resident, trims, long_idle = 1 << 30, asyncio.Event(), asyncio.Event()
        looks = 0
        loop = asyncio.get_running_loop()

        def look() -> int:
            nonlocal looks
            looks += 1
            if looks > 9:
                long_idle.set()
            return resident

        class Libc:
            @staticmethod
            def malloc_trim(pad: int) -> int:
                loop.call_soon_threadsafe(trims.set)
                return 1

        monkeypatch.setattr(ctypes, "CDLL", lambda name: Libc)
        task = asyncio.create_task(give_back_when_idle(lambda: 0.0, 0.001, look))
        await long_idle.wait()
        assert not trims.is_set()
        resident += 100 << 20
        await trims.wait()
        task.cancel()

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps so much")
def test_memory_that_is_in_use_is_asked_for_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sixth look while nothing is given back, and after a load at once again."""

    async def test() -> None:
        looks, moved = 0, 0.0
        trims: list[int] = []
        over = asyncio.Event()
        resident = 1 << 30

        def look() -> float:
            nonlocal looks, moved, resident
            looks += 1
            if looks == 2:  # The first is before the loop.
                resident += 100 << 20
            if looks == 22:
                moved += 1 << 30
            if looks == 30:
                over.set()
            return moved

        class Libc:
            @staticmethod
            def malloc_trim(pad: int) -> int:
                trims.append(looks)
                return 1

        monkeypatch.setattr(ctypes, "CDLL", lambda name: Libc)
        task = asyncio.create_task(give_back_when_idle(look, 0.001, lambda: resident))
        await over.wait()
        task.cancel()
        assert trims == [3, 9, 15, 21, 24, 30][: len(trims)]
        assert len(trims) >= 5

    asyncio.run(asyncio.wait_for(test(), 60))
