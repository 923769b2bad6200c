"""A disk that fails: nothing half-done is ever called committed, and the store goes on."""

from __future__ import annotations

import errno as errnos
import os
import sqlite3
from concurrent.futures import Future
from pathlib import Path

import pytest
from store.store_kit import BROKEN, FULL, FaultyFiles, Sample, read_all, tree
from support.sqlite_of import sqlite_of

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.disk.files import Files
from slotstream.store.records import SampleRecord, State
from slotstream.store.sample.upload import VerdictUnknown
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import AlreadyExists, ConfigError, IoError, SlotStreamError, StoreFull


def _fails(store: SampleStore, sample: Sample) -> SlotStreamError:
    with pytest.raises(SlotStreamError) as failed:
        sample.put(store)
    return failed.value


@pytest.mark.parametrize(
    ("operation", "at"),
    [
        ("create", 1),
        ("preallocate", 1),
        ("pwrite", 1),
        ("pwrite", 4),
        pytest.param("pwrite", 5, id="token ids"),
        pytest.param("pwrite", 6, id="header"),
        ("truncate", 1),
        ("sync_data", 1),
        ("rename", 1),
        pytest.param("sync_dir", 3, id="sync of the directory after the rename"),
    ],
)
@pytest.mark.parametrize(("errno", "kind"), [(FULL, StoreFull), (BROKEN, IoError)], ids=["full", "broken"])
def test_any_failed_operation_fails_the_sample_and_no_other(
    tmp_path: Path, operation: str, at: int, errno: int, kind: type[SlotStreamError]
) -> None:
    files = FaultyFiles(**{operation: (at, errno)})
    store = SampleStore.open(tmp_path, files=files)
    sample = Sample()
    error = _fails(store, sample)
    assert isinstance(error, kind)
    record = store.stat(sample.key)
    assert record is not None
    assert (record.state, record.error_code) == (State.FAILED, error.code)
    assert tree(tmp_path) == {}
    # The disk works again: the same sample is welcome, and a restart finds exactly it.
    assert sample.put(store) is False
    store.close()
    reopened = SampleStore.open(tmp_path)
    assert read_all(reopened, sample.key) == (sample.data, sample.token_ids)
    reopened.close()


