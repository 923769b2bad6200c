"""What the pump does with samples whose link breaks, without a network: a sink that says what a test tells it to."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.files import files_below
from support.waiting import WAIT_S, wait_until
from support.worker_rig import BLOCKS, Rig, WatchedSink, cached_rows, make_rig, opened

from slotstream.connector.faults import SampleFault
from slotstream.connector.plan import SampleAbort, SampleFinish, StepPlan
from slotstream.connector.sending import failure_reports as reports
from slotstream.connector.sending.inbox import RowBatch
from slotstream.connector.sending.pump import Pump
from slotstream.connector.sending.sample_state import SampleState
from slotstream.connector.sending.spool import files as spool_files
from slotstream.connector.sending.spool.files import OwnedDir, SpooledSample, SpoolFile
from slotstream.connector.sending.spool.writer import SpoolWriter
from slotstream.transport.base import Acked, Committed, Failed, LinkDown, LinkUp, RowChunk
from slotstream.v1 import ingest_pb2


class _Sink(WatchedSink):
    """Takes and acks rows; `verdicts`: whether commits are answered. It may refuse samples as a full disk does."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts = True
        self.refuse: set[str] = set()
        self.draining = False
        self.opens: list[str] = []
        self.acked = threading.Semaphore(0)

    def open_sample(self, request: ingest_pb2.OpenSample) -> None:
        super().open_sample(request)
        self.opens.append(request.sample_id)

    def submit(self, chunk: RowChunk) -> None:
        if self.samples[chunk.sample].opened.sample_id in self.refuse:
            self._on_event(Acked((chunk.chunk,)))
        else:
            super().submit(chunk)
        self.acked.release()

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        if self.samples[request.sample].opened.sample_id in self.refuse:
            self._on_event(Failed(request.sample, "STORE_FULL", "no room"))
        elif self.verdicts:
            super().commit(request)

    def abort(self, request: ingest_pb2.AbortSample) -> None:
        if self.draining:
            self._on_event(Failed(request.sample, "SERVER_DRAINING", "the server is shutting down"))
        else:
            super().abort(request)

    def break_link(self) -> None:
        self._on_event(LinkDown("it broke"))

    def link(self) -> None:
        self._on_event(LinkUp("again"))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = make_rig(sink=_Sink())
    yield made
    made.worker.close()


def _is_empty(rig: Rig) -> bool:
    return not rig.worker._sender._inbox and rig.worker._sender._outbox.is_empty


def _is_over(rig: Rig) -> bool:
    """Whether no sample is left of all that the engine said; the server may not have heard of it."""
    return not rig.worker._sender._inbox and not rig.worker._sender._outbox._held


def _committed(rig: Rig, sample_id: str) -> bytes:
    """The rows of the one committed sample of this id."""
    (sample,) = [s for s in rig.sink.samples.values() if s.opened.sample_id == sample_id and s.committed is not None]
    return b"".join(sample.rows[i] for i in sorted(sample.rows))


def test_a_lost_answer_is_asked_for_again(rig: Rig) -> None:
    rig.sink.verdicts = False
    rig.capture("a", 30)
    assert rig.sink.acked.acquire(timeout=30)
    rig.sink.break_link()
    rig.sink.verdicts = True
    rig.sink.link()
    wait_until(lambda: _is_empty(rig))
    assert rig.sink.opens == ["a", "a"]
    assert _committed(rig, "a") == rig.rows("a", 0, 30)
    assert rig.worker.take_faults() == []
    assert (rig.worker._sender._pool.in_use, rig.worker._sender._pool.kept) == (0, 0)


def test_a_sample_may_go_on_while_the_link_is_down_and_after(rig: Rig) -> None:
    table = rig.table("a", 30)
    rig.write(rig.slots("a", 0, 30))
    rig.step(StepPlan((opened("a", 30),), (cached_rows("a", 0, 10, 0, table),)), rig.slots("a", 0, 10))
    rig.sink.break_link()
    rig.step(StepPlan((), (cached_rows("a", 10, 20, 10, table),)), rig.slots("a", 10, 20))
    wait_until(lambda: [len(sample.chunks) for sample in rig.worker._sender._outbox._held.values()] == [2])
    rig.sink.link()
    finish = SampleFinish("a", tuple(range(30)))
    rig.step(StepPlan((), (cached_rows("a", 20, 30, 20, table),), (finish,)), rig.slots("a", 20, 30))
    wait_until(lambda: _is_empty(rig))
    assert _committed(rig, "a") == rig.rows("a", 0, 30)


