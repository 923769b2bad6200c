"""`serve --probes ADDR`: two questions over plain HTTP, answered by threads of their own with one word each.

/livez    200 ok, or 503 hung: the event loop or a thread of the server keeps still, and only a restart helps
/readyz   200 ok or full, or 503 starting, draining or disk

Anything else is 404. There is no TLS and no token: the words say nothing of what is stored, and kubelets have neither.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus

from slotstream.server.http import Answer, Page, serve_pages
from slotstream.server.pulse import Pulse
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import SlotStreamError

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
DISK_S = 5.0  # How long the data directory may take to answer.


class DiskWatch:
    """Asks the data directory once a second whether it is there, on a thread that may wait for it without end."""

    def __init__(self, store: SampleStore, free_bytes_min: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.looked: Callable[[], None] = lambda: None  # Called by the thread after each look.
        self.free_bytes: int | None = None  # Of its disk at the last look; None where that gave no answer.
        self.disk_bytes: int | None = None
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
            self.free_bytes, self.disk_bytes = self._store.free_bytes(), self._store.disk_bytes()
            self._word = "full" if self.free_bytes <= self._free_bytes_min else "ok"
        except SlotStreamError:
            self._word = "disk"
            self.free_bytes = self.disk_bytes = None
        finally:
            self._asked_at = None

    def _run(self) -> None:
        told = False
        while not self._stopping.is_set():
            try:
                self.look()
            except Exception:
                if self._stopping.is_set():
                    return  # The store was closed meanwhile.
                self._word = "disk"
                _log.exception("a fault while the data directory was looked at")
            try:
                self.looked()
                told = False
            except Exception:
                if not told:  # Once, and not every second.
                    _log.exception("a fault while what was counted was noted")
                told = True
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
    return serve_pages("probes", address, {"/livez": _page(probes.livez), "/readyz": _page(probes.readyz)})


def _page(ask: Callable[[], tuple[bool, str]]) -> Page:
    def page(_: Message) -> Answer:
        good, word = ask()
        return Answer(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, word.encode())

    return page
