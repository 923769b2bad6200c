"""Mooncake store in the transport benchmark: a master, an owner of memory, and senders that put objects into it over TCP."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

from children import Child, ChildFailed, questions
from load import Load
from transport_others import Sender

SEGMENT_BYTES = 1 << 30
ENVIRONMENT = {
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_MEMCPY": "0",
}
_BUFFER_BYTES = 320 << 20  # `get` goes through it.
_START_S = 15.0


class MooncakeStream(Sender):
    """A key a chunk."""

    def __init__(self, master: str) -> None:
        super().__init__()
        self._store = open_store(master, 0)
        check(self._store.register_buffer(_address(self._memory), len(self._memory)), "register_buffer")

    def run(self) -> list[float]:
        return self._put(self._load.chunks)

    def alone(self, chunks: int) -> list[float]:
        return self._put(chunks)

    def _put(self, chunks: int) -> list[float]:
        name = uuid.uuid4().hex
        taken = []
        for number in range(chunks):
            began = perf_counter()
            check(self._store.put(f"{name}-{number}", self._chunk(number)), "put")
            taken.append(perf_counter() - began)
        return taken

    def prepare(self, load: Load) -> None:
        if load.total_bytes > SEGMENT_BYTES * 0.9:
            raise ChildFailed(f"Mooncake's segment of {SEGMENT_BYTES} bytes does not hold {load.total_bytes}")
        super().prepare(load)

    def clear(self) -> None:
        self._store.remove_all(True)


def open_store(master: str, segment_bytes: int) -> Any:
    """A client of the store that brings `segment_bytes` of memory to it."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    with _no_stderr():
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, _BUFFER_BYTES, "tcp", "", master)
    check(code, "setup")
    return store


@contextmanager
def _no_stderr() -> Iterator[None]:
    """It logs there what is no error, at any level that is asked for."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def check(code: int, what: str) -> None:
    """Raises ChildFailed for a negative result code."""
    if code < 0:
        raise ChildFailed(f"Mooncake's {what} failed: {code}")


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _own_segment(connection: Connection, master: str) -> None:
    store = open_store(master, SEGMENT_BYTES)
    connection.send("ready")
    deque(questions(connection), maxlen=0)
    store.close()


class MooncakeReceiver:
    """`mooncake_master`, and the process that owns the memory."""

    def __init__(self) -> None:
        ports = [_free_port() for _ in range(2)]
        self.address = f"127.0.0.1:{ports[0]}"
        command = [
            str(Path(sys.executable).with_name("mooncake_master")),
            *("-rpc_address=127.0.0.1", f"-rpc_port={ports[0]}"),
            *("-metrics_host=127.0.0.1", f"-metrics_port={ports[1]}", "-enable_metric_reporting=false"),
            *("-logtostderr", "-minloglevel=3"),
        ]
        self._master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self._wait_for_master(ports[0])
            self._owner = Child("Mooncake owner", _own_segment, self.address, tuned=True, environment=ENVIRONMENT)
            self._owner.answer()
        except BaseException:
            self._master.kill()
            self._master.wait()
            raise
        self.pids = [self._master.pid, self._owner.pid]

    def _wait_for_master(self, port: int) -> None:
        deadline = time.monotonic() + _START_S
        while self._master.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return
            except OSError:
                time.sleep(0.05)
        raise ChildFailed("mooncake_master did not start")

    def close(self) -> None:
        self._owner.close()
        self._master.terminate()
        self._master.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def missing() -> str:
    """Why there is no Mooncake here; empty where there is."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"mooncake-transfer-engine-non-cuda cannot be imported: {error}"
    return ""
