"""What becomes of rows while the disk of the spool fails, by call and by error: they are kept, and sent once it works."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.files import files_below
from support.waiting import wait_until
from support.worker_rig import Rig, WatchedSink, make_rig

from slotstream.connector.sending import outbox, pump
from slotstream.connector.sending.spool import backlog, writer
from slotstream.connector.sending.spool import files as spool_files
from slotstream.transport.base import Failed, LinkDown, LinkUp
from slotstream.v1 import ingest_pb2

ERRORS = (errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOSPC, errno.EMFILE, errno.ENOMEM, errno.EACCES)
GONE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
# Calls of the spool's files: what of `os` they use, and on which path or with which flags.
WRITES = ("mkdir", "open to write", "pwritev", "pwritev and ftruncate")
LOOKS = ("scandir", "lstat", "open lock", "flock", "fstat", "listdir")  # At directories: once a link.
READS = ("open to read", "pread", "preadv")


class _Sink(WatchedSink):
    def __init__(self) -> None:
        super().__init__()
        self.refuse: dict[str, str] = {}
        self.tries: list[str] = []

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        sample_id = self.samples[request.sample].opened.sample_id
        self.tries.append(sample_id)
        if sample_id in self.refuse:
            self._on_event(Failed(request.sample, self.refuse[sample_id], "so it is"))
        else:
            super().commit(request)

    def link(self, *, up: bool) -> None:
        self._on_event(LinkUp("again") if up else LinkDown("it broke"))


class FailingDisk:
    """What `spool_files` uses of `os` and `fcntl`; one call fails while `number` is set. `hits`: how often it did."""

    def __init__(self) -> None:
        self.call, self.number, self.hits = "", 0, 0

    def _fail(self, call: str) -> None:
        if self.number and call in self.call.split(" and "):
            self.hits += 1
            raise OSError(self.number, os.strerror(self.number))

    def open(self, path: Any, flags: int, *more: Any, **others: Any) -> int:
        if os.fspath(path).endswith("/lock"):
            self._fail("open lock")
        else:
            self._fail("open to write" if flags & os.O_WRONLY else "open to read")
        return os.open(path, flags, *more, **others)

    def flock(self, fd: int, how: int) -> None:
        self._fail("flock")
        fcntl.flock(fd, how)

    def __getattr__(self, name: str) -> Any:
        there = getattr(os, name) if hasattr(os, name) else getattr(fcntl, name)
        if not callable(there) or name in ("fspath", "geteuid", "strerror", "close"):
            return there

        def call(*arguments: Any, **others: Any) -> Any:
            self._fail(name)
            return there(*arguments, **others)

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingDisk]:
    faulty = FailingDisk()
    monkeypatch.setattr(spool_files, "os", faulty)
    monkeypatch.setattr(spool_files, "fcntl", faulty)
    for method in ("mkdir", "lstat", "iterdir"):
        there = getattr(Path, method)
        name = "listdir" if method == "iterdir" else method

        def call(path: Path, *arguments: Any, name: str = name, there: Callable[..., Any] = there, **others: Any) -> Any:
            if "spool" in path.parts:
                faulty._fail(name)
            return there(path, *arguments, **others)

        monkeypatch.setattr(Path, method, call)
    monkeypatch.setattr(pump, "_TICK_S", 0.01)  # No test waits for a back-off.
    monkeypatch.setattr(outbox, "_RETRY_S", 0.0)
    monkeypatch.setattr(backlog, "_UNREAD_S", 0.01)
    monkeypatch.setattr(writer, "_REST_S", 0.01)
    yield faulty
    faulty.number = 0


def _rig(tmp_path: Path) -> Rig:
    return make_rig(sink=_Sink(), spool_dir=str(tmp_path / "spool"))


def _is_empty(rig: Rig) -> bool:
    return not rig.worker._sender._inbox and rig.worker._sender._outbox.is_empty


def _stored(rig: Rig) -> dict[str, bytes]:
    committed = [sample for sample in rig.sink.samples.values() if sample.committed is not None]
    return {s.opened.sample_id: b"".join(s.rows[i] for i in sorted(s.rows)) for s in committed}


@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("call", WRITES)
def test_rows_that_cannot_be_written_stay_and_are_sent(tmp_path: Path, disk: FailingDisk, call: str, number: int) -> None:
    rig = _rig(tmp_path)
    try:
        disk.call, disk.number = call, number
        rig.sink.link(up=False)
        rig.capture("a", 30)
        wait_until(lambda: disk.hits > 2)
        assert not files_below(tmp_path / "spool", ".spool") or "ftruncate" not in call
        disk.number = 0
        wait_until(lambda: bool(files_below(tmp_path / "spool", ".spool")) or "ftruncate" in call)
        rig.sink.link(up=True)
        wait_until(lambda: _is_empty(rig))
        assert _stored(rig) == {"a": rig.rows("a", 0, 30)}
        assert rig.worker.take_faults() == []
    finally:
        rig.worker.close()


def _left_behind(tmp_path: Path) -> dict[str, bytes]:
    """Samples that an engine left in the spool."""
    rig = _rig(tmp_path)
    rig.sink.link(up=False)
    for sample_id in ("a", "b"):
        rig.capture(sample_id, 30)
    wait_until(lambda: not rig.worker._sender._inbox)
    rows = {sample_id: rig.rows(sample_id, 0, 30) for sample_id in ("a", "b")}
    rig.worker.close()
    assert len(files_below(tmp_path / "spool", ".spool")) == 2
    return rows


@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("call", [*LOOKS, *READS])
def test_rows_that_cannot_be_read_stay_and_are_sent(tmp_path: Path, disk: FailingDisk, call: str, number: int) -> None:
    rows = _left_behind(tmp_path)
    disk.call, disk.number = call, number
    rig = _rig(tmp_path)
    try:
        wait_until(lambda: disk.hits > 0)
        wait_until(lambda: disk.hits > 2 or call in LOOKS)
        assert _stored(rig) == {}
        assert len(files_below(tmp_path / "spool", ".spool")) == 2
        disk.number = 0
        if call in LOOKS:
            rig.sink.link(up=False)
            rig.sink.link(up=True)
        wait_until(lambda: _stored(rig).keys() == rows.keys() and _is_empty(rig))
        assert _stored(rig) == rows
        wait_until(lambda: not files_below(tmp_path / "spool", ".spool"))
        assert all(sample.aborted is None or sample.aborted.code == "IO_ERROR" for sample in rig.sink.samples.values())
    finally:
        rig.worker.close()


@pytest.mark.parametrize("number", GONE, ids=lambda number: errno.errorcode[number])
def test_rows_that_nobody_has_any_more_are_said_to_be_gone(tmp_path: Path, disk: FailingDisk, number: int) -> None:
    _left_behind(tmp_path)
    disk.call, disk.number = "open to read", number
    rig = _rig(tmp_path)
    try:
        wait_until(lambda: len(rig.sink.samples) == 2 and _is_empty(rig))
        assert [sample.aborted.code for sample in rig.sink.samples.values()] == ["DAMAGED", "DAMAGED"]
    finally:
        rig.worker.close()


def test_samples_that_are_refused_for_now_stop_no_other(
    tmp_path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "AT_ONCE", 2)
    first = _rig(tmp_path)
    first.sink.link(up=False)
    for sample_id in "abcde":
        first.capture(sample_id, 8)
    wait_until(lambda: not first.worker._sender._inbox)
    rows = {sample_id: first.rows(sample_id, 0, 8) for sample_id in "abcde"}
    first.worker.close()
    sink = _Sink()
    sink.refuse = dict.fromkeys("abc", "IO_ERROR")
    rig = make_rig(sink=sink, spool_dir=str(tmp_path / "spool"))
    try:
        wait_until(lambda: _stored(rig).keys() == {"d", "e"})
        sink.refuse = {}
        wait_until(lambda: _is_empty(rig))
        assert _stored(rig) == rows
    finally:
        rig.worker.close()
