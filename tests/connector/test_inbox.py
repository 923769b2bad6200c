"""Rows that do not exist yet: what the pump does while the device still computes a step that was posted long ago."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from support.waiting import wait_until
from support.worker_rig import Rig, WatchedSink, make_rig

from slotstream.connector.copies import Gathered, Slots
from slotstream.connector.gather import Destination, RowGather
from slotstream.transport.base import Acked, Committed, Failed, StagedChunk
from slotstream.v1 import ingest_pb2


@dataclass(frozen=True)
class _Late:
    """Rows that are in staging once `copy` says so."""

    rows: Gathered
    copy: _Copy

    @property
    def is_done(self) -> bool:
        return self.copy.is_done

    def wait(self) -> None:
        self.copy.wait()

    def peaks(self) -> npt.NDArray[np.float32]:
        return self.rows.peaks()


class _Copy:
    """A copy that ends when it is told to, or fails: `error` is what the device says then."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.ended.is_set()

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        assert self.ended.is_set(), "the pump was to do something else meanwhile"


class _LateSink(WatchedSink):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[StagedChunk] = []

    def submit(self, chunk: StagedChunk) -> None:
        self.chunks.append(chunk)

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        self.samples[request.sample].committed = request

    def answer(self, chunk: StagedChunk) -> None:
        self._on_event(Acked((chunk.chunk,)))
        self._on_event(Committed(chunk.sample, duplicate=False))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> dict[int, _Copy]:
    """Copies of gathers that are to be under way, by the number of the gather."""
    pending: dict[int, _Copy] = {}
    gather, done = RowGather.gather, [0]

    def slow(self: RowGather, slots: Slots, destinations: Sequence[Destination], scratch: int | None) -> Gathered:
        gathered = gather(self, slots, destinations, scratch)
        done[0] += 1
        copy = pending.get(done[0])
        return gathered if copy is None else _Late(gathered, copy)

    monkeypatch.setattr(RowGather, "gather", slow)
    return pending


def _in_use(rig: Rig) -> int:
    return rig.worker._sender._pool.in_use


def test_answers_of_the_server_free_staging_while_rows_do_not_exist_yet(copies: dict[int, _Copy]) -> None:
    copies[2] = _Copy()
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
        copies[2].ended.set()
        wait_until(lambda: len(rig.sink.chunks) == 3)
        assert [chunk.sample for chunk in rig.sink.chunks] == [1, 2, 3]
        for chunk in rig.sink.chunks[1:]:
            rig.sink.answer(chunk)
        wait_until(lambda: _in_use(rig) == 0)
    finally:
        rig.worker.close()


def test_a_copy_that_fails_fails_its_samples_and_no_other(copies: dict[int, _Copy]) -> None:
    copies[2] = _Copy()
    rig = make_rig()
    try:
        for req_id in ("before", "failed", "after"):
            rig.capture(req_id, 8)
        assert isinstance(rig.sink.verdict(1), Committed)
        copies[2].error = RuntimeError("the device is lost")
        failed = rig.sink.verdict(2)
        assert isinstance(failed, Failed)
        assert failed.code == "INTERNAL"
        assert isinstance(rig.sink.verdict(3), Committed)
        assert _in_use(rig) == 0
    finally:
        rig.worker.close()


def test_a_copy_that_never_ends_does_not_keep_the_engine_from_stopping(
    copies: dict[int, _Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotstream.connector.worker._CLOSE_S", 0.2)
    copies[1] = _Copy()
    rig = make_rig()
    rig.capture("a", 8)
    rig.worker.close()
    assert not rig.worker._sender._thread.is_alive()
