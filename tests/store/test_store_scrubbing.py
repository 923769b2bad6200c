"""Damage is found before a trainer meets it, taken out of service, and kept for people to look at."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from store.store_kit import BROKEN, FULL, Crash, FaultyFiles, Sample, crash, crash_in, read_all, tree

from slotstream.store.catalogue.queries import ListQuery, Queue
from slotstream.store.directory.looking import verify_directory
from slotstream.store.disk.files import Files
from slotstream.store.records import State
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.quarantine import QUARANTINE_NAME
from slotstream.store.upkeep.scrubbing import Scrubber
from slotstream.wire.errors import Damaged, SampleFailed, SlotStreamError, StoreFull, StoreGone

FAST = 1e12


def _flip(path: Path, offset: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def _replaced_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replaced_by_a_link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


def _anothers(path: Path) -> None:
    shutil.copy(Sample("sound").key.path(path.parents[2]), path)


def _earlier_version(path: Path) -> None:
    """A whole and sound file of the same id, but not the one that was committed last."""
    data_dir = path.parents[2]
    other = data_dir.parent / "other"
    store = SampleStore.open(other)
    Sample("bad", seed=9).put(store)
    store.close()
    shutil.copy(Sample("bad").key.path(other), path)


# Everything that a file in the data directory can be instead of what was committed.
DAMAGES = [
    pytest.param(_flip, "HASH_MISMATCH", id="a bit of the token ids"),
    pytest.param(lambda path: _flip(path, -81), "HASH_MISMATCH", id="a bit of the rows"),
    pytest.param(lambda path: _flip(path, 40), "HASH_MISMATCH", id="a bit of the header"),
    pytest.param(lambda path: os.truncate(path, path.stat().st_size - 1), "TRUNCATED", id="truncated"),
    pytest.param(lambda path: os.truncate(path, 100), "TRUNCATED", id="truncated in the header"),
    pytest.param(lambda path: os.truncate(path, 0), "TRUNCATED", id="empty"),
    pytest.param(lambda path: os.truncate(path, path.stat().st_size + 1), "UNREADABLE", id="padded"),
    pytest.param(lambda path: path.write_bytes(bytes(path.stat().st_size)), "UNREADABLE", id="zeros"),
    pytest.param(_anothers, "UNREADABLE", id="another sample's file"),
    pytest.param(_earlier_version, "HASH_MISMATCH", id="another version of the sample"),
    pytest.param(_replaced_by_a_link, "TRUNCATED", id="a link"),
    pytest.param(_replaced_by_a_directory, "TRUNCATED", id="a directory"),
    pytest.param(Path.unlink, "MISSING", id="gone"),
]


@pytest.mark.parametrize(("damage", "word"), DAMAGES)
def test_damage_is_never_served_found_and_put_aside(tmp_path: Path, damage: Callable[[Path], None], word: str) -> None:
    store = SampleStore.open(tmp_path / "data")
    for name in ("bad", "sound"):
        Sample(name).put(store)
    path = Sample("bad").path(store)
    damage(path)
    with pytest.raises(Damaged):
        read_all(store, Sample("bad").key)
    scrubber = Scrubber(store.lifetimes, FAST)
    assert scrubber.run_pass()
    assert (scrubber.progress.samples, scrubber.progress.damaged) == (2, 1)
    record = store.stat(Sample("bad").key)
    assert record is not None
    assert (record.state, record.error_code) == (State.FAILED, "DAMAGED")
    assert word in record.error_message
    assert store.lifetimes.quarantined == 1
    with pytest.raises(SampleFailed) as failed:
        store.reader(Sample("bad").key)
    assert failed.value.reason == "DAMAGED"
    # The file is kept, no sound sample is touched, and neither a check nor a restart brings the damaged one back.
    assert not os.path.lexists(path)
    kept = 0 if word == "MISSING" or damage is _replaced_by_a_directory else 1
    assert store.lifetimes.quarantine_totals()[0] >= kept
    assert [(v.sample_id, v.damage) for v in store.verify_all() if v.damage != "FOREIGN"] == [("sound", "")]
    for end in (SampleStore.close, crash):
        end(store)
        store = SampleStore.open(tmp_path / "data")
        assert [r.sample_id for r in store.list_page(ListQuery(state=State.COMMITTED))[0]] == ["sound"]
    assert Sample("bad").put(store) is False  # Sent again, it is welcome.
    assert read_all(store, Sample("bad").key)[0] == Sample("bad").data
    store.close()
    assert {v.sample_id for v in verify_directory(tmp_path / "data") if not v.damage} == {"bad", "sound"}


@pytest.mark.files_only
def test_foreign_files_are_never_served_and_never_touched(store: SampleStore) -> None:
    sample = Sample("real")
    sample.put(store)
    path = sample.path(store)
    strangers = [
        Sample("copy").key.path(store.data_dir),  # In another sample's place.
        path.parent / "wrong-shard.safetensors",
        store.data_dir / "loose.safetensors",
        store.data_dir / "default" / "loose.safetensors",
    ]
    for stranger in strangers:
        stranger.parent.mkdir(exist_ok=True)
        shutil.copy(path, stranger)
    Scrubber(store.lifetimes, FAST).run_pass()
    for name in ("copy", "wrong-shard", "loose"):
        with pytest.raises(SlotStreamError):
            store.reader(Sample(name).key)
    assert [r.sample_id for r in store.list_page(ListQuery())[0]] == ["real"]
    assert all(stranger.exists() for stranger in strangers)
    found = [v for v in store.verify_all() if v.damage]
    assert [v.damage for v in found] == ["FOREIGN"] * 4
    assert [store.lifetimes.quarantine(verdict) for verdict in found] == [None] * 4


def test_a_pass_goes_on_where_it_was_stopped_also_after_a_restart(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path)
    for name in "abcd":
        Sample(name).put(store)
    read: list[int] = []

    def stop_in_the_third(nbytes: int) -> None:
        read.append(nbytes)
        if sum(read) == 2 * 640 + 256:  # In the third sample, whose first group of rows was just read.
            scrubber.stop()

    scrubber = Scrubber(store.lifetimes, FAST, stop_in_the_third)
    assert not scrubber.run_pass()
    assert scrubber.due_in_s(1000) == 0
    store.close()
    store = SampleStore.open(tmp_path)
    _flip(Sample("a").path(store))  # Behind the position: the next pass finds it.
    _flip(Sample("d").path(store))
    again = Scrubber(store.lifetimes, FAST, read.append)
    read.clear()
    assert again.due_in_s(1000) == 0
    assert again.run_pass()
    assert (again.progress.samples, again.progress.damaged) == (4, 1)
    assert sum(read) == 2 * 640
    assert 999 < again.due_in_s(1000) <= 1000
    assert again.run_pass()
    assert again.progress.damaged == 1
    assert store.lifetimes.quarantine_totals()[0] == 2
    store.close()


def test_the_first_pass_of_a_new_store_is_not_due_at_once(store: SampleStore) -> None:
    assert Scrubber(store.lifetimes, FAST).due_in_s(50) == 50
    assert 49 < Scrubber(store.lifetimes, FAST).due_in_s(50) <= 50


class _Descriptors(Files):
    """A process that cannot open files for a while."""

    errno = 0

    def open_read(self, path: Path) -> int:
        if self.errno:
            raise OSError(self.errno, os.strerror(self.errno))
        return super().open_read(path)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_what_says_nothing_about_the_bytes_is_no_damage(tmp_path: Path, number: int) -> None:
    files = _Descriptors()
    store = SampleStore.open(tmp_path, files=files)
    Sample().put(store)
    files.errno = number
    scrubber = Scrubber(store.lifetimes, FAST)
    assert scrubber.run_pass()
    assert scrubber.progress.damaged == 0
    files.errno = 0
    assert read_all(store, Sample().key)[0] == Sample().data
    store.close()


@pytest.mark.files_only
def test_a_sample_that_changed_since_its_check_stays(store: SampleStore) -> None:
    Sample().put(store)
    _flip(Sample().path(store))
    verdict = store.verify(Sample().key)
    store.delete(Sample().key)
    Sample().put(store)
    assert store.lifetimes.quarantine(verdict) is None
    assert read_all(store, Sample().key)[0] == Sample().data


@pytest.mark.parametrize(("number", "kind"), [(FULL, StoreFull), (BROKEN, SlotStreamError)])
def test_a_quarantine_that_cannot_be_written_serves_nothing_damaged(
    tmp_path: Path, number: int, kind: type[SlotStreamError]
) -> None:
    files = FaultyFiles()
    store = SampleStore.open(tmp_path, files=files)
    Sample().put(store)
    _flip(Sample().path(store))
    files.faults = {"rename": (0, number)}
    with pytest.raises(kind):
        store.lifetimes.quarantine(store.verify(Sample().key))
    assert not Scrubber(store.lifetimes, FAST).run_pass()
    with pytest.raises(Damaged):
        read_all(store, Sample().key)
    files.faults = {}
    scrubber = Scrubber(store.lifetimes, FAST)
    assert scrubber.run_pass()
    assert store.lifetimes.quarantine_totals()[0] == 1
    store.close()


def test_a_crash_between_the_move_and_the_row_is_told_apart_from_a_loss(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = SampleStore.open(tmp_path, files=files)
    Sample().put(store)
    _flip(Sample().path(store))
    verdict = store.verify(Sample().key)
    files.faults = {"sync_dir": (files.calls.count("sync_dir") + 3, Crash)}
    crash_in(store, lambda: store.lifetimes.quarantine(verdict))
    store = SampleStore.open(tmp_path)
    record = store.stat(Sample().key)
    assert record is not None
    assert (record.error_code, record.error_message) == ("DAMAGED", "the file of the committed sample is in the quarantine")
    assert all(path.startswith(QUARANTINE_NAME) for path in tree(tmp_path))
    store.close()


# The disk under the server.


def _unmount(data_dir: Path) -> None:
    data_dir.rename(data_dir.with_name("unmounted"))


def _unmount_leaving_the_mount_point(data_dir: Path) -> None:
    _unmount(data_dir)
    data_dir.mkdir()


def _mount_another(data_dir: Path) -> None:
    _unmount(data_dir)
    other = SampleStore.open(data_dir)
    Sample("theirs").put(other)
    other.close()


@pytest.mark.parametrize("replace", [_unmount, _unmount_leaving_the_mount_point, _mount_another])
def test_a_directory_that_was_replaced_is_neither_written_nor_condemned(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    data_dir = tmp_path / "data"
    store = SampleStore.open(data_dir)
    Sample("old").put(store)
    arriving = Sample("arriving").send(store)
    replace(data_dir)
    before = tree(data_dir) if data_dir.exists() else {}
    chosen = store.lifetimes.candidates(Queue.OLDEST, "default", (-1, -1), 10)
    for refused in (
        store.check_directory,
        lambda: store.open_upload(Sample("new").spec()),
        lambda: store.delete(Sample("old").key),
        lambda: store.reader(Sample("old").key),
        lambda: store.verify(Sample("old").key),
        lambda: list(store.verify_all()),
        lambda: store.lifetimes.delete_unused(chosen),
    ):
        with pytest.raises(StoreGone):
            refused()
    with pytest.raises(SlotStreamError):
        arriving.commit(10, Sample("arriving").token_ids)
    assert not Scrubber(store.lifetimes, FAST).run_pass()
    assert (tree(data_dir) if data_dir.exists() else {}) == before
    # Mounted again, everything is as it was.
    if data_dir.exists():
        shutil.rmtree(data_dir)
    data_dir.with_name("unmounted").rename(data_dir)
    store.check_directory()
    assert read_all(store, Sample("old").key)[0] == Sample("old").data
    assert Sample("new").put(store) is False
    store.close()


def test_a_second_server_is_refused_while_the_first_lives_and_not_after(tmp_path: Path) -> None:
    from slotstream.wire.errors import ConfigError

    store = SampleStore.open(tmp_path)
    with pytest.raises(ConfigError, match="another server is using"):
        SampleStore.open(tmp_path)
    assert Sample().put(store) is False  # The first one did not notice.
    crash(store)
    SampleStore.open(tmp_path).close()
