"""What two servers share in the simulation: a catalogue and a bucket, models in memory that a network lies before.

Both have a process of their own. So what a server asked for is done also where that server dies meanwhile. It may be done late:
a transaction whose COMMIT nobody answered, or a request that was given up.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from simulation.scheduler import Process, SimThread, running
from simulation.threads import START_UNIX_NS, Future, Lock, SimpleQueue, Thread
from support.memory_blobs import Bucket, MemoryBlobs
from support.memory_catalogue import MemoryCatalogue
from support.memory_tables import Tables

from slotstream.store.records import SampleKey
from slotstream.wire.errors import Interrupted, IoError, VerdictUnknown

_T = TypeVar("_T")
_VERDICT_S = 20.0  # How long a server tries to find out what became of a transaction.
_LATE_S = 50.0  # A request that was given up arrives by then, or never.
_SIGNED_S = 60.0  # How long what was signed is taken, as `blobs/s3/requests.py` signs it.
_SIGNED = frozenset({"put", "part"})


class Engine:
    """What is wrong with a catalogue, or a bucket, and the way to it."""

    def __init__(self, name: str) -> None:
        self.process = Process(name)
        self.is_away = False
        self.loses = 0.0  # How likely the answer to a request is lost.
        self.slow = 1.0
        self.stalls_s = 0.0  # What a request that changes something takes at most: less than anybody waits for one.
        self._freezes: tuple[int, str, float, SimThread] | None = None

    def freeze_before(self, requests: int, whose: str, seconds: float, thread: SimThread) -> None:
        """Once so many requests have come from now, who makes the next stands still for so long, and `thread` is woken.

        `whose`: what the names of threads begin with whose requests count.
        """
        self._freezes = (requests, whose, seconds, thread)

    def freeze_nobody(self) -> None:
        self._freezes = None

    def _maybe_freeze(self) -> None:
        me = running().current
        if self._freezes is None or not me.name.startswith(self._freezes[1]):
            return
        left, whose, seconds, thread = self._freezes
        self._freezes = (left - 1, whose, seconds, thread)
        if left == 0:
            self._freezes = None
            me.process.frozen_until = running().now + seconds
            running().wake(thread)
            running().pause()

    def take_time(self) -> None:
        self._maybe_freeze()
        rng = running().rng
        running().pause(self.slow * (0.1 if rng.random() > 0.95 else 0.003) * rng.random())

    def spawn(self, name: str, run: Callable[[], object]) -> SimThread:
        return running().spawn(name, run, self.process)

    def kill(self) -> None:
        """What was under way is not done; another process takes its place."""
        running().kill(self.process)
        self.process = Process(self.process.name)


def _ended(thread: SimThread) -> None:
    """Waits for it, also where it is killed, which wakes nobody."""
    while not running().join(thread, 0.5):
        pass


class SimTables(Tables):
    """Through all servers' lives. Its clock is nobody else's: it never leaps."""

    def __init__(self) -> None:
        super().__init__(lambda: START_UNIX_NS + round(running().now * 1e9))
        self.lock: Any = nullcontext()  # One thread runs at a time.
        self.writing = Lock()  # The rows that a transaction has locked: all of them.
        self.engine = Engine("database")
        self.servers: list[SimCatalogue] = []

    def cut(self) -> None:
        """Every session ends: who led leads no more, and news on its way is lost."""
        self.leader = None
        for server in self.servers:
            server.is_deaf = True

    def mend(self) -> None:
        for server in self.servers:
            if server.is_deaf:
                server.listen_again()


class _Transaction:
    def __init__(self, tables: SimTables, run: Callable[[], Any], late_s: float, is_undone: bool) -> None:
        self.is_committed = False
        self.result: Any = None
        self.error: Exception | None = None
        self._tables, self._run = tables, run
        self._late_s, self._is_undone = late_s, is_undone
        self.thread = tables.engine.spawn("transaction", self._transact)

    def _transact(self) -> None:
        with self._tables.writing:
            running().pause(self._late_s)
            if self._is_undone:
                return
            try:
                self.result = self._run()
            except Exception as error:
                self.error = error
            self.is_committed = True


class SimCatalogue(MemoryCatalogue):
    """One server's, in one of its lives: a thread writes, and one listens for news."""

    def __init__(self, tables: SimTables) -> None:
        super().__init__(tables)
        self._tables: SimTables = tables
        self._engine = tables.engine
        self._asked: SimpleQueue[Any] = SimpleQueue()
        self._news: SimpleQueue[Any] = SimpleQueue()
        self._listeners: list[Callable[[SampleKey | None], None]] = []
        self.is_deaf = False
        self._thread: Any = Thread(target=self._write_forever, name="catalogue")
        self._ear: Any = Thread(target=self._listen, name="news")
        self._thread.start()
        self._ear.start()
        tables.servers.append(self)

    @property
    def writer(self) -> Any:
        return self._thread

    def hang_up(self) -> None:
        """Its process is gone: so are its sessions."""
        if self in self._tables.servers:
            self._tables.servers.remove(self)
        if self._tables.leader is self:
            self._tables.leader = None

    def close(self, *, clean: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        self._asked.put(None)
        self._news.put(None)
        self._thread.join()
        self._ear.join()
        self.hang_up()

    # Writing.

    def _do(self, run: Callable[[], _T], key: SampleKey | None = None, *, is_commit: bool = False) -> Future[_T]:
        future: Future[_T] = Future()
        if self._closed:
            future.set_exception(Interrupted("the catalogue is closed"))
        else:
            self._asked.put((lambda: self._transact(run, key), future, is_commit))
        return future

    def _write_forever(self) -> None:
        while (asked := self._asked.get()) is not None:
            run, future, is_commit = asked
            try:
                done = self._until_known(run, is_commit)
            except (IoError, VerdictUnknown) as error:
                future.set_exception(error)
                continue
            if done.error is not None:
                future.set_exception(done.error)
            else:
                future.set_result(done.result)

    def _until_known(self, run: Callable[[], Any], is_commit: bool) -> _Transaction:
        """As with PostgreSQL: done again, a transaction waits for the one before, and knows if that is committed."""
        scheduler, began = running(), running().now
        before: _Transaction | None = None
        while True:
            self._engine.take_time()
            if self._engine.is_away:
                if before is None:
                    raise IoError("the catalogue cannot be reached")
                if scheduler.now - began > _VERDICT_S:
                    error = "the catalogue went away at a commit, and did not come back in time to tell"
                    raise VerdictUnknown(error) if is_commit else IoError(error)
                scheduler.pause(0.2)
                continue
            if before is not None:
                _ended(before.thread)
                if before.is_committed:
                    return before
            is_lost = scheduler.rng.random() < self._engine.loses
            late_s = 5.0 * scheduler.rng.random() if is_lost else 0.002 * self._engine.slow
            before = _Transaction(self._tables, run, late_s, is_lost and scheduler.rng.random() < 0.3)
            if is_lost:
                scheduler.note("a COMMIT is not answered")
                self._not_answered(before, is_commit)
                continue
            _ended(before.thread)
            if before.is_committed:
                return before

    def _not_answered(self, before: _Transaction, is_commit: bool) -> None:
        """Half of the time nothing else is, either, until this server gave up."""
        if running().rng.random() < 0.5:
            running().pause(_VERDICT_S)

    def _transact(self, run: Callable[[], _T], key: SampleKey | None) -> _T:
        before = self._standing(key)
        result = run()
        if key is not None and self._standing(key) != before:
            for server in self._tables.servers:
                if not server.is_deaf:
                    server._news.put((key,))
        return result

    # Reading.

    def _ask(self, question: Callable[[], _T]) -> _T:
        if self._closed:
            raise Interrupted("the catalogue is closed")
        self._engine.take_time()
        if self._engine.is_away:
            raise IoError("the catalogue cannot be reached")
        return question()

    def watch(self, told: Callable[[SampleKey | None], None]) -> None:
        self._listeners.append(told)
        self._news.put((None,))

    def listen_again(self) -> None:
        self.is_deaf = False
        self._news.put((None,))

    def _listen(self) -> None:
        while (news := self._news.get()) is not None:
            self._engine.take_time()
            for told in self._listeners:
                told(*news)


class SimBucket(Bucket):
    """Through all servers' lives."""

    def __init__(self) -> None:
        super().__init__()
        self.lock: Any = nullcontext()  # One thread runs at a time.
        self.engine = Engine("bucket")


class SimBlobs(MemoryBlobs):
    """One server's way to the bucket."""

    def __init__(self, bucket: SimBucket, part_bytes: int) -> None:
        super().__init__(bucket, lambda bytes_max: part_bytes)
        self._engine = bucket.engine

    def _do(self, request: Callable[[], None], what: str) -> None:
        engine, rng = self._engine, running().rng
        signed_at = running().now
        engine.take_time()
        if what in _SIGNED and running().now - signed_at > _SIGNED_S:
            raise IoError("the object store takes no URL that was signed so long ago")
        if engine.stalls_s:
            running().pause(engine.stalls_s * rng.random())
        if engine.is_away:
            raise IoError("the object store does not answer")
        if rng.random() < engine.loses:
            fate = rng.choice(("lost", "done", "late", "repeated", "repeated"))
            running().note(f"bucket {what}: {fate}")
            if fate in ("late", "repeated"):
                engine.spawn("late", lambda: self._late(request))
            elif fate == "done":
                request()
            if fate != "repeated":
                raise IoError("the object store does not answer")
        # From here on it is the store's: a server that dies takes nothing back.
        thread = engine.spawn("request", lambda: self._now(request))
        _ended(thread)
        running().note(f"bucket {what}")

    def _late(self, request: Callable[[], None]) -> None:
        running().pause(_LATE_S * running().rng.random())
        request()

    def _now(self, request: Callable[[], None]) -> None:
        running().pause(0.002 * self._engine.slow * running().rng.random())
        request()

    def _ask(self, what: str) -> None:
        self._engine.take_time()
        if self._engine.is_away or running().rng.random() < self._engine.loses / 4:
            raise IoError("the object store does not answer")
