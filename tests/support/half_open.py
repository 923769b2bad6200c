"""A relay that hangs up on one side only: the server goes on believing in its peer, as when a host or a network is lost."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

_BYTES = 1 << 16


class HalfOpenRelay:
    """Listens on `address`, and passes everything on to the server at `target`, both `host:port`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._callers: list[socket.socket] = []
        self._servers: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def hang_up(self) -> None:
        """On all callers; the server's ends stay open and silent."""
        with self._lock:
            callers, self._callers = self._callers, []
        for caller in callers:
            _end(caller)

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            with self._lock:
                self._callers.append(caller)
                self._servers.append(server)
            for source, target in ((caller, server), (server, caller)):
                threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _end(self._listener)
        self.hang_up()
        for server in self._servers:
            _end(server)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # It is over already.
        connection.shutdown(socket.SHUT_RDWR)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(_BYTES):
            target.sendall(data)
    except OSError:
        pass  # Either side is gone; the other stays as it is.
