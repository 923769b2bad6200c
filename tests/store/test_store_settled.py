"""The moment up to which nothing commits any more: what an epoch of a trainer is counted by."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store.store_kit import Sample
from store.test_store_remote import begin

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.disk.files import Files
from slotstream.store.samples import SampleStore


class HeldFiles(Files):
    """A rename, which every commit passes after it took its stamp, waits to be let through."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.go = threading.Event(), threading.Event()

    def rename(self, source: Path, target: Path) -> None:
        self.there.set()
        assert self.go.wait(30)
        super().rename(source, target)


def committed(store: SampleStore, sample: Sample) -> int:
    record = store.stat(sample.key)
    assert record is not None
    return record.committed_unix_ns


def listed(store: SampleStore) -> tuple[int, list[str]]:
    """The moment, and what a listing shows after it."""
    as_of = store.settled()
    return as_of, [record.sample_id for record in store.list_page(ListQuery())[0] if record.committed_unix_ns]


def put(store: SampleStore, sample: Sample) -> None:
    upload = store.open_upload(sample.spec())
    for start, stop in sample.chunks():
        sample.write(upload, start, stop)
    upload.commit(sample.rows, sample.token_ids)


def test_it_waits_for_a_commit_under_way(tmp_path: Path) -> None:
    files, sample = HeldFiles(), Sample()
    store = SampleStore.open(tmp_path, files=files)
    with ThreadPoolExecutor() as threads:
        commit = threads.submit(put, store, sample)
        assert files.there.wait(30)
        answer = threads.submit(listed, store)
        files.go.set()
        commit.result()
        as_of, ids = answer.result()
    # Either the commit was over before the question, or the answer came after it.
    assert ids == [sample.sample_id]
    assert as_of >= committed(store, sample)
    store.close()


def test_a_commit_that_takes_too_long_is_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.store.samples._SETTLE_S", 0.0)
    files, sample = HeldFiles(), Sample()
    store = SampleStore.open(tmp_path, files=files)
    with ThreadPoolExecutor() as threads:
        commit = threads.submit(put, store, sample)
        assert files.there.wait(30)
        as_of, ids = listed(store)
        assert ids == []
        files.go.set()
        commit.result()
    assert as_of < committed(store, sample)
    assert store.settled() >= committed(store, sample)
    store.close()


@pytest.mark.files_only
def test_what_another_process_writes_commits_after_it(store: SampleStore) -> None:
    remote, upload = begin(store, Sample())
    as_of = store.settled()
    assert as_of < remote.created_unix_ns
    upload.commit(Sample().rows, Sample().token_ids)
    assert store.settled() > committed(store, Sample()) > as_of