def test_a_committed_sample_survives_whatever_the_disk_does_to_the_next(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = SampleStore.open(tmp_path, files=files)
    Sample("kept").put(store)
    files.faults = {"pwrite": (0, FULL)}
    assert isinstance(_fails(store, Sample("lost")), StoreFull)
    assert read_all(store, Sample("kept").key)[0] == Sample("kept").data
    store.close()


def test_a_file_is_published_only_after_its_bytes_and_told_only_after_its_name(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = SampleStore.open(tmp_path, files=files)
    upload = Sample().send(store)
    files.calls.clear()
    put = store._catalogue.commit

    def recorded(record: SampleRecord) -> Future[SampleRecord | None]:
        files.calls.append("row")
        return put(record)

    store._catalogue.commit = recorded  # type: ignore[method-assign]
    upload.commit(10, Sample().token_ids)
    assert [c for c in files.calls if c != "pread"] == [
        "pwrite",
        "truncate",
        "pwrite",
        "sync_data",
        "rename",
        "sync_dir",
        "row",
    ]
    store.close()


def test_a_commit_whose_row_cannot_be_written_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SampleStore.open(tmp_path)
    upload = Sample().send(store)

    def full(record: object) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(StoreFull("the disk is full: the catalogue cannot be written"))
        return future

    with monkeypatch.context() as patch:
        patch.setattr(store._catalogue, "commit", full)
        with pytest.raises(StoreFull):
            upload.commit(10, Sample().token_ids)
    assert tree(tmp_path) == {}
    assert Sample().put(store) is False
    store.close()


def test_a_commit_of_which_nobody_can_say_what_became_is_not_called_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is under its name, and neither that nor the catalogue can be changed: the sender is to send it again."""
    files = FaultyFiles()
    store = SampleStore.open(tmp_path, files=files)
    upload = Sample().send(store)

    def full(record: object) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(StoreFull("the disk is full: the catalogue cannot be written"))
        return future

    with monkeypatch.context() as patch:
        patch.setattr(store._catalogue, "commit", full)
        patch.setattr(store._catalogue, "put_deleting", full)
        files.faults = {"unlink": (0, BROKEN)}
        with pytest.raises(VerdictUnknown):
            upload.commit(10, Sample().token_ids)
    files.faults = {}
    # Who meets the file, meets a committed sample: with other content it is refused, and then everybody can read what is there.
    assert isinstance(_fails(store, Sample(seed=1)), AlreadyExists)
    assert read_all(store, Sample().key) == (Sample().data, Sample().token_ids)
    assert Sample().put(store) is True
    store.close()


def test_a_directory_that_cannot_be_looked_at_fails_the_sample_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SampleStore.open(tmp_path)
    Sample().put(store)

    def broken(path: Path) -> int | None:
        raise OSError(BROKEN, os.strerror(BROKEN))

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "path_size", broken)
        assert isinstance(_fails(store, Sample("s", seed=1)), IoError)
    assert Sample("other").put(store) is False
    store.close()


def test_a_failure_that_cannot_be_recorded_still_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SampleStore.open(tmp_path)
    upload = Sample().send(store)
    sqlite_of(store).submit(lambda _: None).result()

    def full(*_: object) -> Future[bool]:
        future: Future[bool] = Future()
        future.set_exception(StoreFull("the disk is full"))
        return future

    monkeypatch.setattr(store._catalogue, "fail", full)
    with pytest.raises(SlotStreamError):
        upload.commit(99, [])
    for record in (store.stat(Sample().key), *store.list_page(_everything())[0]):
        assert record is not None
        assert (record.state, record.error_code) == (State.FAILED, "INTERRUPTED")
    store.close()
    assert SampleStore.open(tmp_path).stat(Sample().key) is not None


def _everything() -> ListQuery:
    return ListQuery()


class _LittleSpace(Files):
    free = 1 << 30

    def free_bytes(self, path: Path) -> int:
        return self.free


def test_uploads_leave_the_reserve_alone(tmp_path: Path) -> None:
    files = _LittleSpace()
    store = SampleStore.open(tmp_path, files=files, free_bytes_min=1 << 20)
    begun = Sample("begun", exact=False).send(store, [(0, 3)])
    files.free = (1 << 20) + 1
    for sample in (Sample("exact"), Sample("open", exact=False)):
        assert isinstance(_fails(store, sample), StoreFull)
    with pytest.raises(StoreFull):
        Sample("begun", exact=False).write(begun, 3, 6)
    files.free = 0
    assert isinstance(_fails(store, Sample("more", exact=False)), StoreFull)
    store.close()


def test_a_full_disk_at_start_is_one_sentence(tmp_path: Path) -> None:
    files = _LittleSpace()
    files.free = 100
    with pytest.raises(ConfigError, match="is full"):
        SampleStore.open(tmp_path, files=files)


def test_a_file_system_without_preallocation_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def unsupported(*_: object) -> None:
        raise OSError(errnos.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    store = SampleStore.open(tmp_path)
    Sample().put(store)
    assert store.verify(Sample().key).damage == ""
    store.close()


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, pread = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, memoryview(data)[:100], at))
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: pread(fd, min(nbytes, 100), at))
    store = SampleStore.open(tmp_path)
    sample = Sample(rows=30)
    sample.put(store, [(0, 15), (15, 30)])
    assert read_all(store, sample.key) == (sample.data, sample.token_ids)
    store.close()


@pytest.mark.parametrize("where", ["file/below", "/proc/slotstream"])
def test_an_unusable_directory_is_one_sentence(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="as the data directory"):
        SampleStore.open(tmp_path / where)


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    with pytest.raises(ConfigError, match="another server is using"):
        SampleStore.open(tmp_path)
    store.close()
    SampleStore.open(tmp_path).close()


def test_a_catalogue_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    SampleStore.open(tmp_path).close()
    db = sqlite3.connect(tmp_path / "catalog.sqlite")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="newer slotstream"):
        SampleStore.open(tmp_path)
