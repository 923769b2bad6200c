"""An asyncio event loop on a simulated thread: its clock is the simulation's, and there is no selector."""

from __future__ import annotations

import asyncio
import heapq
from contextlib import suppress
from typing import Any

from simulation.scheduler import Killed, running


class SimLoop(asyncio.BaseEventLoop):
    """Callbacks run in the order that asyncio promises. Between two of them other threads may run, and post more."""

    # Of BaseEventLoop, and not in its stubs.
    _ready: Any
    _scheduled: Any
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._scheduler = running()
        self._thread = self._scheduler.current
        self._idle = False
        self.set_exception_handler(self._faulty)

    def _faulty(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self._thread.process.dead:
            self._scheduler.fail(f"a callback of the event loop raised: {context}")

    def time(self) -> float:
        return self._scheduler.now

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = self.call_soon(callback, *args, context=context)
        if self._idle:
            self._scheduler.wake(self._thread)
        return handle

    def _run_once(self) -> None:
        self._due()
        if not self._ready and not self._stopping:
            timeout = max(0.0, self._scheduled[0].when() - self.time()) if self._scheduled else None
            self._idle = True  # Elsewhere it may wait for a lock, and is not to be woken from that.
            self._scheduler.block(timeout)
            self._idle = False
            self._due()
        # What is ready now runs in order; what that makes ready comes after it, and after others had their turn.
        for _ in range(len(self._ready)):
            self._scheduler.maybe_pause()
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()
        self._scheduler.pause()

    def _due(self) -> None:
        now = self.time()
        while self._scheduled and (self._scheduled[0].cancelled() or self._scheduled[0].when() <= now):
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            if not handle.cancelled():
                self._ready.append(handle)

    def forget(self) -> None:
        """The process is dead: what its tasks would do at their end is not done."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with suppress(BaseException):
                task.get_coro().close()
        self._ready.clear()
        self._scheduled.clear()

    def run(self) -> None:
        """Until `stop`, or until the process is killed."""
        try:
            self.run_forever()
        except Killed:
            self.forget()
            raise
