"""A port that answers what it is told to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """A port that answers every connection with these bytes, or with nothing (None) for as long as that lasts."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            held.append(peer)
            if answer is not None:
                peer.recv(100)
                peer.sendall(answer)
                peer.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for peer in held:
        peer.close()
