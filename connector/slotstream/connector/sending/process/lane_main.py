"""The process that carries one stream of a sender. `lane` starts it and speaks to it; staging is mapped in both.

Every frame of gRPC goes through Python, of which a process does one thing at a time: several streams of one process send hardly
more than one (docs/costs.md).
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from slotstream.connector.sending.process.lane_messages import (
    Alive,
    FromLane,
    LaneCall,
    LaneChunk,
    LaneClose,
    LaneSetup,
    Left,
    Met,
    Settled,
    ToLane,
)
from slotstream.connector.sending.process.messages import HEARTBEAT_S, LogLine, hear, say
from slotstream.connector.sending.staging_area import map_staging
from slotstream.transport.base import RowChunk
from slotstream.transport.grpc import GrpcSink
from slotstream.transport.logs import CONNECTOR_LOGGER, connector_logger
from slotstream.transport.spread import Spread
from slotstream.transport.targets import Targets
from slotstream.v1 import ingest_pb2

logger = connector_logger("slotstream.connector.sending.process.lane_main")  # This module's __name__ is another here.

_ANSWER_S = 10.0
_LINES_MAX = 1000  # Of the log, that wait to be said.


class _News:
    """Tells the sender what happened, in order. A thread of its own waits for the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: queue.SimpleQueue[FromLane | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="slotstream-news", daemon=True)
        self._thread.start()

    def add(self, news: FromLane) -> None:
        """One thing more; never waits."""
        self._waiting.put(news)

    def add_line(self, line: LogLine) -> None:
        """A line of the log; of those there may be too many."""
        if self._waiting.qsize() < _LINES_MAX:
            self._waiting.put(line)

    def close(self) -> None:
        """Returns once everything is said."""
        self._waiting.put(None)
        self._thread.join(HEARTBEAT_S)

    def _run(self) -> None:
        try:
            while True:
                news = [self._waiting.get()]
                news += [self._waiting.get() for _ in range(self._waiting.qsize())]
                say(self._connection, [one for one in news if one is not None])
                if None in news:
                    return
        except OSError:
            return  # The sender is gone.


class _AskedSpread(Spread):
    """The sender's, asked over the connection. Only a server that takes this stream is connected to from here."""

    def __init__(self, streams: int, news: _News) -> None:
        super().__init__(streams)
        self._news = news
        self._met = 0
        self.answers: queue.SimpleQueue[Settled] = queue.SimpleQueue()

    def may_connect(self, stream: int) -> bool:
        return True

    def settles(self, stream: int, welcome: ingest_pb2.Welcome) -> bool:
        self._met += 1
        self._news.add(Met(self._met, welcome.processes, welcome.process))
        until = time.monotonic() + _ANSWER_S
        try:
            while True:
                answer = self.answers.get(timeout=max(0.0, until - time.monotonic()))
                if answer.met == self._met:  # Others are answers that came too late.
                    return answer.stays
        except queue.Empty:  # The sender stands still.
            return False

    def ended(self, stream: int) -> None:
        self._news.add(Left())


class _Log(logging.Handler):
    """Hands lines of the log on."""

    def __init__(self, level: int, news: _News) -> None:
        super().__init__()
        self._news = news
        logger = logging.getLogger(CONNECTOR_LOGGER)
        logger.addHandler(self)
        logger.setLevel(level)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._news.add_line(LogLine(record.name, record.levelno, self.format(record)))


def main(connection_fd: int, memory_fd: int) -> None:
    """Serve one sender until it is done, or gone. Ends the process: what gRPC does at an exit has nothing left to save."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # They are sent to whole groups of processes; the sender says when to end.
    connection = Connection(connection_fd)
    news = _News(connection)
    code = 0
    try:
        setup: LaneSetup = hear(connection)
        _Log(setup.log_level, news)
        _serve(connection, setup, news, map_staging(setup.shape, memory_fd).slots)
    except (EOFError, ConnectionError):
        pass  # The sender is gone.
    except Exception:
        logger.exception("slotstream: the process of a stream failed")
        code = 1
    news.close()
    os._exit(code)


def _serve(connection: Connection, setup: LaneSetup, news: _News, slots: memoryview) -> None:
    options = setup.options
    spread = _AskedSpread(options.streams, news)
    hello = ingest_pb2.Hello.FromString(setup.hello)
    targets, patience_s = Targets(options.servers), options.ack_timeout_s
    sink = GrpcSink(targets, hello, access=options.access, ack_timeout_s=patience_s, spread=spread, stream=setup.stream)
    sink.start(news.add)
    calls: queue.SimpleQueue[ToLane] = queue.SimpleQueue()
    threading.Thread(target=_hear, args=(connection, spread, calls), name="slotstream-calls", daemon=True).start()
    alive_at = 0.0
    while True:
        if (now := time.monotonic()) >= alive_at:  # From this thread: one that hangs must not pass for alive.
            alive_at = now + HEARTBEAT_S
            news.add(Alive())
        try:
            call = calls.get(timeout=HEARTBEAT_S)
        except queue.Empty:
            continue
        if isinstance(call, LaneClose):
            sink.close(call.timeout_s)
            return
        _do(sink, slots, call)


def _hear(connection: Connection, spread: _AskedSpread, calls: queue.SimpleQueue[ToLane]) -> None:
    """On a thread of its own: an answer must reach the stream that waits for it while a call waits for that stream."""
    try:
        while True:
            for call in hear(connection):
                if isinstance(call, Settled):
                    spread.answers.put(call)
                else:
                    calls.put(call)
    except (EOFError, OSError):
        os._exit(0)  # At once: whoever has staging next does not know that we read it.
    except Exception:
        logger.exception("slotstream: what the sender says could not be heard")
        calls.put(LaneClose(0.0))


_MESSAGES: dict[str, Any] = {
    "open_sample": ingest_pb2.OpenSample,
    "commit": ingest_pb2.CommitSample,
    "abort": ingest_pb2.AbortSample,
    "report": ingest_pb2.EngineReport,
}


def _do(sink: GrpcSink, slots: memoryview, call: ToLane) -> None:
    if isinstance(call, LaneChunk):
        buffer = slots[call.at : call.at + call.nbytes]
        sink.submit(RowChunk(call.sample, call.chunk, call.first_row, call.rows, buffer, call.xxh3))
    elif isinstance(call, LaneCall):
        method = getattr(sink, call.method)
        kind = _MESSAGES.get(call.method)
        if kind is None:
            method()
        else:
            method(kind.FromString(call.message))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
