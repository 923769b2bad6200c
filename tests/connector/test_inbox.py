"""Rows that do not exist yet: what the pump does while the device still computes a step that was posted long ago."""

from __future__ import annotations

import pytest
from support.late_copies import Copy, put_off
from support.waiting import wait_until
from support.worker_rig import Rig, WatchedSink, make_rig

from slotstream.transport.base import Acked, Committed, Failed, StagedChunk
from slotstream.v1 import ingest_pb2


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> dict[int, Copy]:
    """See `put_off`."""
    return put_off(monkeypatch)


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


def _in_use(rig: Rig) -> int:
    return int(rig.worker._sender._pool.in_use)


def test_answers_of_the_server_free_staging_while_rows_do_not_exist_yet(copies: dict[int, Copy]) -> None:
    copies[2] = Copy()
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


def test_a_copy_that_fails_fails_its_samples_and_no_other(copies: dict[int, Copy]) -> None:
    copies[2] = Copy()
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
    copies: dict[int, Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotstream.connector.reading.worker._CLOSE_S", 0.2)
    copies[1] = Copy()
    rig = make_rig()
    rig.capture("a", 8)
    rig.worker.close()
    assert not rig.worker._sender._thread.is_alive()
