"""Threads that serve several lines in turn, so that a long one holds no other up."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor


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