def test_an_abort_whose_answer_was_lost_is_told_again(rig: Rig) -> None:
    table = rig.table("a", 8)
    rig.sink.break_link()
    rig.step(StepPlan((opened("a", 8),), (cached_rows("a", 0, 4, 0, table),)), rig.slots("a", 0, 4))
    rig.step(StepPlan(aborts=(SampleAbort("a", "ABORTED", "it ended"),)), None)
    wait_until(lambda: _is_over(rig))
    rig.sink.link()
    assert rig.sink.verdict(1) == Failed(1, "ABORTED", "it ended")
    (told,) = rig.sink.samples.values()
    assert (told.opened.rows_exact, told.rows) == (False, {})  # Nothing is preallocated for it.
    wait_until(lambda: _is_empty(rig))
    assert [(f.req_id, f.code) for f in rig.worker.take_faults()] == [("a", "ABORTED")]


def test_a_failure_that_a_leaving_server_did_not_take_is_the_next_engines_to_tell(tmp_path: Path) -> None:
    """Also when this engine ends before any server is back."""
    sink = _Sink()
    sink.draining = True
    first = make_rig(sink=sink, spool_dir=str(tmp_path / "spool"))
    try:
        first.step(StepPlan((opened("a", 8),), (cached_rows("a", 0, 4, 0, first.table("a", 8)),)), first.slots("a", 0, 4))
        first.step(StepPlan(aborts=(SampleAbort("a", "ABORTED", "it ended"),)), None)
        wait_until(lambda: len(first.worker._sender._outbox._reports) == 1)
        sink.break_link()
    finally:
        first.worker.close()
    heir = make_rig(sink=_Sink(), spool_dir=str(tmp_path / "spool"))
    try:
        assert heir.sink.verdict(1) == Failed(1, "ABORTED", "it ended")
        (told,) = heir.sink.samples.values()
        assert told.opened.sample_id == "a"
        wait_until(lambda: _is_empty(heir))
    finally:
        heir.worker.close()


@pytest.mark.parametrize("refused", [set(), {0, 1}, {1}], ids=["at once", "after the disk was full", "after half of it"])
def test_a_failure_that_the_server_does_not_take_yet_lies_in_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[int]
) -> None:
    """This engine may be killed before the server takes it."""
    monkeypatch.setattr("slotstream.connector.sending.failure_reports._PAUSE_S", 0.2)
    records = itertools.count()

    def append(*arguments: Any) -> int:
        if next(records) in refused:  # 0 is the open of the report, 1 its abort.
            raise OSError(errno.ENOSPC, "no space left")
        return append_record(*arguments)

    append_record = spool_files.append
    monkeypatch.setattr(spool_files, "append", append)
    with _draining_rig(tmp_path) as rig:
        _fail_a_sample(rig)
        if not refused:  # The engine hears of it when it is there, and not before.
            assert _aborts(tmp_path) == ["ABORTED"]
        wait_until(lambda: _aborts(tmp_path) == ["ABORTED"])
        assert rig.worker._sender.link_up
        rig.sink.draining = False
        wait_until(lambda: _is_empty(rig))
        wait_until(lambda: not files_below(tmp_path, ".spool"))


def test_an_engine_hears_of_a_failure_though_the_spools_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.connector.sending.failure_reports._WRITE_S", 0.2)
    goes_on = threading.Event()
    append_record = spool_files.append
    monkeypatch.setattr(spool_files, "append", lambda *arguments: (goes_on.wait(4 * WAIT_S), append_record(*arguments))[1])
    with _draining_rig(tmp_path) as rig:
        try:
            assert [fault.code for fault in _fail_a_sample(rig)] == ["ABORTED"]
            assert _aborts(tmp_path) == []
            goes_on.set()
            wait_until(lambda: _aborts(tmp_path) == ["ABORTED"])
            assert not rig.worker.take_faults()  # Once is enough.
        finally:
            goes_on.set()


