"""Rows that do not exist yet: what the pump does while the device still computes a step that was posted long ago."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.late_copies import Reads, put_off
from support.waiting import wait_until
from support.worker_rig import Rig, WatchedSink, make_rig

from slotstream.connector.sending import inbox
from slotstream.connector.sending.inbox import BESIDE_THE_ENGINE, Inbox, Looks, RowBatch
from slotstream.connector.sending.row_check import NotedRows
from slotstream.transport.base import Acked, Committed, Failed, RowChunk
from slotstream.v1 import ingest_pb2


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """See `put_off`."""
    return put_off(monkeypatch)


class _LateSink(WatchedSink):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[RowChunk] = []

    def submit(self, chunk: RowChunk) -> None:
        self.chunks.append(chunk)

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        self.samples[request.sample].committed = request

    def answer(self, chunk: RowChunk) -> None:
        self._on_event(Acked((chunk.chunk,)))
        self._on_event(Committed(chunk.sample, duplicate=False))


def _in_use(rig: Rig) -> int:
    return int(rig.worker._sender._pool.in_use)


def test_answers_of_the_server_free_staging_while_rows_do_not_exist_yet(reads: Reads) -> None:
    reads.hold = {2}
    rig = make_rig(sink=_LateSink())
    try:
        rig.capture("now", 8)
        wait_until(lambda: len(rig.sink.chunks) == 1)
        rig.capture("next step", 8)
        rig.capture("the one after", 8)
        assert _in_use(rig) == 3
        rig.sink.answer(rig.sink.chunks[0])
        wait_until(lambda: _in_use(rig) == 2)
        assert [chunk.sample for chunk in rig.sink.chunks] == [1]  # What the engine said stays in order.
        reads.release(2)
        wait_until(lambda: len(rig.sink.chunks) == 3)
        assert [chunk.sample for chunk in rig.sink.chunks] == [1, 2, 3]
        for chunk in rig.sink.chunks[1:]:
            rig.sink.answer(chunk)
        wait_until(lambda: _in_use(rig) == 0)
    finally:
        rig.worker.close()


def test_once_the_device_is_gone_what_it_has_not_read_fails_and_the_rest_is_stored(reads: Reads) -> None:
    reads.hold = {2}
    rig = make_rig()
    try:
        for req_id in ("before", "failed", "after"):
            rig.capture(req_id, 8)
        assert isinstance(rig.sink.verdict(1), Committed)
        rig.worker._sender.device_is_gone()
        for number in (2, 3):  # The device reads in order, so the third has not been read either.
            failed = rig.sink.verdict(number)
            assert isinstance(failed, Failed)
            assert failed.code == "INTERNAL"
        wait_until(lambda: _in_use(rig) == 0)
    finally:
        rig.worker.close()


def test_a_copy_that_never_ends_does_not_keep_the_engine_from_stopping(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.connector.reading.worker._CLOSE_S", 0.2)
    reads.hold = {1}
    rig = make_rig()
    rig.capture("a", 8)
    rig.worker.close()
    assert not rig.worker._sender._thread.is_alive()


class _Clock:
    """Time that passes only where somebody waits for a queue: how often that was, and who was waited for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wakes = 0
        self.items: list[object] = []

    def monotonic(self) -> float:
        return self.now

    def put(self, item: object) -> None:
        self.items.append(item)

    def get(self, timeout: float) -> object:
        if self.items:
            return self.items.pop(0)
        self.now += timeout
        self.wakes += 1
        raise queue.Empty

    def qsize(self) -> int:
        return len(self.items)


@pytest.mark.parametrize("pending_s", [0.0005, 0.008, 0.03, 0.06])
def test_beside_the_engine_a_thread_looks_at_most_twice_at_a_read_under_way(
    monkeypatch: pytest.MonkeyPatch, pending_s: float
) -> None:
    clock = _Clock()
    monkeypatch.setattr(inbox, "queue", SimpleNamespace(SimpleQueue=lambda: clock, Empty=queue.Empty))
    monkeypatch.setattr(inbox, "time", clock)
    waiting: Inbox[object] = Inbox(lambda: 1 if clock.now >= pending_s else 0, BESIDE_THE_ENGINE)
    batch = RowBatch((), 1, NotedRows(np.zeros(0, np.int64), 0, 1))
    waiting.put(batch)
    assert waiting.get(1.0) is batch
    in_vain = clock.wakes - 2  # The last but one found it over, and the last was its turn.
    assert in_vain <= 2
    assert clock.now < max(0.004, 5 * pending_s)


def test_the_engines_thread_has_a_read_that_is_over_taken_up_at_once() -> None:
    done = [0]
    waiting: Inbox[object] = Inbox(lambda: done[0], Looks(3600.0, 1.0))  # Nobody else looks.
    batch = RowBatch((), 1, NotedRows(np.zeros(0, np.int64), 0, 1))
    waiting.put(batch)
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(waiting.get(3600.0)), daemon=True)
    thread.start()
    wait_until(lambda: waiting._awaited == 1)
    waiting.look()
    assert not waiting._arrived.qsize()
    done[0] = 1
    waiting.look()
    waiting.look()
    thread.join(30)
    assert taken == [batch]
    assert not waiting._arrived.qsize()  # It was told once.
