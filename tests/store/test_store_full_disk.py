"""A disk that the store's own samples filled: it starts again, reads and deletes; refusals do not eat the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from store.store_kit import Sample, read_all
from support.sqlite_of import sqlite_of

from slotstream.store.catalogue.queries import ListQuery, Queue
from slotstream.store.disk.clock import Clock
from slotstream.store.disk.files import Files
from slotstream.store.failure_shares import FailureShares
from slotstream.store.records import Failure, SampleRecord, State
from slotstream.store.samples import FREE_BYTES_MIN, SampleStore
from slotstream.store.upkeep.retention import Policy
from slotstream.store.upkeep.sweeping import REFUSED_AGE_S_MAX, Sweeper
from slotstream.wire.errors import ConfigError, StoreFull

FILLER = Path(__file__).with_name("full_disk.py")
_MOUNTED = 'mount -t tmpfs -o size=24m tmpfs "$1" && "$2" "$3" "$1/data" fill; "$2" "$3" "$1/data" serve'


def test_a_disk_that_its_own_samples_filled_is_served_again(tmp_path: Path) -> None:
    """24 MiB, defaults, the server killed: the real thing, in a mount namespace of its own."""
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", _MOUNTED, "sh", str(tmp_path), sys.executable, str(FILLER)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"may not mount here: {done.stderr}")
    filled, served = map(json.loads, done.stdout.splitlines())
    assert filled["stored"] > 50
    assert filled["free"] > FREE_BYTES_MIN // 2  # After 3,000 refusals.
    assert served["sound"] == filled["stored"]
    assert served["again"] is False
    assert served["free"] > filled["free"] + (10 << 20)


class _Space(Files):
    free = 1 << 30

    def free_bytes(self, path: Path) -> int:
        return self.free


FAT = Sample("fat", tags={f"k{n}": "v" * 250 for n in range(32)}, metadata={"m": "x" * 16_000})

FAT_RECORD = SampleRecord.refused(FAT.key, "m", 1)


def _catalogue_bytes(store: SampleStore) -> int:
    (pages,) = sqlite_of(store).submit(lambda db: db.execute("PRAGMA page_count").fetchone()).result()
    return int(pages) * 4096


def test_a_start_on_a_full_disk_reads_and_deletes(tmp_path: Path) -> None:
    files = _Space()
    store = SampleStore.open(tmp_path, files=files)
    Sample("a").put(store)
    Sample("b").put(store)
    store.close()
    files.free = FREE_BYTES_MIN - 1
    store = SampleStore.open(tmp_path, files=files)
    assert store.is_full
    assert read_all(store, Sample("a").key)[0] == Sample("a").data
    with pytest.raises(StoreFull):
        Sample("c").put(store)
    refused = store.stat(Sample("c").key)  # Known, and written nowhere.
    assert refused is not None
    assert (refused.state, refused.error_code) == (State.FAILED, "STORE_FULL")
    assert store.totals()[State.FAILED] == (0, 0)
    store.delete(Sample("a").key)
    files.free = 1 << 30
    assert not store.is_full
    Sample("c").put(store)
    store.close()


def test_a_disk_without_room_for_the_catalogue_is_one_sentence(tmp_path: Path) -> None:
    files = _Space()
    SampleStore.open(tmp_path, files=files).close()
    files.free = 1 << 19
    with pytest.raises(ConfigError, match="is full"):
        SampleStore.open(tmp_path, files=files)


def test_a_commit_leaves_the_catalogue_its_half_of_the_reserve(tmp_path: Path) -> None:
    files = _Space()
    store = SampleStore.open(tmp_path, files=files)
    begun = [Sample(name).send(store) for name in "ab"]
    files.free = FREE_BYTES_MIN // 2
    begun[0].commit(10, Sample().token_ids)
    files.free -= 1
    with pytest.raises(StoreFull):
        begun[1].commit(10, Sample().token_ids)
    files.free = 1 << 30
    Sample("b").put(store)
    store.close()


def test_uploads_that_took_the_same_room_give_it_back(tmp_path: Path) -> None:
    class Raced(_Space):
        def preallocate(self, fd: int, nbytes: int) -> bool:
            self.free = FREE_BYTES_MIN - 1  # Another one was quicker.
            return super().preallocate(fd, nbytes)

    files = Raced()
    store = SampleStore.open(tmp_path, files=files)
    with pytest.raises(StoreFull):
        Sample().send(store)
    assert not list(tmp_path.rglob("*.partial"))
    store.close()


@pytest.mark.files_only
def test_what_was_not_committed_stores_little(store: SampleStore) -> None:
    before = _catalogue_bytes(store)
    for number in range(200):
        sample = Sample(f"f{number}", tags=FAT.tags, metadata=FAT.metadata)
        store.open_upload(sample.spec()).abort(Failure("ABORTED", "no"))
    assert _catalogue_bytes(store) - before < 200 * 2048
    record = store.stat(Sample("f7").key)
    assert record is not None
    assert (record.state, record.error_code, record.tags, record.metadata) == (State.FAILED, "ABORTED", {}, {})
    # A committed one keeps all, and so does one that is arriving, for whoever asks.
    upload = FAT.send(store)
    arriving = store.stat(FAT.key)
    assert arriving is not None
    assert arriving.tags == FAT.tags
    upload.commit(10, FAT.token_ids)
    assert [r.sample_id for r in store.list_page(ListQuery(tags={"k3": "v" * 250}))[0]] == ["fat"]


def test_a_peer_has_a_share_of_failures_and_others_have_theirs(store: SampleStore) -> None:
    now = [0.0]
    store._failure_shares = FailureShares(most=3, per_s=1.0, now=lambda: now[0])

    def fails(name: str, peer: str) -> bool:
        store.open_upload(Sample(name).spec(), peer).abort(Failure("ABORTED", "no"))
        return store.stat(Sample(name).key) is not None

    assert [fails(f"a{n}", "greedy") for n in range(5)] == [True, True, True, False, False]
    assert fails("b0", "honest")
    assert store.totals()[State.ARRIVING] == (0, 0)
    store.record_failed(FAT_RECORD, Failure("TOO_LARGE", "no"), "greedy")
    assert store.stat(FAT_RECORD.key) is None
    now[0] = 1.5
    assert [fails(f"c{n}", "greedy") for n in range(2)] == [True, False]
    assert store.open_upload(Sample("d").spec(), "greedy").commit is not None  # It may still store samples.


def test_refusals_are_forgotten_after_a_week_whatever_the_rules_say(store: SampleStore) -> None:
    now = [1_700_000_000 * 10**9]
    store.lifetimes.clock = Clock(0, lambda: now[0])
    store.record_failed(SampleRecord.refused(Sample("refused").key, "m", store.lifetimes.clock.stamp()), Failure("X", "no"))
    store.open_upload(Sample("aborted").spec()).abort(Failure("ABORTED", "no"))
    for days, left in ((6, {"refused", "aborted"}), (8, {"aborted"})):
        clock = Clock(0, lambda days=days: now[0] + days * 86400 * 10**9)  # type: ignore[misc]
        store.lifetimes.clock = clock
        Sweeper(store.lifetimes, Policy(), store.free_bytes).sweep()
        assert {r.sample_id for r in store.list_page(ListQuery())[0]} == left
    assert REFUSED_AGE_S_MAX == 7 * 86400
    assert store.lifetimes.candidates(Queue.REFUSED, "default", (-1, -1), 10) == []
