"""The sender process: a pump and its transport beside the engine's worker, over staging that both have mapped.

Nothing it does takes the lock of the worker's interpreter. It ends when it is told to, or when the worker is gone; then
what was handed over whole is still sent, for some seconds. `python -m slotstream.connector.sending.process.main` is what
`handle` starts: it is not for the command line.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection

from slotstream.connector.counters import Counters
from slotstream.connector.faults import SampleFault
from slotstream.connector.sending.inbox import IN_A_PROCESS_OF_ITS_OWN, RowBatch
from slotstream.connector.sending.process.lane import LaneProcess
from slotstream.connector.sending.process.lane_messages import LaneSetup
from slotstream.connector.sending.process.messages import (
    HEARTBEAT_S,
    Close,
    Lent,
    LogLine,
    Refused,
    Setup,
    Started,
    Update,
    hear,
    say,
)
from slotstream.connector.sending.pump import Pump
from slotstream.connector.sending.sinks import sinks_for
from slotstream.connector.sending.staging_area import LeaseRing, map_staging
from slotstream.connector.sending.staging_pool import StagingPool
from slotstream.transport.base import SampleSink
from slotstream.transport.logs import CONNECTOR_LOGGER
from slotstream.transport.nixl import sends_frames
from slotstream.transport.spread import Spread
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import ConfigError

_SAY_S = 0.1  # How long news waits for more: that something failed, or a line of the log.
_SAY_REST_S = 0.5  # What ended well, and counts. To hear of it takes the lock of the worker's interpreter from vLLM's thread.
_LINES_MAX = 1000
_ORPHAN_S = 5.0  # For what is on its way when the worker is gone.


def main(items_fd: int, leases_fd: int, memory_fd: int) -> int:
    """Serve one worker until it is done; the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # They are sent to whole groups of processes; the worker says when to end.
    items, leases = Connection(items_fd), Connection(leases_fd)
    setup: Setup = hear(items)
    log = _Log(setup.log_level)
    counters = Counters()
    try:
        area = map_staging(setup.shape, memory_fd)
        sinks = _sinks(setup, memory_fd)
        for sink in sinks:
            sink.use_staging(area.slots, setup.shape.slot_bytes)
        pool = StagingPool(area.slots, setup.shape)
        ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        pump = Pump(setup.config, pool, area, sinks, counters, ended.put, IN_A_PROCESS_OF_ITS_OWN)
        desk = _Desk(pool, pump, area.lending(setup.first_turn), leases)
        pump.lent_bytes = lambda: desk.held_bytes
        pump.start()
    except (ConfigError, OSError) as error:
        say(items, Refused(str(error)))
        return 1
    say(items, Started())
    news = _News(items, pump, counters, ended, log)
    timeout_s = _take_items(items, setup.worker_pid, pump, desk)
    pump.close(timeout_s)
    news.close()
    return 0


def _sinks(setup: Setup, memory_fd: int) -> list[SampleSink]:
    """One a lane. Those of several streams that send frames have a process each: they would wait for one interpreter here."""
    options, hello = setup.config.options, ingest_pb2.Hello.FromString(setup.hello)
    if options.streams == 1 or not sends_frames(options.transport, options.servers):
        return sinks_for(options, hello)
    spread = Spread(options.streams)
    lanes = [LaneSetup(options, setup.hello, setup.shape, stream, setup.log_level) for stream in range(options.streams)]
    return [LaneProcess(lane, memory_fd, spread) for lane in lanes]


def _take_items(connection: Connection, worker_pid: int, pump: Pump, desk: _Desk) -> float:
    """Returns once the worker says so, or is gone: how long what is on its way may take."""
    try:
        while True:
            if not connection.poll(HEARTBEAT_S):
                if os.getppid() != worker_pid:  # The connection outlives it where it has forked.
                    pump.device_is_gone()
                    return _ORPHAN_S
                continue
            message = hear(connection)
            if isinstance(message, Close):
                return message.timeout_s
            for item in message:
                if isinstance(item, RowBatch):
                    desk.took(len(item.slots))
                pump.post(item)
    except (EOFError, OSError):
        pump.device_is_gone()
        return _ORPHAN_S


