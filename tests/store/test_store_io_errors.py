"""A failing disk is not damage: what cannot be read is read again, and then said to be unread; nothing is moved for it."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from store.store_kit import Sample, read_all

from slotstream.store.disk import retrying
from slotstream.store.disk.files import Files
from slotstream.store.records import State
from slotstream.store.samples import SampleStore
from slotstream.store.upkeep.quarantine import QUARANTINE_NAME
from slotstream.store.upkeep.scrubbing import Scrubber
from slotstream.store.upkeep.verifying import IO_ERROR
from slotstream.wire.errors import IoError

ERRORS = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM]
FAST = 1e12


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSES_S", (0.0, 0.0))


class TiredDisk(Files):
    """A disk whose reads fail with an errno, or give a wrong bit, with a probability."""

    def __init__(self) -> None:
        self.error = 0
        self.share = 0.0
        self.flips = 0  # So many reads more have a wrong bit.
        self.refuses_to_open = False
        self.rng = random.Random(1)

    def open_read(self, path: Path) -> int:
        if self.refuses_to_open and self.rng.random() < self.share:
            raise OSError(self.error, os.strerror(self.error))
        return super().open_read(path)

    def pread(self, fd: int, nbytes: int, at: int) -> bytes:
        if not self.refuses_to_open and self.rng.random() < self.share:
            raise OSError(self.error, os.strerror(self.error))
        data = super().pread(fd, nbytes, at)
        if self.flips and at and data:
            self.flips -= 1
            return bytes((data[0] ^ 1,)) + data[1:]
        return data


@pytest.fixture
def disk() -> TiredDisk:
    return TiredDisk()


@pytest.fixture
def tired(tmp_path: Path, disk: TiredDisk) -> SampleStore:
    store = SampleStore.open(tmp_path, files=disk)
    for number in range(30):
        Sample(f"s{number}", seed=number).put(store)
    return store


@pytest.mark.parametrize("where", ["open", "read"])
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_errors_of_reads_condemn_nothing(tired: SampleStore, disk: TiredDisk, error: int, where: str) -> None:
    disk.error, disk.refuses_to_open = error, where == "open"
    for disk.share in (0.05, 0.3, 1.0):
        scrubber = Scrubber(tired.lifetimes, FAST)
        assert scrubber.run_pass()
        assert (scrubber.progress.samples, scrubber.progress.damaged) == (30, 0)
    verdict = tired.verify(Sample("s0").key)
    assert (verdict.damage, verdict.is_damage) == (IO_ERROR, False)
    assert tired.lifetimes.quarantine(verdict) is None
    with pytest.raises(IoError):
        read_all(tired, Sample("s0").key)
    assert not (tired.data_dir / QUARANTINE_NAME).exists()
    disk.share = 0
    for number in range(30):
        assert read_all(tired, Sample(f"s{number}").key)[0] == Sample(f"s{number}", seed=number).data
    tired.close()


def test_a_read_that_fails_now_and_then_is_tried_again(tired: SampleStore, disk: TiredDisk) -> None:
    disk.error, disk.share = errno.EIO, 0.1
    served = 0
    for number in range(30):
        try:
            served += read_all(tired, Sample(f"s{number}").key)[0] == Sample(f"s{number}", seed=number).data
        except IoError:
            continue
    assert served >= 28  # Without trying again about half of them would fail.
    tired.close()


@pytest.mark.parametrize("flips", [1, 2])
def test_bytes_that_are_wrong_once_are_no_damage(tired: SampleStore, disk: TiredDisk, flips: int) -> None:
    """A bad cable or a failing memory, seen by one look: the next look sees what is on the disk."""
    disk.flips = flips
    assert tired.verify(Sample("s3").key).damage == ""
    disk.flips = flips - 1
    assert read_all(tired, Sample("s3").key)[0] == Sample("s3", seed=3).data
    tired.close()


def test_looks_that_find_different_things_are_no_damage(tired: SampleStore, disk: TiredDisk) -> None:
    """Rows that are wrong in the first look, and a file that cannot be read in the second."""
    disk.flips = 2  # Both reads of the first group.
    dropped = disk.drop_cached

    def fails_from_here(path: Path) -> None:
        dropped(path)
        disk.error, disk.share = errno.EIO, 1.0

    disk.drop_cached = fails_from_here  # type: ignore[method-assign]
    verdict = tired.verify(Sample("s3").key)
    assert verdict.damage == IO_ERROR
    assert "two looks" in verdict.message
    tired.close()


# Back from the quarantine.


def _condemned(store: SampleStore, disk: TiredDisk, name: str) -> None:
    """A sound sample that bad reads brought into the quarantine."""
    disk.flips = 1 << 30
    verdict = store.verify(Sample(name).key)
    disk.flips = 0
    assert verdict.damage == "HASH_MISMATCH"
    assert store.lifetimes.quarantine(verdict) is not None


def test_what_verifies_again_is_restored_as_it_was(tired: SampleStore, disk: TiredDisk) -> None:
    before = tired.stat(Sample("s3").key)
    _condemned(tired, disk, "s3")
    (done,) = tired.restore()
    assert (done.key, done.damage, done.kept) == (Sample("s3").key, "", "")
    assert tired.stat(Sample("s3").key) == before
    assert read_all(tired, Sample("s3").key)[0] == Sample("s3", seed=3).data
    assert tired.lifetimes.quarantine_totals() == (0, 0)
    assert list(tired.restore()) == []
    tired.close()


def test_what_does_not_verify_stays_in_the_quarantine(tired: SampleStore, disk: TiredDisk) -> None:
    for name in ("s3", "s4"):
        _condemned(tired, disk, name)
    held = sorted((tired.data_dir / QUARANTINE_NAME / "default").iterdir())
    raw = bytearray(held[0].read_bytes())
    raw[-1] ^= 1
    held[0].write_bytes(raw)
    held[0].with_name("notes.txt").write_text("not a sample")
    held[0].with_name("s9.7.safetensors").write_bytes(held[1].read_bytes())  # Another sample's, and another time's.
    done = {one.file.rpartition("/")[2]: (one.damage, bool(one.kept)) for one in tired.restore()}
    assert done == {
        held[0].name: ("HASH_MISMATCH", True),
        held[1].name: ("", False),
        "s9.7.safetensors": ("UNREADABLE", True),
    }
    record = tired.stat(Sample("s3").key)
    assert record is not None
    assert record.state is State.FAILED
    assert held[0].exists()
    tired.close()


def test_a_disk_that_fails_restores_nothing(tired: SampleStore, disk: TiredDisk) -> None:
    _condemned(tired, disk, "s3")
    disk.error, disk.share = errno.EIO, 1.0
    assert [one.damage for one in tired.restore()] == [IO_ERROR]
    disk.share = 0
    assert [one.kept for one in tired.restore("default", "s3")] == [""]
    tired.close()


def test_an_id_that_is_taken_again_keeps_its_sample(tired: SampleStore, disk: TiredDisk) -> None:
    _condemned(tired, disk, "s3")
    Sample("s3", seed=99).put(tired)
    (done,) = tired.restore("default", "s3")
    assert "stored again" in done.kept
    assert read_all(tired, Sample("s3").key)[0] == Sample("s3", seed=99).data
    assert tired.lifetimes.quarantine_totals()[0] == 1
    tired.close()


def test_a_directory_that_cannot_be_listed_is_no_fault_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SampleStore.open(tmp_path)
    Sample().put(store)

    def refuses(path: Path) -> Iterator[os.DirEntry[str]]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store._files, "walk", refuses)
    with pytest.raises(IoError):
        list(store.verify_all())
    store.close()
