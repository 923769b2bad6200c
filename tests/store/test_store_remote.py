"""Samples whose rows another process writes: an upload of this one stands in for it, and asks the store for the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from store.store_kit import BROKEN, FaultyFiles, Sample, read_all, tree

from slotstream.store.disk.files import Files
from slotstream.store.records import Failure, State
from slotstream.store.sample.remote import RemoteUpload
from slotstream.store.sample.upload import Draft, OpenSample, Upload
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import AlreadyExists, Interrupted, IoError

GONE = Failure.of(Interrupted("the peer is gone"))


def begin(store: SampleStore, sample: Sample) -> tuple[RemoteUpload, Upload]:
    """What the owner of the catalogue has of a sample, and what its writer has, with all rows written."""
    remote = store.open_remote(sample.spec())

    def publish(upload: OpenSample, draft: Draft) -> bool:
        return remote.commit(upload.seal(draft), draft.content)

    upload = Upload(
        sample.spec(),
        store.data_dir,
        Files(),
        0,
        publish,
        lambda upload, failure: None,
        lambda: remote.created_unix_ns,
        remote.partial.name,
    )
    for start, stop in sample.chunks():
        sample.write(upload, start, stop)
    return remote, upload


def put(store: SampleStore, sample: Sample) -> bool:
    return begin(store, sample)[1].commit(sample.rows, sample.token_ids)


@pytest.mark.files_only
def test_it_is_stored_like_any_other(store: SampleStore) -> None:
    sample = Sample(tags={"a": "b"}, metadata={"c": "d"})
    assert put(store, sample) is False
    assert read_all(store, sample.key) == (sample.data, sample.token_ids)
    record = store.stat(sample.key)
    assert record is not None
    assert (record.state, record.tags, record.metadata["c"]) == (State.COMMITTED, {"a": "b"}, "d")
    assert store.verify(sample.key).damage == ""
    assert len(tree(store.data_dir)) == 1


@pytest.mark.files_only
@pytest.mark.parametrize("group_bytes", [256, 64, 1024])
def test_the_same_content_is_a_duplicate_however_it_is_hashed(
    store: SampleStore, monkeypatch: pytest.MonkeyPatch, group_bytes: int
) -> None:
    assert put(store, Sample()) is False
    monkeypatch.setattr("slotstream.store.sample.row_hash.GROUP_BYTES", group_bytes)
    assert put(store, Sample()) is True
    with pytest.raises(AlreadyExists):
        put(store, Sample(seed=1))
    assert read_all(store, Sample().key) == (Sample().data, Sample().token_ids)
    assert len(tree(store.data_dir)) == 1


@pytest.mark.parametrize("operation", ["rename", "sync_dir"])
def test_a_commit_that_the_disk_refuses_fails_it_and_leaves_no_file(tmp_path: Path, operation: str) -> None:
    files = FaultyFiles()
    store = SampleStore.open(tmp_path, files=files)
    _, upload = begin(store, Sample())
    files.faults = {operation: (0, BROKEN)}
    with pytest.raises(IoError):
        upload.commit(10, Sample().token_ids)
    files.faults = {}
    record = store.stat(Sample().key)
    assert record is not None
    assert (record.state, record.error_code) == (State.FAILED, "IO_ERROR")
    assert tree(tmp_path) == {}
    assert put(store, Sample()) is False
    store.close()


@pytest.mark.files_only
def test_a_sample_ends_once(store: SampleStore) -> None:
    remote, upload = begin(store, Sample())
    assert remote.abort(GONE)
    assert not remote.abort(GONE)
    assert tree(store.data_dir) == {}
    with pytest.raises(Interrupted):
        upload.commit(10, Sample().token_ids)
    record = store.stat(Sample().key)
    assert record is not None
    assert (record.state, record.error_code) == (State.FAILED, "INTERRUPTED")
