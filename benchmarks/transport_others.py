"""Senders and receivers of the transport benchmark that are not slotstream: the machine's own bounds, and Arrow Flight."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from children import ChildFailed, questions
from contenders import family_of
from load import Load, slots, source


class Sender:
    """What `load.Stream`s have in common that say nothing of single chunks and leave nothing behind."""

    def __init__(self) -> None:
        self._memory = source()

    def prepare(self, load: Load) -> None:
        self._load = load
        self._slots = slots(self._memory, load.chunk_bytes)

    def _chunk(self, number: int) -> memoryview:
        return self._slots[number % len(self._slots)]

    def alone(self, chunks: int) -> list[float]:
        return []

    def clear(self) -> None:
        return

    def release(self) -> None:
        return


class CopyStream(Sender):
    """memcpy, from one buffer into another."""

    def __init__(self) -> None:
        super().__init__()
        self._target = source()

    def run(self) -> list[float]:
        targets = slots(self._target, self._load.chunk_bytes)
        for number in range(self._load.chunks):
            targets[number % len(targets)][:] = self._chunk(number)
        return []


class SocketStream(Sender):
    """`sendall`; a byte comes back at the end."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    def prepare(self, load: Load) -> None:
        super().prepare(load)
        family, where = family_of(self._address)
        self._peer = socket.socket(family, socket.SOCK_STREAM)
        self._peer.connect(where)

    def run(self) -> list[float]:
        self._peer.sendall((self._load.chunks * self._load.chunk_bytes).to_bytes(8, "little"))
        for number in range(self._load.chunks):
            self._peer.sendall(self._chunk(number))
        if self._peer.recv(1) != b"\1":
            raise ChildFailed("the receiver went away")
        return []

    def release(self) -> None:
        self._peer.close()


def receive_sockets(connection: Connection, address: str) -> None:
    """Main function of the receiver: a thread a connection, `recv_into` one buffer each."""
    family, where = family_of(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(where)
    listener.listen(64)
    bound = listener.getsockname()
    connection.send(address if family is socket.AF_UNIX else f"{bound[0]}:{bound[1]}")

    def accept() -> None:
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=_drain, args=(peer,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    deque(questions(connection), maxlen=0)


def _drain(peer: socket.socket) -> None:
    buffer = memoryview(bytearray(1 << 20))
    count = bytearray(8)
    with peer:
        while peer.recv_into(count, 8, socket.MSG_WAITALL) == 8:
            left = int.from_bytes(count, "little")
            while left:
                got = peer.recv_into(buffer[:left])
                if not got:
                    return
                left -= got
            peer.sendall(b"\1")


class PlainFileStream(Sender):
    """The least that storing takes: a preallocated file a sample, `pwrite`, `fdatasync`."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._paths: list[Path] = []

    def run(self) -> list[float]:
        load = self._load
        for _ in range(load.samples):
            path = self._directory / uuid.uuid4().hex
            self._paths.append(path)
            store_file(path, load.sample_bytes, (self._chunk(number) for number in range(load.sample_chunks)))
        return []

    def clear(self) -> None:
        while self._paths:
            self._paths.pop().unlink()


def store_file(path: Path, nbytes: int, parts: Any) -> None:
    """A new file of `nbytes`, whose bytes are `parts`, one behind the other; on disk when this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        at = 0
        for part in parts:
            at += os.pwrite(fd, part, at)
        os.fdatasync(fd)
    finally:
        os.close(fd)


class FlightStream(Sender):
    """Arrow Flight's `do_put`: one for all of a run, or with a `directory` one a sample. A batch is a chunk."""

    def __init__(self, location: str, directory: Path | None) -> None:
        super().__init__()
        import pyarrow

        self._arrow = pyarrow
        self._location = location
        self._directory = directory
        self._paths: list[Path] = []

    def prepare(self, load: Load) -> None:
        from pyarrow import flight

        super().prepare(load)
        self._client = flight.connect(self._location)
        self._batches = [_batch(slot) for slot in self._slots]

    def run(self) -> list[float]:
        load = self._load
        if self._directory is None:
            self._put("nothing", load.chunks)
            return []
        for _ in range(load.samples):
            path = self._directory / uuid.uuid4().hex
            self._paths.append(path)
            self._put(f"{load.sample_bytes}:{path}", load.sample_chunks)
        return []

    def _put(self, what: str, chunks: int) -> None:
        from pyarrow import flight

        descriptor = flight.FlightDescriptor.for_path(what)
        writer, reader = self._client.do_put(descriptor, self._batches[0].schema)
        for number in range(chunks):
            writer.write_batch(self._batches[number % len(self._batches)])
        writer.done_writing()
        if reader.read() is None:
            raise ChildFailed("Flight's server did not take what was put")
        writer.close()

    def clear(self) -> None:
        while self._paths:
            self._paths.pop().unlink()

    def release(self) -> None:
        self._client.close()


def _batch(data: Any) -> Any:
    """A record batch of one column of bytes, over `data`."""
    import pyarrow

    buffer = pyarrow.py_buffer(data)
    return pyarrow.record_batch([pyarrow.Array.from_buffers(pyarrow.uint8(), buffer.size, [None, buffer])], names=["rows"])


def serve_flight(connection: Connection) -> None:
    """Main function of a Flight server: `do_put` drops what comes, or stores it as `store_file` does; `do_get` serves files."""
    import pyarrow
    from pyarrow import flight

    class Server(flight.FlightServerBase):  # type: ignore[misc]
        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            what = descriptor.path[0].decode()
            parts = (chunk.data.column(0).buffers()[1] for chunk in reader)
            if what == "nothing":
                deque(parts, maxlen=0)
            else:
                size, _, path = what.partition(":")
                store_file(Path(path), int(size), parts)
            writer.write(b"\1")

        def do_get(self, context: Any, ticket: Any) -> Any:
            path, at, nbytes, chunk_bytes = ticket.ticket.decode().split(":")
            file, end = pyarrow.memory_map(path), int(at) + int(nbytes)
            file.seek(int(at))
            data = [file.read_buffer(min(int(chunk_bytes), end - file.tell())) for _ in range(int(at), end, int(chunk_bytes))]
            return flight.RecordBatchStream(pyarrow.Table.from_batches([_batch(part) for part in data]))

    server = Server("grpc://127.0.0.1:0")
    connection.send(f"grpc://127.0.0.1:{server.port}")
    deque(questions(connection), maxlen=0)
    server.shutdown()
