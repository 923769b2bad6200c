"""One thread that writes: what was asked of it while it was busy becomes its next transaction, so many commits share one."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from slotstream.wire.errors import Interrupted

BATCH_MAX = 256  # Operations in one transaction.
_LINGER_S = 0.05  # How long a change that nobody waits for may wait for others: a transaction costs as much for one as for ten.

_O = TypeVar("_O")


class BatchWriter(Generic[_O]):
    """Collects operations, and has `_write_batch` do them in the order they were asked for. Thread safe."""

    def __init__(self) -> None:
        # (operation, future, whether it has to survive a power cut)
        self._operations: deque[tuple[_O, Future[Any], bool]] = deque()
        self._asked = threading.Condition()  # Guards the three around it.
        self._urgent = False  # Somebody waits for one of the operations.
        self._closed = False
        self._thread = threading.Thread(target=self._write_forever, name="catalogue", daemon=True)

    @property
    def writer(self) -> threading.Thread:
        """The thread that writes; it ends when the catalogue is closed."""
        return self._thread

    def _ask_for(self, operation: _O, *, urgent: bool = True, durable: bool = False) -> Future[Any]:
        """Do `operation` in the next transaction; one that is not `urgent` may wait for others a little."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # It cannot be cancelled: the change may be on disk already.
        with self._asked:
            if self._closed:
                future.set_exception(Interrupted("the catalogue is closed"))
                return future
            first = not self._operations
            self._operations.append((operation, future, durable))
            if first or (urgent and not self._urgent):
                self._asked.notify()
            self._urgent = self._urgent or urgent
        return future

    def _is_lingering(self) -> bool:
        """Whether something that was asked for is not under way yet."""
        with self._asked:
            return bool(self._operations)

    def _write_forever(self) -> None:
        while batch := self._next_batch():
            if not self._write_batch(batch):
                # One of them cannot be done: each on its own, so that it alone fails.
                for one in batch:
                    self._write_batch([one])

    def _next_batch(self) -> list[tuple[_O, Future[Any], bool]]:
        """What to do next, once there is something; nothing when all is done and the catalogue is closed."""
        with self._asked:
            self._asked.wait_for(lambda: self._operations or self._closed)
            self._asked.wait_for(lambda: self._urgent or self._closed or len(self._operations) >= BATCH_MAX, _LINGER_S)
            batch = [self._operations.popleft() for _ in range(min(len(self._operations), BATCH_MAX))]
            self._urgent = self._urgent and bool(self._operations)
            return batch

    def _write_batch(self, batch: list[tuple[_O, Future[Any], bool]]) -> bool:
        """One transaction. False when it failed and holds more than one operation; a single one gets its error."""
        raise NotImplementedError

    def _stop_writing(self) -> bool:
        """Waits until all that was asked for is written, and ends the thread. False where that was done before."""
        with self._asked:
            if self._closed:
                return False
            self._closed = True
            self._asked.notify()
        self._thread.join()
        return True
