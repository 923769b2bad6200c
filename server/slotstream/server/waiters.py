"""Who waits for which sample: readers sleep until something happened to the id they want; nobody polls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from slotstream.store.records import SampleKey
from slotstream.wire.errors import ServerDraining


class Waiters:
    """Wakes waiters by sample. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[SampleKey, dict[asyncio.Event, None]] = {}  # In the order in which they came, and are woken.
        self._closed = False

    @contextmanager
    def watch(self, key: SampleKey) -> Iterator[asyncio.Event]:
        """An event that is set whenever the sample's state may have changed. Watch first, then look, then wait."""
        event = asyncio.Event()
        self._waiting.setdefault(key, {})[event] = None
        try:
            yield event
        finally:
            events = self._waiting[key]
            del events[event]
            if not events:
                del self._waiting[key]

    def notify(self, key: SampleKey) -> None:
        """Something happened to the sample."""
        for event in self._waiting.get(key, ()):
            event.set()

    def notify_all(self) -> None:
        """Something may have happened to any sample."""
        for events in self._waiting.values():
            for event in events:
                event.set()

    def close(self) -> None:
        """Wake everybody: nothing will arrive any more."""
        self._closed = True
        self.notify_all()

    def check_open(self) -> None:
        """Raises ServerDraining after `close`."""
        if self._closed:
            raise ServerDraining("the server is shutting down")
