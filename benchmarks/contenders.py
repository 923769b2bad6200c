"""What is measured: slotstream, and beside it what this machine's memory, network stack and disk can do alone.

A contender's `run(samples)` moves that many samples and returns the seconds it took; `pids` are the processes that did it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from children import Child, ChildFailed, questions
from shape import Shape


class Contender(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def sender_pid(self) -> int: ...

    @property
    def receiver_pid(self) -> int | None:
        """None where there is one process only."""

    def run(self, samples: int) -> float: ...

    def clear(self) -> None:
        """Check and remove what the last run left. Not measured."""

    def close(self) -> None: ...


def _answer_runs(connection: Connection, run: Any) -> None:
    connection.send("ready")
    for (samples,) in questions(connection):
        began = perf_counter()
        run(samples)
        connection.send(perf_counter() - began)


# memcpy: frames from one buffer into another, both larger than the caches.


class Memcpy:
    name = "memcpy"
    receiver_pid = None

    def __init__(self, shape: Shape) -> None:
        self._child = Child(self.name, _memcpy, shape, tuned=True)
        self._child.answer()
        self.sender_pid = self._child.pid

    def run(self, samples: int) -> float:
        return float(self._child.ask(samples))

    def clear(self) -> None:
        return

    def close(self) -> None:
        self._child.close()


def _memcpy(connection: Connection, shape: Shape) -> None:
    source = memoryview(bytearray(b"\1" * max(256 << 20, shape.sample_bytes)))
    target = memoryview(bytearray(b"\2" * len(source)))
    spans = [slice(at, at + shape.frame_bytes) for at in range(0, len(source) - shape.frame_bytes + 1, shape.frame_bytes)]

    def run(samples: int) -> None:
        left = samples * shape.sample_bytes
        while left > 0:
            for span in spans[: -(-left // shape.frame_bytes)]:
                target[span] = source[span]
            left -= len(spans) * shape.frame_bytes

    _answer_runs(connection, run)


# Raw socket: sendall against recv_into, one byte back at the end.


class RawSocket:
    name = "raw socket"

    def __init__(self, shape: Shape, address: str) -> None:
        self._receiver = Child("raw socket receiver", _socket_receiver, shape, address, tuned=True)
        self._sender = Child("raw socket sender", _socket_sender, shape, self._receiver.answer(), tuned=True)
        self._sender.answer()
        self.sender_pid, self.receiver_pid = self._sender.pid, self._receiver.pid

    def run(self, samples: int) -> float:
        return float(self._sender.ask(samples))

    def clear(self) -> None:
        return

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


def family_of(address: str) -> tuple[socket.AddressFamily, Any]:
    if address.startswith("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    return socket.AF_INET, (host, int(port))


def _socket_receiver(connection: Connection, shape: Shape, address: str) -> None:
    family, where = family_of(address)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(where)
        listener.listen(1)
        bound = listener.getsockname()
        connection.send(address if family is socket.AF_UNIX else f"{bound[0]}:{bound[1]}")
        peer, _ = listener.accept()
    with peer:
        buffer = memoryview(bytearray(shape.frame_bytes))
        count = bytearray(8)
        while peer.recv_into(count, 8, socket.MSG_WAITALL) == 8:
            left = int.from_bytes(count, "little")
            while left:
                got = peer.recv_into(buffer[:left])
                if not got:
                    return
                left -= got
            peer.sendall(b"\1")


def _socket_sender(connection: Connection, shape: Shape, address: str) -> None:
    family, where = family_of(address)
    data = memoryview(bytearray(b"\1" * shape.sample_bytes))
    frames = [data[start * shape.row_bytes : (start + rows) * shape.row_bytes] for start, rows in shape.frames()]
    with socket.socket(family, socket.SOCK_STREAM) as peer:
        peer.connect(where)

        def run(samples: int) -> None:
            peer.sendall((samples * shape.sample_bytes).to_bytes(8, "little"))
            for _ in range(samples):
                for frame in frames:
                    peer.sendall(frame)
            if peer.recv(1) != b"\1":
                raise ChildFailed("the receiver went away")

        _answer_runs(connection, run)


# gRPC alone: frames that exist already, no serializers, an ack a frame, nothing done with them.


class GrpcFrames:
    name = "gRPC frames alone"

    def __init__(self, shape: Shape, address: str, *, tuned_sender: bool) -> None:
        self._receiver = Child("gRPC receiver", _grpc_receiver, address, tuned=True)
        self._sender = Child("gRPC sender", _grpc_sender, shape, self._receiver.answer(), tuned=tuned_sender)
        self._sender.answer()
        self.sender_pid, self.receiver_pid = self._sender.pid, self._receiver.pid

    def run(self, samples: int) -> float:
        return float(self._sender.ask(samples))

    def clear(self) -> None:
        return

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


def _grpc_receiver(connection: Connection, address: str) -> None:
    import asyncio

    import grpc.aio

    from slotstream.wire.names import MESSAGE_BYTES_MAX

    end: Any = grpc.aio.EOF  # type: ignore[attr-defined]

    async def take(requests: Any, context: Any) -> None:
        while await context.read() is not end:
            await context.write(b"\1")

    async def serve() -> None:
        server = grpc.aio.server(options=(("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),))
        handlers: Any = {"Frames": grpc.stream_stream_rpc_method_handler(take)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
        port = server.add_insecure_port(address)
        await server.start()
        connection.send(address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}")
        await asyncio.to_thread(lambda: deque(questions(connection), maxlen=0))
        await server.stop(None)

    asyncio.run(serve())


def _grpc_sender(connection: Connection, shape: Shape, address: str) -> None:
    import grpc

    from slotstream.transport.channel import CHANNEL_OPTIONS

    frames = [b"\1" * (rows * shape.row_bytes) for _, rows in shape.frames()]
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stream = channel.stream_stream("/bench/Frames", request_serializer=None, response_deserializer=None)

        def run(samples: int) -> None:
            acks = sum(1 for _ in stream(frame for _ in range(samples) for frame in frames))
            if acks != samples * len(frames):
                raise ChildFailed(f"{acks} acks for {samples * len(frames)} frames")

        _answer_runs(connection, run)


# Plain file: what has to happen to the bytes of a sample at least, by one thread that does nothing else.


class PlainFile:
    name = "plain file write"
    receiver_pid = None

    def __init__(self, shape: Shape, directory: Path) -> None:
        directory.mkdir()
        self._child = Child(self.name, _plain_file, shape, directory, tuned=True)
        self._child.answer()
        self.sender_pid = self._child.pid

    def run(self, samples: int) -> float:
        return float(self._child.ask(samples))

    def clear(self) -> None:
        self._child.ask(-1)

    def close(self) -> None:
        self._child.close()


def _plain_file(connection: Connection, shape: Shape, directory: Path) -> None:
    data = memoryview(bytearray(b"\1" * shape.sample_bytes))
    frames = [
        (start * shape.row_bytes, data[start * shape.row_bytes :][: rows * shape.row_bytes]) for start, rows in shape.frames()
    ]

    def run(samples: int) -> None:
        if samples < 0:  # Remove what the run before left.
            for path in directory.iterdir():
                path.unlink()
            return
        for number in range(samples):
            fd = os.open(directory / f"{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.posix_fallocate(fd, 0, shape.sample_bytes)
            for at, frame in frames:
                os.pwrite(fd, frame, at)
            os.fdatasync(fd)
            os.close(fd)

    _answer_runs(connection, run)


# slotstream: the connector's own staging, pump and sink in one process; `slotstream serve` in the other.


class Server:
    """A `slotstream serve` as users start it. `address` is where it listens."""

    def __init__(self, listen: str, data_dir: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "slotstream.cli.main", "serve", "--listen", listen, "--data", str(data_dir)]
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._log: deque[str] = deque(maxlen=30)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._log.append(line)
            if "listening on" in line:
                self.address = line.split()[-1]
                break
        else:
            raise ChildFailed(f"slotstream serve did not start:\n{self.log()}")
        threading.Thread(target=self._log.extend, args=(self.process.stdout,), daemon=True).start()

    def log(self) -> str:
        return "".join(self._log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Slotstream:
    def __init__(
        self,
        shape: Shape,
        listen: str,
        data_dir: Path,
        staging_bytes: int,
        transport: str,
        *,
        tuned_sender: bool,
        streams: int = 1,
    ) -> None:
        """`transport`: "grpc" or "nixl". `streams` of the one sender, and processes of the server."""
        self.name = "slotstream, gRPC" if transport == "grpc" else "slotstream, NIXL"
        if streams > 1:
            self.name += f" x{streams}"
        self._server = Server(listen, data_dir, *(["--workers", str(streams)] if streams > 1 else []))
        try:
            self._sender = Child(
                "slotstream sender",
                _slotstream_sender,
                shape,
                self._server.address,
                staging_bytes,
                transport,
                streams,
                tuned=tuned_sender,
            )
            self._sender.answer()
        except BaseException:
            self._server.close()
            raise
        self.sender_pid, self.receiver_pid = self._sender.pid, self._server.pid

    def run(self, samples: int) -> float:
        return self._ask("run", samples)

    def clear(self) -> None:
        self._ask("check")

    def _ask(self, *question: Any) -> float:
        try:
            return float(self._sender.ask(*question))
        except ChildFailed as error:
            raise ChildFailed(f"{error}; the server's log ends with\n{self._server.log()}") from error

    def close(self) -> None:
        self._sender.close()
        self._server.close()


def _slotstream_sender(*arguments: Any) -> None:
    from sending import send_samples  # Here, in the child: it needs torch, which the others do without.

    send_samples(*arguments)
