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
    Alive,
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

_RETRY_S, _RETRY_S_MAX = 0.25, 30.0  # Between two starts; twice as long after each process that did not last.
_START_S = 60.0
_SILENT_S = 15.0  # Without a word for so long the process is taken for hung,
_GRACE_S = 2.0  # unless it was us who stood still.
_END_S = 1.0
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
            try:
                self.process = subprocess.Popen(command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL)
            except OSError:
                self.connection.close()
                raise
        self.began = time.monotonic()
        self.dismissed = False  # We told it to end.
        self._calls: queue.SimpleQueue[ToLane | None] = queue.SimpleQueue()
        self._teller = threading.Thread(target=self._run, args=(setup,), name="slotstream-teller", daemon=True)
        self._teller.start()

    def tell(self, call: ToLane) -> None:
        """One call more, in order."""
        self._calls.put(call)

    def dismiss(self, timeout_s: float) -> None:
        """Tell it to end within this time."""
        self.dismissed = True
        self._calls.put(LaneClose(timeout_s))

    def end(self) -> None:
        """Return once the process is gone, killed if need be. Only who hears it calls this."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self._wait_for_killed()
        self._calls.put(None)
        self._teller.join(_END_S)
        self.connection.close()

    def _wait_for_killed(self) -> None:
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # The kernel still holds it: it executes nothing of its own any more.
            logger.warning("slotstream: the process %d was killed, and is not gone yet", self.process.pid)

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
        self._is_up = False  # Between a LinkUp and its LinkDown.
        self._closed = threading.Event()
        self._reset = threading.Event()  # Every LinkDown has had its `reset`.
        self._reset.set()
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
        self._call("check_deadlines")

    def reset(self) -> None:
        self._call("reset")
        self._reset.set()

    def close(self, timeout_s: float) -> None:
        self._closed.set()
        self._spread.wake()
        if (child := self._child) is not None:
            child.dismiss(timeout_s)
        if self._thread.is_alive():
            self._thread.join(timeout_s + HEARTBEAT_S)
        if self._thread.is_alive() and (child := self._child) is not None:
            child.process.kill()
            self._thread.join(HEARTBEAT_S)

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
            lasted_s = self._one_process()
            self._spread.ended(stream)
            if self._closed.is_set():
                return
            if self._is_up:
                self._say(LinkDown(f"the process of stream {stream} ended", InternalFault.code))
            # What is said before a `reset` is of the old stream: none of it may reach a new process.
            while not (self._reset.wait(HEARTBEAT_S) or self._closed.is_set()):
                pass
            if lasted_s > _RETRY_S_MAX:
                retry_s = _RETRY_S
            self._closed.wait(retry_s)
            retry_s = min(2 * retry_s, _RETRY_S_MAX)

    def _one_process(self) -> float:
        """Run one process to its end; for how many seconds it ran."""
        stream = self._setup.stream
        try:
            child = self._child = _Process(self._setup, self._memory_fd)
        except OSError as error:
            logger.warning("slotstream: the process of stream %d cannot be started: %s", stream, error)
            return 0.0
        if self._closed.is_set():  # Just now: `close` saw no process to dismiss.
            child.dismiss(0.0)
        try:
            self._hear(child)
        except (EOFError, OSError):
            pass
        except Exception:  # Our own bug costs this stream, and nothing that is on it.
            logger.exception("slotstream: what the process of stream %d says could not be heard", stream)
            child.process.kill()
        self._child = None
        child.end()
        if not child.dismissed:
            logger.warning("slotstream: the process of stream %d ended (%s)", stream, child.process.returncode)
        return time.monotonic() - child.began

    def _hear(self, child: _Process) -> None:
        """Returns, or raises EOFError or OSError, once there is no more to hear."""
        patience_s = _START_S
        while True:
            if not (child.connection.poll(patience_s) or child.connection.poll(_GRACE_S)):
                stream = self._setup.stream
                logger.warning("slotstream: the process of stream %d said nothing for %g s: it is killed", stream, patience_s)
                child.process.kill()
                return
            for news in hear(child.connection):
                self._take(child, news)
            patience_s = _SILENT_S

    def _take(self, child: _Process, news: Any) -> None:
        if isinstance(news, Alive):
            return
        if isinstance(news, LogLine):
            logging.getLogger(news.logger).log(news.level, "%s", news.text)
        elif isinstance(news, Met):
            self._met(child, news)
        elif isinstance(news, Left):
            self._spread.ended(self._setup.stream)
        else:
            self._say(news)

    def _met(self, child: _Process, met: Met) -> None:
        stream = self._setup.stream
        welcome = ingest_pb2.Welcome(processes=met.processes, process=met.process)
        child.tell(Settled(met.number, self._spread.settles(stream, welcome)))
        if not self._spread.may_connect(stream):  # A server of an earlier version, which takes one stream.
            child.dismiss(0.0)

    def _say(self, event: SinkEvent) -> None:
        if isinstance(event, LinkUp | LinkDown):
            self._is_up = isinstance(event, LinkUp)
        if isinstance(event, LinkDown):
            self._reset.clear()
        if not self._closed.is_set():
            self._on_event(event)
