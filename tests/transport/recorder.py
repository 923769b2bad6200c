"""Collects what a sink says, and waits for it."""

from __future__ import annotations

import threading
from typing import TypeVar

from slotstream.transport.base import Acked, SinkEvent

WAIT_S = 60.0  # How long a test waits for what must come; only a failing test ever waits so long.
_Event = TypeVar("_Event", bound=SinkEvent)


class Recorder:
    """An `on_event` callback that keeps every event in order: an Acked for each chunk, however many came together."""

    def __init__(self) -> None:
        self._events: list[SinkEvent] = []
        self._added = threading.Condition()

    def __call__(self, event: SinkEvent) -> None:
        each = [Acked((chunk,)) for chunk in event.chunks] if isinstance(event, Acked) else [event]
        with self._added:
            self._events += each
            self._added.notify_all()

    @property
    def events(self) -> list[SinkEvent]:
        """All events so far."""
        with self._added:
            return list(self._events)

    def of(self, kind: type[_Event]) -> list[_Event]:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type[_Event], count: int = 1) -> list[_Event]:
        """The events of one kind, once there are `count` of them."""
        with self._added:
            came = self._added.wait_for(lambda: sum(isinstance(event, kind) for event in self._events) >= count, WAIT_S)
        assert came, f"{count} {kind.__name__} did not come; there were {self.events}"
        return self.of(kind)
