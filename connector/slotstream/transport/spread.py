"""How the streams of one sender find a server process each, where a server has several (`slotstream serve --workers`).

Its processes share one port, and the kernel chooses who takes a connection. So a stream that meets a process which has its
share of our streams connects again, a few times, before a sample goes on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from slotstream.v1 import ingest_pb2

_TRIES_MAX = 16  # With eight processes, eight streams then miss a free one in a tenth of the cases; a shared one works too.


class Spread:
    """The streams of one sender, by number. Thread-safe.

    Stream 0 is there for every server. The others wait until it has met one that knows of several: one of an earlier version
    gets stream 0 alone.
    """

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self._changed = threading.Condition()
        self._at: dict[int, int] = {}  # Stream -> the process that it met last, while it is up.
        self._tries = [0] * streams
        self._takes_several = False

    def may_connect(self, stream: int) -> bool:
        """Whether the server is known to take this one."""
        return not stream or self._takes_several

    def wait(self, stream: int, stop: Callable[[], bool], timeout_s: float) -> None:
        """Until it may connect, or `stop`, which `wake` lets look again; for `timeout_s` at most."""
        with self._changed:
            self._changed.wait_for(lambda: stop() or self.may_connect(stream), timeout_s)

    def wake(self) -> None:
        """What `stop` says changed."""
        with self._changed:
            self._changed.notify_all()

    def settles(self, stream: int, welcome: ingest_pb2.Welcome) -> bool:
        """A stream met a process: whether it stays there."""
        with self._changed:
            if not welcome.processes:  # Of an earlier version.
                self._takes_several = self._takes_several and bool(stream)
                return not stream
            others = [process for number, process in self._at.items() if number != stream]
            share = -(-self.streams // welcome.processes)
            if others.count(welcome.process) >= share and self._tries[stream] < _TRIES_MAX:
                self._tries[stream] += 1
                return False
            self._at[stream], self._tries[stream] = welcome.process, 0
            if not stream:
                self._takes_several = True
                self._changed.notify_all()
            return True

    def ended(self, stream: int) -> None:
        """It is not up any more."""
        with self._changed:
            self._at.pop(stream, None)
