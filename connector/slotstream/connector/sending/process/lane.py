"""One stream of a sender in a process of its own, as the sender sees it: a `SampleSink`. See `lane_main` for the other end."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from google.protobuf.message import Message

from slotstream.connector.sending.process.lane_messages import (
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
from slotstream.transport.base import LinkDown, LinkUp, RowChunk, SinkEvent
from slotstream.transport.logs import connector_logger
from slotstream.transport.spread import Spread
from slotstream.v1 import ingest_pb2
from slotstream.wire.errors import InternalFault
from slotstream.wire.nixl import memory_address

logger = connector_logger(__name__)

_RETRY_S, _RETRY_S_MAX = 0.25, 30.0  # Between two starts; twice as long after each that came to nothing.
_SILENT_S = 15.0  # Without a word for so long the process is taken for hung.
_WAIT_S = 10.0  # At a time, for a server that takes this stream.
_CALLS_MAX = 256  # In one message.


class _Process:
    """One process, and what it is told, by a thread of its own: nobody who calls waits for it."""

    def __init__(self, setup: LaneSetup, memory_fd: int) -> None:
        """Raises OSError where it cannot be started."""
        self.connection, theirs = Pipe()
        fds = (theirs.fileno(), memory_fd)
        command = [sys.executable, "-P", "-m", "slotstream.connector.sending.process.lane_main", *map(str, fds)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL)
        self.heard_at = time.monotonic()
        self._calls: queue.SimpleQueue[ToLane | None] = queue.SimpleQueue()
        self._teller = threading.Thread(target=self._run, args=(setup,), name="slotstream-teller", daemon=True)
        self._teller.start()

    def tell(self, call: ToLane) -> None:
        """One call more, in order."""
        self._calls.put(call)

    def end(self, timeout_s: float) -> None:
        """Return once the process is gone, killed if need be."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._calls.put(None)
        self._teller.join(1.0)
        self.connection.close()

    def _run(self, setup: LaneSetup) -> None:
        try:
            say(self.connection, setup)
            while True:
                calls = [self._calls.get()]
                calls += [self._calls.get() for _ in range(min(self._calls.qsize(), _CALLS_MAX))]
                say(self.connection, [call for call in calls if call is not None])
                if None in calls:
                    return
        except OSError:
            return  # It is gone.


class LaneProcess:
    """A `SampleSink`. When the process ends by itself that is a LinkDown, and another one is started."""

    def __init__(self, setup: LaneSetup, memory_fd: int, spread: Spread) -> None:
        self._setup, self._memory_fd, self._spread = setup, memory_fd, spread
        self._base = 0  # Where staging begins here.
        self._on_event: Callable[[SinkEvent], None] = lambda event: None
        self._child: _Process | None = None
        self._was_up = False  # Between its LinkUp and a LinkDown.
        self._closed = threading.Event()
        self._reset = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slotstream-lane", daemon=True)

    def use_staging(self, memory: memoryview, slot_bytes: int) -> None:
        self._base = memory_address(memory)

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        self._on_event = on_event
        self._thread.start()

    def open_sample(self, request: ingest_pb2.OpenSample) -> None:
        self._call("open_sample", request)

    def submit(self, chunk: RowChunk) -> None:
        at = memory_address(chunk.buffer) - self._base
        self._tell(LaneChunk(chunk.sample, chunk.chunk, chunk.first_row, chunk.rows, at, chunk.buffer.nbytes, chunk.xxh3))

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        self._call("commit", request)

    def abort(self, request: ingest_pb2.AbortSample) -> None:
        self._call("abort", request)

    def report(self, report: ingest_pb2.EngineReport) -> None:
        self._call("report", report)

    def check_deadlines(self) -> None:
        child = self._child
        if child is not None and time.monotonic() - child.heard_at > _SILENT_S:
            logger.warning("slotstream: the process of stream %d says nothing: it is killed", self._setup.stream)
            child.process.kill()
        self._call("check_deadlines")

    def reset(self) -> None:
        self._reset.set()
        self._call("reset")

    def close(self, timeout_s: float) -> None:
        self._closed.set()
        self._reset.set()
        self._spread.wake()
        self._tell(LaneClose(timeout_s))
        if self._thread.is_alive():
            self._thread.join(timeout_s + HEARTBEAT_S)
        if (child := self._child) is not None:
            child.end(0.0)

    def _call(self, method: str, message: Message | None = None) -> None:
        self._tell(LaneCall(method, b"" if message is None else message.SerializeToString()))

    def _tell(self, call: ToLane) -> None:
        """To nobody where there is no process: then the stream is down, or about to be said so."""
        child = self._child
        if child is not None:
            child.tell(call)

    # -- our thread: start a process, hear what it says, start the next one

    def _run(self) -> None:
        retry_s = _RETRY_S
        stream = self._setup.stream
        while not self._closed.is_set():
            if not self._spread.may_connect(stream):
                self._spread.wait(stream, self._closed.is_set, _WAIT_S)
                continue
            was_up, why = self._one_process()
            self._spread.ended(stream)
            if self._closed.is_set():
                return
            logger.warning("slotstream: the process of stream %d ended: %s", stream, why)
            if self._was_up:
                self._was_up = False
                self._reset.clear()  # Until then nothing of the old stream may reach a new one.
                self._on_event(LinkDown(f"the process of stream {stream} ended", InternalFault.code))
                self._reset.wait()
            retry_s = _RETRY_S if was_up else min(2 * retry_s, _RETRY_S_MAX)
            self._closed.wait(retry_s)

    def _one_process(self) -> tuple[bool, str]:
        """Run one process to its end: whether its stream was ever up, and why it ended."""
        was_up = False
        try:
            child = self._child = _Process(self._setup, self._memory_fd)
        except OSError as error:
            return False, f"it cannot be started: {error}"
        try:
            if self._closed.is_set():  # Just now: `close` told nobody.
                child.tell(LaneClose(0.0))
            while True:
                news = hear(child.connection)
                child.heard_at = time.monotonic()
                for one in news:
                    self._take(child, one)
                    was_up |= isinstance(one, LinkUp)
        except (EOFError, OSError):
            self._child = None
            child.end(1.0)
            return was_up, f"exit code {child.process.returncode}"

    def _take(self, child: _Process, news: Any) -> None:
        if isinstance(news, LogLine):
            logging.getLogger(news.logger).log(news.level, "%s", news.text)
        elif isinstance(news, Met):
            welcome = ingest_pb2.Welcome(processes=news.processes, process=news.process)
            child.tell(Settled(self._spread.settles(self._setup.stream, welcome)))
        elif isinstance(news, Left):
            self._spread.ended(self._setup.stream)
        else:
            if isinstance(news, LinkUp | LinkDown):
                self._was_up = isinstance(news, LinkUp)
            self._on_event(news)
