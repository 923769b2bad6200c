"""Every call of a sample's own file, with every error of the disk: which code the sender gets, and that it sends it again."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from store.store_kit import FaultyFiles, Sample, read_all, tree
from store.test_store_remote import begin

from slotstream.connector.sending.verdicts import VERDICTS, Verdict
from slotstream.store.catalogue.sqlite.damage import catalogue_error
from slotstream.store.records import State
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import SlotStreamError

# Which call of the operation meets the error: of a sample of four chunks whose rows come in another order.
CALLS = {
    "make_dir": ("make_dir", 1),
    "sync of a new directory": ("sync_dir", 1),
    "create": ("create", 1),
    "look for free space": ("free_bytes", 2),
    "preallocate": ("preallocate", 1),
    "write rows": ("pwrite", 1),
    "write the last rows": ("pwrite", 4),
    "read rows back": ("pread", 1),
    "look at the file's place": ("path_size", 1),
    "write token ids": ("pwrite", 5),
    "truncate": ("truncate", 1),
    "write the header": ("pwrite", 6),
    "sync": ("sync_data", 1),
    "rename": ("rename", 1),
    "sync of the directory after the rename": ("sync_dir", 3),
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
PASSING = (
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
    errno.ENOMEM,
    errno.EACCES,
    errno.EPERM,
    errno.ENXIO,
    errno.ENODEV,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EINVAL,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EHOSTDOWN,
    errno.EREMOTEIO,
    errno.ENOTCONN,
    999,  # Which no system has yet.
)
CODES = {
    **dict.fromkeys(FULL, "STORE_FULL"),
    **dict.fromkeys(PASSING, "IO_ERROR"),
    errno.EFBIG: "TOO_LARGE",
    errno.EBADF: "INTERNAL",
    errno.EFAULT: "INTERNAL",
}
DOES = {
    "STORE_FULL": Verdict.HELD,
    "STORE_GONE": Verdict.HELD,
    "IO_ERROR": Verdict.HELD,
    "TOO_LARGE": Verdict.FINAL,
    "INTERNAL": Verdict.FINAL,
}
BACKWARDS = ((6, 9), (9, 10), (0, 3), (3, 6))  # So that rows have to be read back for their hashes.


class _Files(FaultyFiles):
    """With the calls that look at things too."""

    def make_dir(self, path: Path) -> None:
        self._before("make_dir")
        super().make_dir(path)

    def free_bytes(self, path: Path) -> int:
        self._before("free_bytes")
        return super().free_bytes(path)

    def path_size(self, path: Path) -> int | None:
        self._before("path_size")
        return super().path_size(path)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._before("close")


def _refused(put: Callable[[], object]) -> SlotStreamError:
    with pytest.raises(SlotStreamError) as refused:
        put()
    return refused.value


@pytest.mark.parametrize("number", CODES, ids=lambda number: errno.errorcode.get(number, str(number)))
@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_the_disk_by_call_and_what_the_sender_does(tmp_path: Path, call: str, number: int) -> None:
    operation, at = CALLS[call]
    files = _Files()
    store = SampleStore.open(tmp_path, files=files)
    files.calls.clear()
    files.faults = {operation: (at, number)}
    sample = Sample()
    error = _refused(lambda: sample.put(store, BACKWARDS))
    assert files.calls.count(operation) >= at
    assert error.code == CODES[number], error
    assert VERDICTS[error.code] is DOES[error.code]
    assert DOES[error.code] is not Verdict.HELD or error.retryable
    record = store.stat(sample.key)
    assert record is not None
    assert (record.state, record.error_code) == (State.FAILED, error.code)
    assert tree(tmp_path) == {}  # Also after a sync that failed: nobody tries to sync that file again.
    # The sample comes again, whole, and the disk works.
    files.faults = {}
    files.calls.clear()
    assert sample.put(store, BACKWARDS) is False
    assert (files.calls.count("create"), files.calls.count("sync_data")) == (1, 1)
    store.close()
    reopened = SampleStore.open(tmp_path)
    assert read_all(reopened, sample.key) == (sample.data, sample.token_ids)
    reopened.close()


@pytest.mark.parametrize("number", CODES, ids=lambda number: errno.errorcode.get(number, str(number)))
@pytest.mark.parametrize("operation", ["rename", "sync_dir", "free_bytes"])
def test_the_same_of_a_sample_that_another_process_wrote(tmp_path: Path, operation: str, number: int) -> None:
    files = _Files()
    store = SampleStore.open(tmp_path, files=files)
    _, upload = begin(store, Sample())
    files.faults = {operation: (0, number)}
    assert _refused(lambda: upload.commit(10, Sample().token_ids)).code == CODES[number]
    files.faults = {}
    store.close()


def test_an_error_of_a_close_changes_no_verdict(tmp_path: Path) -> None:
    files = _Files()
    store = SampleStore.open(tmp_path, files=files)
    upload = Sample().send(store)
    files.faults = {"close": (0, errno.EIO)}
    assert upload.commit(10, Sample().token_ids) is False
    files.faults = {}
    assert read_all(store, Sample().key) == (Sample().data, Sample().token_ids)
    store.close()


def test_rows_that_somebody_cut_off_are_sent_again(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    upload = Sample(exact=False).send(store, BACKWARDS)
    with upload.partial.open("r+b") as file:
        file.truncate(upload.header_bytes)
    assert _refused(lambda: upload.commit(10, Sample().token_ids)).code == "IO_ERROR"
    assert Sample(exact=False).put(store) is False
    store.close()


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "open"])
@pytest.mark.parametrize("when", ["open", "rows", "commit"])
def test_a_data_directory_that_is_gone_is_said_to_be(tmp_path: Path, when: str, exact: bool) -> None:
    data = tmp_path / "data"
    store = SampleStore.open(data)
    sample = Sample(exact=exact)
    if when == "open":
        shutil.rmtree(data)
        assert _refused(lambda: sample.put(store)).code == "STORE_GONE"
        return
    upload = store.open_upload(sample.spec())
    if when == "commit":
        for start, stop in sample.chunks():
            sample.write(upload, start, stop)
    shutil.rmtree(data)

    def rest() -> None:
        if when == "rows":
            for start, stop in sample.chunks():
                sample.write(upload, start, stop)
        upload.commit(sample.rows, sample.token_ids)

    error = _refused(rest)
    assert (error.code, VERDICTS[error.code]) == ("STORE_GONE", Verdict.HELD)


@pytest.mark.parametrize(
    "name",
    [
        "IOERR",
        "IOERR_WRITE",
        "IOERR_FSYNC",
        "IOERR_NOMEM",
        "READONLY",
        "READONLY_DIRECTORY",
        "CANTOPEN",
        "PERM",
        "BUSY",
        "BUSY_SNAPSHOT",
        "LOCKED",
        "PROTOCOL",
        "NOMEM",
        "CORRUPT",
        "NOTADB",
        "FULL",
        "CONSTRAINT",
        "MISUSE",
    ],
)
def test_an_error_of_the_catalogue_by_its_kind(name: str) -> None:
    error = sqlite3.OperationalError("so it is")
    error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{name}")
    code = catalogue_error(error).code
    assert code == {"FULL": "STORE_FULL", "CONSTRAINT": "INTERNAL", "MISUSE": "INTERNAL"}.get(name, "IO_ERROR")
    assert VERDICTS[code] is DOES[code]
