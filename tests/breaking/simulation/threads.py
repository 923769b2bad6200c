"""What the server takes from `threading`, `queue`, `time`, `secrets` and `concurrent.futures`, in simulated time."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, TypeVar

from simulation.scheduler import Killed, SimThread, running

_T = TypeVar("_T")
START_UNIX_NS = 1_700_000_000_000_000_000


class Lock:
    """`threading.Lock`. A thread that takes it may have to let others run first."""

    def __init__(self, *, may_preempt: bool = True) -> None:
        self._may_preempt = may_preempt
        self._held = False
        self._waiting: deque[SimThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        assert timeout < 0, "nothing here waits for a lock for so long"
        scheduler = running()
        if self._may_preempt:
            scheduler.maybe_pause()
        elif scheduler.current.process.dead:
            raise Killed
        while self._held:
            if not blocking:
                return False
            self._waiting.append(scheduler.current)
            scheduler.block()
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        if self._waiting:
            running().wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock()
        self._waiting: list[SimThread] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = running()
        me = scheduler.current
        self._waiting.append(me)
        self._lock.release()
        woken = scheduler.block(timeout)
        if me in self._waiting:
            self._waiting.remove(me)
        self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        scheduler = running()
        ends_at = None if timeout is None else scheduler.now + timeout
        while not predicate():
            left = None if ends_at is None else ends_at - scheduler.now
            if left is not None and left <= 0:
                return False
            self.wait(left)
        return True

    def notify(self, n: int = 1) -> None:
        for thread in [thread for thread in self._waiting if thread.waiting][:n]:
            self._waiting.remove(thread)
            running().wake(thread)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._changed = Condition()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            self._changed.wait_for(self.is_set, timeout)
        return self._set


class Thread:
    """`threading.Thread`."""

    def __init__(
        self, target: Callable[..., object], name: str = "thread", args: tuple[Any, ...] = (), daemon: bool | None = None
    ) -> None:
        self.name = name
        self.daemon = daemon
        self._run = lambda: target(*args)
        self._thread: SimThread | None = None

    def start(self) -> None:
        self._thread = running().spawn(self.name, self._run)

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            running().join(self._thread, timeout)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.done


class SimpleQueue(Generic[_T]):
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._changed = Condition()

    def put(self, item: _T) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def get(self) -> _T:
        with self._changed:
            self._changed.wait_for(lambda: self._items)
            return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class Future(concurrent.futures.Future[_T]):
    """`concurrent.futures.Future`: Python's own, with a simulated condition to wait on."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = Condition(Lock(may_preempt=False))


def wait(futures: Iterable[Future[Any]]) -> None:
    """`concurrent.futures.wait`, for all of them."""
    for future in futures:
        with suppress(concurrent.futures.CancelledError):
            future.exception()


class ThreadPoolExecutor:
    """`concurrent.futures.ThreadPoolExecutor`: jobs begin in order, on so many threads, and may be slow to begin."""

    slow_s = 0.0  # Up to so long, while the nemesis says so.

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "pool") -> None:
        self._workers_max = max_workers
        self._name = thread_name_prefix
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = Condition(Lock(may_preempt=False))
        self._threads: list[SimThread] = []
        self._idle = 0
        self._over = False

    def submit(self, call: Callable[..., _T], /, *arguments: Any, **named: Any) -> Future[_T]:
        future: Future[_T] = Future()
        with self._changed:
            if self._over:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._jobs.append((future, lambda: call(*arguments, **named)))
            if self._idle:
                self._changed.notify()
            elif len(self._threads) < self._workers_max:
                self._threads.append(running().spawn(f"{self._name}_{len(self._threads)}", self._work))
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._over:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                future, job = self._jobs.popleft()
            scheduler = running()
            if self.slow_s:
                scheduler.pause(self.slow_s * scheduler.rng.random())
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = job()
            except Killed:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for thread in self._threads if wait else ():
            running().join(thread)


class SimThreading:
    """The module `threading`."""

    Lock, Condition, Event, Thread = Lock, Condition, Event, Thread


class SimQueue:
    """The module `queue`."""

    SimpleQueue = SimpleQueue


class SimTime:
    """The module `time`. The wall clock may leap; no other does."""

    CLOCK_BOOTTIME = 7
    leapt_ns = 0

    @classmethod
    def time_ns(cls) -> int:
        return START_UNIX_NS + cls.leapt_ns + round(running().now * 1e9)

    @classmethod
    def time(cls) -> float:
        return cls.time_ns() / 1e9

    @staticmethod
    def monotonic() -> float:
        return running().now

    @staticmethod
    def elapsed_ns() -> int:
        return round(running().now * 1e9)

    @classmethod
    def clock_gettime_ns(cls, clock: int) -> int:
        return cls.elapsed_ns()

    @staticmethod
    def sleep(seconds: float) -> None:
        running().pause(seconds)


class SimSecrets:
    """The module `secrets`."""

    @staticmethod
    def token_hex(nbytes: int = 32) -> str:
        return running().rng.randbytes(nbytes).hex()

    @staticmethod
    def randbits(k: int) -> int:
        return running().rng.getrandbits(k)