class _Desk:
    """Where the worker gets staging: some is lent ahead, so that it seldom has to ask, and more ahead whenever it did."""

    def __init__(self, pool: StagingPool, pump: Pump, ring: LeaseRing, connection: Connection) -> None:
        self._pool = pool
        self._pump = pump
        self._ring = ring
        self._connection = connection
        self._lock = threading.Lock()
        self._ahead = max(1, pool.num_slots // 4)
        self._held = 0
        self._asked = False
        ring.clear()
        pool.on_free = self._lend_ahead
        self._lend_ahead()
        threading.Thread(target=self._run, name="slotstream-leases", daemon=True).start()

    @property
    def held_bytes(self) -> int:
        """Of the slots that the worker has, and that hold no rows which we know of."""
        return self._held * self._pool.slot_bytes

    def took(self, slots: int) -> None:
        """A read came in so many slots."""
        with self._lock:
            self._held -= slots
        self._lend_ahead()

    def _lend_ahead(self) -> None:
        with self._lock:
            missing = self._ahead - self._ring.stock
            if self._asked or missing <= 0:
                return  # One that asks for many at once would never get them if they went one by one.
            slots = self._pool.acquire_free(missing)
            short = self._ahead // 2 - self._ring.stock - len(slots)
            if short > 0 and (kept := min(short, self._pool.kept)):  # Sooner than that the worker has to ask.
                slots += self._pool.acquire(kept, deadline=0.0, keep_waiting=bool) or []
            self._lend(slots)

    def _run(self) -> None:
        try:
            while True:
                want = hear(self._connection)
                with self._lock:
                    self._asked = True
                    # Counted here: what was lent ahead meanwhile may be more than leaves room for what the worker lacked.
                    missing = max(0, want.count - self._ring.stock)
                slots = self._pump.lease(missing, want.deadline)
                with self._lock:
                    self._ahead = min(self._ahead + missing, max(1, self._pool.num_slots // 2))
                    self._lend(slots or [])
                    self._asked = False
                say(self._connection, Lent(self._pump.why_full() if slots is None else None))
                self._lend_ahead()
        except (EOFError, OSError):  # The worker is gone, which would have used them.
            return

    def _lend(self, slots: list[int]) -> None:
        self._held += len(slots)
        self._ring.lend(slots)


class _Log(logging.Handler):
    """Collects log lines."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self._lines: list[LogLine] = []
        logger = logging.getLogger(CONNECTOR_LOGGER)
        logger.addHandler(self)
        logger.setLevel(level)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) < _LINES_MAX:  # Callers hold the handler's lock.
            self._lines.append(LogLine(record.name, record.levelno, self.format(record)))

    def take(self) -> list[LogLine]:
        """The lines since the last call."""
        self.acquire()
        taken, self._lines = self._lines, []
        self.release()
        return taken


class _News:
    """Tells the worker what happened, about as often as it does."""

    def __init__(
        self, connection: Connection, pump: Pump, counters: Counters, ended: queue.SimpleQueue[str], log: _Log
    ) -> None:
        self._connection = connection
        self._pump = pump
        self._counters = counters
        self._ended = ended
        self._log = log
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slotstream-news", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say what is left to be said."""
        self._closing.set()
        self._thread.join(HEARTBEAT_S)

    def _run(self) -> None:
        quiet_s = 0.0
        ended: list[str] = []
        faults: list[SampleFault] = []
        lines: list[LogLine] = []
        try:
            while True:
                closing = self._closing.wait(_SAY_S)
                quiet_s += _SAY_S
                ended += [self._ended.get() for _ in range(self._ended.qsize())]  # First: why one failed is never behind it.
                faults += self._pump.take_faults()
                lines += self._log.take()
                has_rest = quiet_s >= _SAY_REST_S and (ended or self._counters)
                if faults or lines or has_rest or closing or quiet_s >= HEARTBEAT_S:
                    counts, pump = self._counters.take(), self._pump
                    say(self._connection, Update(ended, faults, counts, pump.gauges(), pump.server, lines))
                    quiet_s, ended, faults, lines = 0.0, [], [], []
                if closing:
                    return
        except OSError:
            return


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
