"""`serve --probes ADDR`: two questions over plain HTTP, answered by threads of their own with one word each.

/livez    200 ok, or 503 hung: the event loop or a thread of the server keeps still, and only a restart helps
/readyz   200 ok or full, or 503 starting, draining or disk

Anything else is 404. There is no TLS and no token: the words say nothing of what is stored, and kubelets have neither.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from slotstream.server.pulse import Pulse
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import ConfigError, SlotStreamError

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
DISK_S = 5.0  # How long the data directory may take to answer.
_ASK_S = 5.0  # How long a caller may take to ask.
_CALLERS_MAX = 32


class DiskWatch:
    """Asks the data directory once a second whether it is there, on a thread that may wait for it for ever."""

    def __init__(self, store: SampleStore, free_bytes_min: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._free_bytes_min = free_bytes_min
        self._clock = clock
        self._word = "ok"
        self._asked_at: float | None = None  # Set while the disk has not answered.
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe-disk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait: the thread may be waiting for a disk that never answers."""
        self._stopping.set()

    @property
    def word(self) -> str:
        """ok, full (less is free than samples must leave), or disk: it is gone, or does not answer."""
        asked_at = self._asked_at
        return "disk" if asked_at is not None and self._clock() - asked_at > DISK_S else self._word

    def look(self) -> None:
        """Ask once."""
        self._asked_at = self._clock()
        try:
            self._store.check_directory()
            self._word = "full" if self._store.free_bytes() <= self._free_bytes_min else "ok"
        except SlotStreamError:
            self._word = "disk"
        finally:
            self._asked_at = None

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.look()
            except Exception:
                self._word = "disk"
                _log.exception("a fault while the data directory was looked at")
            self._stopping.wait(_LOOK_S)


class Probes:
    """What the two addresses answer. Fields are set by the event loop and read by the callers' threads."""

    def __init__(self) -> None:
        self.pulses: tuple[Pulse, ...] = ()
        self.disk: DiskWatch | None = None  # None: the server is starting.
        self.draining = False
        self._stuck = ""

    def ignore_pulses(self) -> None:
        """The server ends, and its threads with it."""
        self.pulses = ()

    def livez(self) -> tuple[bool, str]:
        """Whether the server lives, and the word for it."""
        stuck = ", ".join(pulse.name for pulse in self.pulses if pulse.is_stuck)
        if stuck != self._stuck:
            self._stuck = stuck
            _log.error("/livez: %s", f"hung: {stuck}" if stuck else "ok again")
        return (False, "hung") if stuck else (True, "ok")

    def readyz(self) -> tuple[bool, str]:
        """Whether the server takes calls, and the word for it."""
        if self.draining:
            return False, "draining"
        if self.disk is None:
            return False, "starting"
        word = self.disk.word
        return word != "disk", word


def serve_probes(probes: Probes, address: str) -> tuple[str, Callable[[], None]]:
    """Answer on `address` (host:port); returns the real address and what stops it. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    try:
        server = _Server(host.strip("[]"), int(port), {"/livez": probes.livez, "/readyz": probes.readyz})
    except OSError as error:
        raise ConfigError(f"--probes: cannot listen on {address}: {error.strerror or error}") from error
    thread = threading.Thread(target=server.serve_forever, name="probes", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"{host}:{server.server_address[1]}", stop


class _Server(ThreadingHTTPServer):
    """Callers beyond _CALLERS_MAX put the oldest out: nobody can keep the kubelet waiting."""

    daemon_threads = True
    request_queue_size = 128
    block_on_close = False

    def __init__(self, host: str, port: int, answers: dict[str, Callable[[], tuple[bool, str]]]) -> None:
        self.answers = answers
        self._callers: deque[socket.socket] = deque(maxlen=_CALLERS_MAX)
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._callers) == _CALLERS_MAX:
            with contextlib.suppress(OSError):  # It went by itself.
                self._callers[0].shutdown(socket.SHUT_RDWR)
        self._callers.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a caller of the probes went away", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _ASK_S
    server: _Server

    def _answer(self) -> None:
        found = self.server.answers.get(self.path) if self.command in ("GET", "HEAD") else None
        good, word = found() if found is not None else (False, "unknown")
        status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE if found is not None else HTTPStatus.NOT_FOUND
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(word)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(word.encode())

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = _answer

    def version_string(self) -> str:
        return "slotstream"

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
