"""Threads that serve several lines in turn, so that a long one holds no other up."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")


class Lines:
    """Work for a pool of threads: each line in order of arrival, one piece of each line in turn. Any thread may call it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._lines: OrderedDict[Hashable, deque[Callable[[], object]]] = OrderedDict()

    def submit(self, line: Hashable, work: Callable[[], object]) -> None:
        """Do it when it is its turn. `work` raises nothing."""
        with self._lock:
            self._lines.setdefault(line, deque()).append(work)
        self._pool.submit(self._serve)

    def _serve(self) -> None:
        with self._lock:
            line, waiting = self._lines.popitem(last=False)
            work = waiting.popleft()
            if waiting:
                self._lines[line] = waiting  # Behind all others.
        work()


class NarrowLines:
    """Calls for a pool of threads, of each line so many at a time at most: one whose calls hang leaves threads to the others.

    Any thread may call it.
    """

    def __init__(self, pool: ThreadPoolExecutor, most: int) -> None:
        self._pool = pool
        self._most = most
        self._lock = threading.Lock()
        self._running: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}

    def submit(self, line: Hashable, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """What `call` returns or raises, once it is the line's turn."""
        future: Future[_T] = Future()
        work = partial(_run, future, call, arguments)
        with self._lock:
            if self._running.get(line, 0) >= self._most:
                self._waiting.setdefault(line, deque()).append(work)
                return future
            self._running[line] = self._running.get(line, 0) + 1
        self._pool.submit(self._serve, line, work)
        return future

    def _serve(self, line: Hashable, work: Callable[[], None] | None) -> None:
        while work is not None:
            work()
            work = self._next(line)
            if work is not None:
                try:
                    self._pool.submit(self._serve, line, work)  # Behind what came meanwhile.
                    return
                except RuntimeError:  # The pool is ending, and does what it was asked before.
                    continue

    def _next(self, line: Hashable) -> Callable[[], None] | None:
        with self._lock:
            if waiting := self._waiting.get(line):
                work = waiting.popleft()
                if not waiting:
                    del self._waiting[line]
                return work
            self._running[line] -= 1
            if not self._running[line]:
                del self._running[line]
            return None


def _run(future: Future[_T], call: Callable[..., _T], arguments: tuple[Any, ...]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = call(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