@contextlib.contextmanager
def _draining_rig(spool_dir: Path) -> Iterator[Rig]:
    """With a spool, and a server that takes nothing new for now."""
    sink = _Sink()
    sink.draining = True
    rig = make_rig(sink=sink, spool_dir=str(spool_dir))
    try:
        yield rig
    finally:
        rig.worker.close()


def _fail_a_sample(rig: Rig) -> list[SampleFault]:
    """Aborts a sample half way; what the engine hears of it, once it does."""
    rig.step(StepPlan((opened("a", 8),), (cached_rows("a", 0, 4, 0, rig.table("a", 8)),)), rig.slots("a", 0, 4))
    rig.step(StepPlan(aborts=(SampleAbort("a", "ABORTED", "it ended"),)), None)
    faults: list[SampleFault] = []

    def heard() -> bool:
        faults.extend(rig.worker.take_faults())
        return bool(faults)

    wait_until(heard)
    return faults


def _aborts(base: Path) -> list[str]:
    """Why samples failed, as the files of a living engine say it."""
    found: list[SpooledSample] = []
    for path in base.glob("*/*.spool"):
        serial, namespace, sample_id = path.stem.split("~")
        with contextlib.suppress(FileNotFoundError):  # It is being written again.
            file = SpoolFile(int(serial), namespace, sample_id, OwnedDir(path.parent, -1), nbytes=path.stat().st_size)
            found.append(spool_files.read_index(file))
    return [sample.abort.code for sample in found if sample.abort is not None]


def test_rows_whose_room_was_needed_are_lost_with_the_link_and_that_is_said() -> None:
    sink = _Sink()
    sink.verdicts = False
    rig = make_rig(sink=sink, staging_bytes=1 << 20, chunk_bytes=64 << 10)
    try:
        for i in range(20):  # 16 slots.
            rig.capture(f"r{i}", 4)
            assert sink.acked.acquire(timeout=30)
            wait_until(lambda: rig.worker._sender._pool.in_use == 0)
        assert rig.worker._sender._pool.kept == 16
        sink.break_link()
        sink.verdicts = True
        sink.link()
        wait_until(lambda: _is_empty(rig))
        assert [(f.req_id, f.code) for f in rig.worker.take_faults()] == [(f"r{i}", "INTERRUPTED") for i in range(4)]
        for i in range(4, 20):
            assert _committed(rig, f"r{i}") == rig.rows(f"r{i}", 0, 4)
        assert rig.worker.take_stats()["failures_reported"] == 4
    finally:
        rig.worker.close()


def test_a_short_staging_is_relieved_by_the_spool_and_then_nothing_is_lost(tmp_path: Path) -> None:
    sink = _Sink()
    sink.verdicts = False
    rig = make_rig(sink=sink, staging_bytes=1 << 20, chunk_bytes=64 << 10, spool_dir=str(tmp_path / "spool"))
    try:
        for i in range(12):
            rig.capture(f"r{i}", 4)
            assert sink.acked.acquire(timeout=30)
        wait_until(lambda: rig.worker._sender._pool.in_use == 0)
        for i in range(12, 16):  # Each written before its slot can be taken, while those of before are taken one by one.
            rig.capture(f"r{i}", 4)
            assert sink.acked.acquire(timeout=30)
            wait_until(lambda: rig.worker._sender._pool.in_use == 0)
        assert len(files_below(tmp_path / "spool", ".spool")) >= 3
        sink.break_link()
        wait_until(lambda: not rig.worker._sender._spool_writer.writing)
        sink.verdicts = True
        sink.link()
        wait_until(lambda: _is_empty(rig))
        assert rig.worker.take_faults() == []
        for i in range(16):
            assert _committed(rig, f"r{i}") == rig.rows(f"r{i}", 0, 4)
    finally:
        rig.worker.close()


