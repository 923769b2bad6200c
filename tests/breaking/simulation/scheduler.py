"""Simulated time, and simulated threads of which exactly one runs: which one, and when, follows from the seed.

Each simulated thread has a Python thread for its stack, and nothing else of it. There is one baton. The thread that holds it
runs, and hands it on only where it would wait: for a lock, for another thread, for a disk, or for time to pass. When nobody
can run, the clock goes to the next time that somebody waits for. So nothing depends on the kernel, and nothing takes real
time.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

_STEPS_MAX = 400_000  # Of one seed: more is a loop that never ends.
_FRAMES_SHOWN = 8  # Of each thread's stack.


class Killed(BaseException):
    """The process of this thread is gone. Nothing of it does anything any more; raised until the thread has ended."""


class Stuck(Exception):
    """Nobody can run, and nobody waits for a time; or there is no end to it."""


@dataclass(eq=False)
class Process:
    """Threads that are killed together."""

    name: str
    dead: bool = False
    frozen_until: float = 0.0  # Nothing of it runs before.
    threads: list[SimThread] = field(default_factory=list)


class _Carrier:
    """A Python thread that lends its stack to one simulated thread after the other."""

    idle: list[_Carrier] = []  # noqa: RUF012  # One list for all seeds of this process.

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ident = threading.get_ident()
        self.job: Callable[[], _Carrier] | None = None

    @classmethod
    def take(cls) -> _Carrier:
        """One that has nothing to do."""
        if not cls.idle:
            cls.idle.append(carrier := cls())
            threading.Thread(target=carrier._run, daemon=True).start()
        return cls.idle.pop()

    def _run(self) -> None:
        self.ident = threading.get_ident()
        while True:
            self.baton.acquire()
            assert self.job is not None
            following = self.job()
            self.idle.append(self)
            following.baton.release()


class SimThread:
    """One simulated thread. Its end is waited for with `Scheduler.join`."""

    def __init__(self, name: str, process: Process, carrier: _Carrier) -> None:
        self.name = name
        self.process = process
        self.carrier = carrier
        self.done = False
        self.waits = 0  # How often it has waited: what was to end an earlier wait does not end this one.
        self.waiting = False
        self.woken = False
        self.killer: SimThread | None = None
        self.joiners: list[SimThread] = []


class Scheduler:
    """One seed's time and threads."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0  # Seconds since the simulation began.
        self.preempt = 0.0  # How likely a thread that takes a lock lets others run first.
        self.wrong: list[str] = []
        self.steps = 0
        self.lines: list[str] = []
        self._keep_trace = keep_trace
        self._digest = hashlib.blake2b(digest_size=8)
        self._order = itertools.count()
        self._runnable: list[SimThread] = []
        self._timers: list[tuple[float, float, int, SimThread, int]] = []
        self._threads: list[SimThread] = []
        self._stuck = ""
        self.world = Process("world")
        self.main = self.current = SimThread("main", self.world, _Carrier())  # On the thread that calls this.

    # What happened.

    def note(self, text: str) -> None:
        """A line of the trace."""
        line = f"{self.now:11.6f} {self.current.name:<14} {text}"
        self._digest.update(line.encode())
        if self._keep_trace:
            self.lines.append(line)

    def fail(self, text: str) -> None:
        """Something is wrong: the seed has failed."""
        self.note(f"WRONG {text}")
        self.wrong.append(text)

    @property
    def digest(self) -> str:
        """Of the whole trace."""
        return self._digest.hexdigest()

    def stacks(self) -> str:
        """Where each thread waits."""
        frames = sys._current_frames()
        return "\n".join(
            f"{thread.name} is at\n" + "".join(traceback.format_stack(frames[thread.carrier.ident])[-_FRAMES_SHOWN:-2])
            for thread in (self.main, *self._threads)
            if thread.waits or thread is self.main
        )

    # Threads.

    def spawn(self, name: str, run: Callable[[], object], process: Process | None = None) -> SimThread:
        """A thread of `process` (of the one that asks, if none is named), which may run from now on."""
        process = process or self.current.process
        if process.dead:
            raise Killed
        thread = SimThread(name, process, _Carrier.take())
        thread.carrier.job = lambda: self._body(thread, run)
        process.threads.append(thread)
        self._threads.append(thread)
        self._runnable.append(thread)
        return thread

    def _body(self, thread: SimThread, run: Callable[[], object]) -> _Carrier:
        """Runs a thread to its end, and returns whose turn it is then."""
        try:
            if not thread.process.dead:
                run()
        except Killed:
            pass
        except BaseException:
            self.fail(f"thread {thread.name} ended with\n{traceback.format_exc()}")
        thread.done = True
        thread.process.threads.remove(thread)
        self._threads.remove(thread)
        if thread.killer is not None:
            following = thread.killer
        else:
            for joiner in thread.joiners:
                self.wake(joiner)
            following = self._next()
        self.current = following
        return following.carrier

    def join(self, thread: SimThread, timeout: float | None = None) -> bool:
        """Whether the thread ended, after waiting for that."""
        ends_at = None if timeout is None else self.now + timeout
        while not thread.done:
            if ends_at is not None and self.now >= ends_at:
                return False
            thread.joiners.append(self.current)
            self.block(None if ends_at is None else ends_at - self.now)
        return True

    def kill(self, process: Process) -> None:
        """End every thread of a process where it stands. None of them does anything on its way out."""
        process.dead = True
        for thread in list(process.threads):
            if thread in self._runnable:
                self._runnable.remove(thread)
            thread.waits += 1
            thread.waiting = False
            thread.killer = me = self.current
            self.current = thread
            thread.carrier.baton.release()
            me.carrier.baton.acquire()
        assert not process.threads

    # Waiting.

    def pause(self, seconds: float = 0.0) -> None:
        """Let time pass, or at 0 let others run."""
        me = self.current
        if me.process.dead:
            raise Killed
        if seconds > 0:
            self._timer(me, seconds)
        elif not self._runnable and (not self._timers or self._timers[0][0] > self.now):
            return  # There is nobody else.
        else:
            self._runnable.append(me)
        self._switch(me)

    def maybe_pause(self) -> None:
        """Let others run, now and then."""
        if self.current.process.dead:
            raise Killed
        if self.preempt and self.rng.random() < self.preempt:
            self.pause()

    def block(self, timeout: float | None = None) -> bool:
        """Wait until somebody wakes this thread, or until the time is over: False."""
        me = self.current
        if me.process.dead:
            raise Killed
        me.waiting, me.woken = True, False
        if timeout is not None:
            self._timer(me, timeout)
        self._switch(me)
        me.waiting = False
        return me.woken

    def wake(self, thread: SimThread) -> None:
        """End its wait, if it waits."""
        if thread.waiting and not thread.process.dead:
            thread.waiting, thread.woken = False, True
            thread.waits += 1
            self._runnable.append(thread)

    def _timer(self, thread: SimThread, seconds: float) -> None:
        # Among those of one moment, chance decides.
        entry = (self.now + max(0.0, seconds), self.rng.random(), next(self._order), thread, thread.waits)
        heapq.heappush(self._timers, entry)

    def _switch(self, me: SimThread) -> None:
        following = self._next()
        if following is not me:
            self.current = following
            following.carrier.baton.release()
            me.carrier.baton.acquire()
        if me.process.dead:
            raise Killed
        if me is self.main and self._stuck:
            stuck, self._stuck = self._stuck, ""
            raise Stuck(stuck)

    def _next(self) -> SimThread:
        self.steps += 1
        if self.steps > _STEPS_MAX:
            return self._give_up(f"{_STEPS_MAX} steps, and no end")
        while True:
            while self._timers and (self._timers[0][0] <= self.now or not self._runnable):
                when, _, _, thread, waits = heapq.heappop(self._timers)
                if thread.done or thread.waits != waits:
                    continue
                self.now = max(self.now, when)
                thread.waits += 1
                thread.waiting = False
                self._runnable.append(thread)
            if not self._runnable:
                return self._give_up("nobody can run, and nobody waits for a time")
            at = int(self.rng.random() * len(self._runnable)) if len(self._runnable) > 1 else 0
            self._runnable[at], self._runnable[-1] = self._runnable[-1], self._runnable[at]
            thread = self._runnable.pop()
            if thread.process.frozen_until <= self.now:
                return thread
            self._timer(thread, thread.process.frozen_until - self.now)

    def _give_up(self, why: str) -> SimThread:
        self._stuck = f"{why}\n{self.stacks()}"
        self.steps = 0
        if self.main in self._runnable:
            self._runnable.remove(self.main)
        self.main.waits += 1
        self.main.waiting = False
        return self.main


_running: Scheduler | None = None


def running() -> Scheduler:
    """The scheduler of the seed that runs."""
    assert _running is not None, "no simulation runs"
    return _running


def run_with(scheduler: Scheduler) -> None:
    """From now on `running` is this one."""
    global _running
    _running = scheduler
