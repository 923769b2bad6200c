"""A relay whose connections can be slow, silent or cut, each by itself: a proxy, or a network, on the way to a server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

_BYTES = 1 << 14


class Link:
    """One connection through the relay. `carried`: bytes that the caller sent; `slow_s`: the pause before each piece."""

    def __init__(self, caller: socket.socket, server: socket.socket) -> None:
        self._ends = (caller, server)
        for end in self._ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # Small pieces go at once, as they came.
        self._passing = threading.Event()
        self._passing.set()
        self.slow_s = 0.0
        self.carried = 0
        self.is_over = False
        threading.Thread(target=self._pass_on, args=(caller, server, True), daemon=True).start()
        threading.Thread(target=self._pass_on, args=(server, caller, False), daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether nothing passes."""
        return not self._passing.is_set()

    def fall_silent(self) -> None:
        """Nothing passes any more, and neither end hears that the other one is gone."""
        self._passing.clear()

    def cut(self) -> None:
        """Hang up on both ends."""
        self.is_over = True
        self._passing.set()
        for end in self._ends:
            with contextlib.suppress(OSError):  # It is over already.
                end.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):  # Either end is gone.
            while data := source.recv(_BYTES):
                if counted:
                    self.carried += len(data)
                    time.sleep(self.slow_s)
                self._passing.wait()
                if self.is_over:
                    break
                target.sendall(data)
        if not self._passing.is_set():
            self._passing.wait()  # Also the end of one is not told to the other.
        self.cut()


class Relay:
    """Listens on `address`, and passes everything on to the server at `target`, both `host:port`. `links`: all so far."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.links: list[Link] = []
        self.silent = False  # Whether new links are, from their begin.
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def live(self) -> list[Link]:
        """Those that nobody has hung up on."""
        return [link for link in self.links if not link.is_over]

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            try:
                link = Link(caller, socket.create_connection(self._target))
            except OSError:
                caller.close()
                continue
            if self.silent:
                link.fall_silent()
            self.links.append(link)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self.links:
            link.cut()
