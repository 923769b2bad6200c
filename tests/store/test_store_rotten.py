"""A sample that is sent again meets a file that rotted: the good copy is kept, for nobody else has one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store.store_kit import Sample, read_all

from slotstream.store.directory.recovery import whole_files
from slotstream.store.disk import retrying
from slotstream.store.disk.files import Files
from slotstream.store.records import SampleRecord, State
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import AlreadyExists, Damaged, IoError

SAMPLE = Sample()


def _flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x10
    path.write_bytes(raw)


def _older(path: Path) -> None:
    """A whole and sound file of the same id and content, but not the one that was committed."""
    other = path.parents[2].parent / "other"
    store = SampleStore.open(other)
    SAMPLE.put(store)
    store.close()
    path.write_bytes(SAMPLE.key.path(other).read_bytes())


ROTS = [
    pytest.param(lambda path: _flip(path, -81), id="a bit of the rows"),
    pytest.param(lambda path: _flip(path, -1), id="a bit of the token ids"),
    pytest.param(lambda path: _flip(path, 8), id="a header that cannot be read"),
    pytest.param(lambda path: _flip(path, 200), id="a bit of the header"),
    pytest.param(lambda path: os.truncate(path, path.stat().st_size - 1), id="truncated"),
    pytest.param(_older, id="an older file"),
]


@pytest.mark.files_only
@pytest.mark.parametrize("rot", ROTS)
def test_the_good_copy_takes_the_place_of_the_rotten_one(store: SampleStore, rot: Callable[[Path], None]) -> None:
    SAMPLE.put(store)
    rot(SAMPLE.path(store))
    rotten = SAMPLE.path(store).read_bytes()
    assert SAMPLE.put(store) is False  # Not a duplicate: what was there was no good.
    assert read_all(store, SAMPLE.key) == (SAMPLE.data, SAMPLE.token_ids)
    assert store.verify(SAMPLE.key).damage == ""
    assert store.lifetimes.quarantined == 1
    (aside,) = (store.data_dir / ".quarantine").rglob("*.safetensors")
    assert aside.read_bytes() == rotten
    assert SAMPLE.put(store) is True


@pytest.mark.files_only
def test_a_file_that_nobody_catalogued_is_checked_too(store: SampleStore) -> None:
    SAMPLE.put(store)
    raw = SAMPLE.path(store).read_bytes()
    store.delete(SAMPLE.key)
    SAMPLE.path(store).write_bytes(raw)
    _flip(SAMPLE.path(store), -81)
    assert SAMPLE.put(store) is False
    assert read_all(store, SAMPLE.key)[0] == SAMPLE.data


@pytest.mark.files_only
def test_other_content_is_still_refused(store: SampleStore) -> None:
    SAMPLE.put(store)
    _flip(SAMPLE.path(store), -81)
    with pytest.raises(AlreadyExists):
        Sample(seed=3).put(store)
    with pytest.raises(Damaged):
        read_all(store, SAMPLE.key)


class _Disk(Files):
    broken = False

    def pread(self, fd: int, nbytes: int, at: int) -> bytes:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(fd, nbytes, at)


def test_a_disk_that_does_not_say_commits_nothing_and_asks_for_the_sample_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "PAUSES_S", (0.0, 0.0))
    disk = _Disk()
    store = SampleStore.open(tmp_path, files=disk)
    SAMPLE.put(store)
    upload = SAMPLE.send(store)
    disk.broken = True
    with pytest.raises(IoError) as failed:
        upload.commit(SAMPLE.rows, SAMPLE.token_ids)
    assert failed.value.retryable
    disk.broken = False
    record = store.stat(SAMPLE.key)
    assert record is not None
    assert record.state is State.COMMITTED
    assert SAMPLE.put(store) is True
    store.close()


@pytest.mark.files_only
def test_an_old_row_does_not_stand_against_the_good_copy_whatever_their_stamps(store: SampleStore) -> None:
    """The log was cut, and the row is that of the rotten copy again. Where the clock is behind, the good one may bear less."""
    SAMPLE.put(store)
    row = store.stat(SAMPLE.key)
    assert row is not None
    _flip(SAMPLE.path(store), -81)
    SAMPLE.put(store)
    good = store.stat(SAMPLE.key)
    assert good is not None
    later = replace(row, committed_unix_ns=good.committed_unix_ns + 1)
    (aside,) = (store.data_dir / ".quarantine").rglob("*.safetensors")

    def found() -> list[SampleRecord]:
        return list(whole_files(Files(), store.data_dir, lambda _: later, rows_may_be_old=True))

    assert found() == []  # Nothing says that this row is old.
    aside.rename(aside.with_name(f"{SAMPLE.sample_id}.{later.committed_unix_ns}.safetensors"))
    assert [one.header_xxh3 for one in found()] == [good.header_xxh3]
