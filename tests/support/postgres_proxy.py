"""A way to a database that can be cut: at a COMMIT whose answer never comes, or altogether."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from pathlib import Path

_SOCKET = ".s.PGSQL.5432"


class Proxy:
    """Listens in `folder` as PostgreSQL does, and passes on to the server whose socket is in `target`."""

    def __init__(self, target: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slotstream-proxy-", dir="/tmp"))
        self._target = target / _SOCKET
        self.cut_at_commit = 0  # So many times: the connection ends once COMMIT was passed on.
        self.refuses = False  # Whoever comes, and whoever is cut from now on stays away.
        self.refuses_after_cut = False
        self.commits_cut = threading.Semaphore(0)  # Released at each cut.
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / _SOCKET))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self.cut_all()
        (self.folder / _SOCKET).unlink()
        self.folder.rmdir()

    def cut_all(self) -> None:
        """Every connection that is open."""
        for one in list(self._open):
            _end(one)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refuses:
                    client.close()
                    continue
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(str(self._target))
                except OSError:  # The server is away.
                    server.close()
                    client.close()
                    continue
                self._open |= {client, server}
                threading.Thread(target=self._up, args=(client, server), daemon=True).start()
                threading.Thread(target=self._down, args=(client, server), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                cut = b"COMMIT" in data and self.cut_at_commit > 0
                if cut:
                    self.cut_at_commit -= 1
                    self.refuses = self.refuses or self.refuses_after_cut
                    _end(client)  # Before an answer can come.
                server.sendall(data)
                if cut:  # The server's own end stays open for now: it goes on with its COMMIT.
                    self.commits_cut.release()
                    return
            _end(server)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                with contextlib.suppress(OSError):
                    client.sendall(data)
        _end(client)
        self._open -= {client, server}
        server.close()


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