def test_an_engine_waits_for_room_that_the_spool_is_about_to_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the pump hears of the lost link, and while it has batches that it has not looked at."""
    sink = _Sink()
    sink.verdicts = False
    rig = make_rig(sink=sink, staging_bytes=1 << 20, chunk_bytes=64 << 10, spool_dir=str(tmp_path / "spool"))
    pump = rig.worker._sender
    waiting_makes_sense = []
    put, batch, go_on = SpoolWriter.put, Pump._batch, threading.Event()

    def watched_put(writer: SpoolWriter, sample: SampleState) -> None:
        waiting_makes_sense.append(pump.taking_rows)
        put(writer, sample)

    def late_batch(pump: Pump, staged: RowBatch) -> None:
        assert go_on.wait(30)
        batch(pump, staged)

    monkeypatch.setattr(SpoolWriter, "put", watched_put)
    monkeypatch.setattr(Pump, "_batch", late_batch)
    try:
        go_on.set()
        rig.capture("a", 4)
        assert sink.acked.acquire(timeout=30)
        sink.break_link()
        wait_until(lambda: not pump.link_up and not pump._spool_writer.writing)
        assert waiting_makes_sense == [True]
        assert not pump.taking_rows
        go_on.clear()
        rig.capture("b", 4)
        assert pump.taking_rows
        go_on.set()
        wait_until(lambda: not pump.taking_rows)
    finally:
        go_on.set()
        rig.worker.close()


def test_a_full_disk_is_tried_again_until_it_has_room(rig: Rig) -> None:
    rig.sink.refuse = {"a"}
    rig.capture("a", 30)
    rig.capture("b", 10)
    wait_until(lambda: rig.sink.opens.count("a") >= 2)
    assert isinstance(rig.sink.verdict(2), Committed)
    rig.sink.refuse = set()
    wait_until(lambda: _is_empty(rig))
    assert _committed(rig, "a") == rig.rows("a", 0, 30)
    assert rig.worker.take_faults() == []


def test_an_abort_that_a_full_disk_did_not_take_is_told_again(rig: Rig) -> None:
    table = rig.table("a", 8)
    rig.step(StepPlan((opened("a", 8),), (cached_rows("a", 0, 4, 0, table),)), rig.slots("a", 0, 4))
    assert rig.sink.acked.acquire(timeout=30)
    abort = rig.sink.abort
    rig.sink.abort = lambda request: rig.sink._on_event(Failed(request.sample, "STORE_FULL", "no room"))
    rig.step(StepPlan(aborts=(SampleAbort("a", "ABORTED", "it ended"),)), None)
    wait_until(lambda: len(rig.sink.opens) == 2)
    rig.sink.abort = abort
    wait_until(lambda: _is_empty(rig))
    assert [(f.req_id, f.code) for f in rig.worker.take_faults()] == [("a", "ABORTED")]
    (told,) = [s.failed for s in rig.sink.samples.values() if s.failed is not None]
    assert told.code == "ABORTED"


def test_more_failures_than_can_be_remembered_are_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "REPORTS_MAX", 3)
    rig.sink.break_link()
    for i in range(5):
        rig._unused = random.Random(i).sample(range(BLOCKS), BLOCKS)
        rig.step(StepPlan((opened(f"r{i}", 8),)), None)
        rig.step(StepPlan(aborts=(SampleAbort(f"r{i}", "ABORTED", "it ended"),)), None)
    wait_until(lambda: _is_over(rig))
    rig.sink.link()
    wait_until(lambda: _is_empty(rig))
    assert rig.sink.opens == ["r2", "r3", "r4"]
    stats = rig.worker.take_stats()
    assert (stats["reports_dropped"], stats["failures_reported"]) == (2, 3)


def test_a_step_that_fails_before_its_samples_were_opened_still_tells_the_server(rig: Rig) -> None:
    plan = StepPlan((opened("a", 8),), (cached_rows("a", 0, 8, 0, rig.table("a", 8)),))
    rig.worker.fail_plan(plan)
    verdict = rig.sink.verdict(1)
    assert isinstance(verdict, Failed)
    assert (rig.sink.samples[1].opened.sample_id, verdict.code) == ("a", "INTERNAL")
