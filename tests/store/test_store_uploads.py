"""Writing: what is stored, what is refused, and that the file is plain safetensors."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from store.store_kit import CHUNK_ROWS, Sample, read_all, stored
from support.sqlite_of import sqlite_of

from slotstream.store.records import Failure, SampleRecord, SampleSpec, State
from slotstream.store.sample.upload import Upload
from slotstream.store.samples import SampleStore
from slotstream.wire import errors
from slotstream.wire.columns import RowFormat
from slotstream.wire.hashing import xxh3
from slotstream.wire.names import METADATA_BYTES_MAX


def _told(record: SampleRecord) -> dict[str, str]:
    """The metadata that the connector sent: without what the store counted itself."""
    return {k: v for k, v in record.metadata.items() if k not in ("chunks", "first_chunk_unix_ns")}


def test_a_sample_comes_back_as_it_went_in(store: SampleStore) -> None:
    sample = Sample(tags={"run": "a"}, metadata={"engine": "e1"})
    assert store.stat(sample.key) is None
    upload = sample.send(store)
    arriving = store.stat(sample.key)
    assert arriving is not None
    assert (arriving.state, arriving.num_tokens, arriving.file_bytes) == (State.ARRIVING, 10, 0)
    assert upload.commit(10, sample.token_ids, {"hits": "3"}) is False
    record = store.stat(sample.key)
    assert record is not None
    assert (record.state, record.model, record.dtype, record.layer_ids) == (State.COMMITTED, "m", "F32", (3, 7))
    assert (record.hidden_size, record.num_tokens) == (8, 10)
    assert (record.tags, _told(record)) == ({"run": "a"}, {"engine": "e1", "hits": "3"})
    assert 0 < record.created_unix_ns <= record.committed_unix_ns
    assert read_all(store, sample.key) == (sample.data, sample.token_ids)
    assert stored(store) == {f"default/{sample.key.shard}/s.safetensors": record.file_bytes}


@pytest.mark.files_only
def test_a_sample_is_known_at_every_moment_of_its_failure(store: SampleStore) -> None:
    """Its rows of the catalogue are queued behind slow work: neither that it arrived nor that it failed is written yet."""
    sample, goes_on = Sample(), threading.Event()
    slow = sqlite_of(store).submit(lambda db: goes_on.wait(30))
    with ThreadPoolExecutor(1) as pool:
        try:
            upload = sample.send(store)
            ending = pool.submit(upload.abort, Failure("ABORTED", "the engine aborted it"))
            while store.is_arriving(sample.key):
                assert not ending.done()
            record = store.stat(sample.key)
            assert record is not None
            assert (record.state, record.error_code) == (State.FAILED, "ABORTED")
        finally:
            goes_on.set()
        ending.result()
        assert slow.result()
    assert store.stat(sample.key) == record


@pytest.mark.files_only
def test_the_file_is_plain_safetensors(store: SampleStore) -> None:
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    sample = Sample(rows=9, rows_max=40, exact=False)
    sample.put(store)
    tensors = load_file(sample.path(store))
    assert set(tensors) == {"hidden_states", "token_ids"}
    assert tensors["hidden_states"].shape == (9, 2, 8)
    assert tensors["hidden_states"].dtype == torch.float32
    assert tensors["hidden_states"].numpy().tobytes() == sample.data
    assert tensors["token_ids"].tolist() == sample.token_ids


@pytest.mark.files_only
def test_the_file_describes_itself(store: SampleStore) -> None:
    sample = Sample(tags={"k": "v"}, metadata={"engine": "e", "model": "spoofed", "hashes": "spoofed"})
    sample.put(store)
    raw = sample.path(store).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert (8 + length) % 4096 == 0
    said = json.loads(raw[8 : 8 + length])["__metadata__"]
    assert said["format"] == "pt"
    assert (said["namespace"], said["sample_id"], said["model"], said["engine"]) == ("default", "s", "m", "e")
    assert (json.loads(said["layer_ids"]), json.loads(said["tags"])) == ([3, 7], {"k": "v"})
    assert said["hash_rows"] == "4"
    assert said["hashes"][:16] == f"{xxh3(sample.data[:256]):016x}"
    record = store.stat(sample.key)
    assert record is not None
    assert _told(record) == {"engine": "e"}
    assert record.metadata["chunks"] == "4"
    assert record.created_unix_ns <= int(record.metadata["first_chunk_unix_ns"]) <= record.committed_unix_ns


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "order",
    [
        pytest.param(lambda chunks: chunks[::-1], id="backwards"),
        pytest.param(lambda chunks: chunks * 2, id="every chunk twice"),
        pytest.param(lambda chunks: [(0, 10), *chunks], id="all at once and then again"),
        pytest.param(lambda chunks: [(2, 5), (0, 4), (4, 10)], id="overlapping"),
        pytest.param(lambda chunks: [(9, 10), (1, 9), (0, 1)], id="odd ones"),
    ],
)
def test_order_and_repetition_of_chunks_do_not_matter(
    store: SampleStore, order: Callable[[list[tuple[int, int]]], list[tuple[int, int]]], exact: bool
) -> None:
    sample = Sample(exact=exact)
    sample.put(store, order(sample.chunks()))
    assert read_all(store, sample.key) == (sample.data, sample.token_ids)
    assert store.verify(sample.key).damage == ""


def test_rows_that_arrive_first_stay(store: SampleStore) -> None:
    sample = Sample()
    upload = sample.send(store)
    replace(sample, seed=9).write(upload, 3, 9)
    upload.commit(10, sample.token_ids)
    assert read_all(store, sample.key)[0] == sample.data
    assert store.verify(sample.key).damage == ""


def test_rows_beyond_the_committed_ones_are_cut_off(store: SampleStore) -> None:
    sample = Sample(rows=10)
    upload = sample.send(store)
    upload.commit(6, sample.token_ids[:6])
    assert read_all(store, sample.key) == (sample.data[: 6 * 64], sample.token_ids[:6])
    assert store.verify(sample.key).damage == ""


def test_the_same_content_again_is_stored_once(store: SampleStore) -> None:
    sample = Sample()
    assert sample.put(store) is False
    before = store.stat(sample.key)
    assert sample.put(store, sample.chunks()[::-1]) is True
    assert replace(sample, exact=False, rows_max=1000, tags={"other": "tags"}).put(store) is True
    assert store.stat(sample.key) == before
    assert len(stored(store)) == 1


def test_the_same_content_hashed_in_other_groups_is_the_same_content(
    store: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Sample().put(store)
    monkeypatch.setattr("slotstream.store.sample.row_hash.GROUP_BYTES", 64)
    assert Sample().put(store) is True
    with pytest.raises(errors.AlreadyExists):
        Sample(seed=1).put(store)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Sample(seed=1), id="rows"),
        pytest.param(Sample(rows=9), id="length"),
        pytest.param(Sample(layer_ids=(3, 8)), id="layers"),
    ],
)
def test_other_content_under_a_stored_id_is_refused(store: SampleStore, other: Sample) -> None:
    sample = Sample()
    sample.put(store)
    with pytest.raises(errors.AlreadyExists):
        other.put(store)
    assert read_all(store, sample.key) == (sample.data, sample.token_ids)
    record = store.stat(sample.key)
    assert record is not None
    assert record.state is State.COMMITTED
    assert len(stored(store)) == 1


def test_other_token_ids_are_other_content(store: SampleStore) -> None:
    Sample().put(store)
    upload = Sample().send(store)
    with pytest.raises(errors.AlreadyExists):
        upload.commit(10, range(10, 20))


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)], ids=["same content", "other content"])
def test_of_two_uploads_of_one_id_one_is_stored(store: SampleStore, seeds: tuple[int, int]) -> None:
    for attempt in range(10):
        samples = [Sample(f"s{attempt}", seed=seed) for seed in seeds]
        uploads = [sample.send(store) for sample in samples]

        def commit(at: int, samples: list[Sample] = samples, uploads: list[Upload] = uploads) -> object:
            try:
                return uploads[at].commit(10, samples[at].token_ids)
            except errors.AlreadyExists as error:
                return error.code

        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(commit, range(2)))
        second = True if seeds[0] == seeds[1] else "ALREADY_EXISTS"
        assert sorted(outcomes, key=str) == sorted([False, second], key=str)
        winner = samples[outcomes.index(False)]
        assert read_all(store, winner.key) == (winner.data, winner.token_ids)
        assert store.verify(winner.key).damage == ""
    assert len(stored(store)) == 10


def test_a_failure_does_not_hide_another_upload_or_a_committed_sample(store: SampleStore) -> None:
    first, second = Sample().send(store), Sample().send(store)
    first.abort(Failure("SLOT_MISMATCH", "no"))
    record = store.stat(Sample().key)
    assert record is not None
    assert record.state is State.ARRIVING
    second.commit(10, Sample().token_ids)
    third = Sample().send(store)
    third.abort(Failure("SLOT_MISMATCH", "no"))
    record = store.stat(Sample().key)
    assert record is not None
    assert record.state is State.COMMITTED


def test_a_failed_sample_says_why_and_can_be_sent_again(store: SampleStore) -> None:
    sample = Sample()
    upload = sample.send(store)
    assert upload.abort(Failure("SLOT_MISMATCH", "slots differ")) is True
    assert upload.abort(Failure("OTHER", "too late")) is False
    record = store.stat(sample.key)
    assert record is not None
    assert (record.state, record.error_code, record.error_message) == (State.FAILED, "SLOT_MISMATCH", "slots differ")
    assert stored(store) == {}
    with pytest.raises(errors.SampleFailed) as failed:
        store.reader(sample.key)
    assert failed.value.reason == "SLOT_MISMATCH"
    for late in (lambda: sample.write(upload, 0, 3), lambda: upload.commit(10, sample.token_ids)):
        with pytest.raises(errors.Interrupted):
            late()
    sample.put(store)
    record = store.stat(sample.key)
    assert record is not None
    assert (record.state, record.error_code) == (State.COMMITTED, "")


def _chunk(first: int, rows: int, nbytes: int, digest: int | None = None) -> Callable[..., None]:
    data = bytes(nbytes)
    return lambda upload: upload.write_chunk(first, rows, data, xxh3(data) if digest is None else digest)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        pytest.param(_chunk(0, 1, 64, digest=1), errors.HashMismatch, id="hash"),
        pytest.param(_chunk(0, 0, 0), errors.BadChunk, id="no rows"),
        pytest.param(_chunk(8, 3, 192), errors.BadChunk, id="past the end"),
        pytest.param(_chunk(0, 2, 100), errors.BadChunk, id="length"),
        pytest.param(lambda u: u.commit(10, range(10)), errors.MissingRows, id="no rows sent"),
        pytest.param(lambda u: u.commit(0, []), errors.BadParams, id="no rows committed"),
        pytest.param(lambda u: u.commit(10, range(9)), errors.BadParams, id="token ids"),
    ],
)
def test_what_is_wrong_fails_the_sample_and_leaves_nothing(
    store: SampleStore, act: Callable[..., None], error: type[errors.SlotStreamError]
) -> None:
    upload = store.open_upload(Sample().spec())
    with pytest.raises(error):
        act(upload)
    record = store.stat(Sample().key)
    assert record is not None
    assert (record.state, record.error_code) == (State.FAILED, error.code)
    assert stored(store) == {}


def test_missing_rows_are_named(store: SampleStore) -> None:
    upload = Sample().send(store, [(0, 2), (4, 5), (7, 10)])
    with pytest.raises(errors.MissingRows, match=r"\[2, 4\), \[5, 7\) of 10"):
        upload.commit(10, range(10))


def test_token_ids_outside_int64_are_refused(store: SampleStore) -> None:
    upload = Sample().send(store)
    with pytest.raises(errors.BadParams, match=r"2\*\*63"):
        upload.commit(10, [1 << 63] * 10)


def test_metadata_has_a_limit_over_open_and_commit(store: SampleStore) -> None:
    half = {"a": "x" * (METADATA_BYTES_MAX // 2 - 1)}
    fits, past = {"b": "y" * (METADATA_BYTES_MAX // 2 - 1)}, {"b": "y" * (METADATA_BYTES_MAX // 2)}
    sample = Sample(metadata=half)
    assert sample.send(store).commit(10, sample.token_ids, fits) is False
    record = store.stat(sample.key)
    assert record is not None
    assert _told(record) == half | fits
    other = Sample("t", metadata=half)
    upload = other.send(store)
    with pytest.raises(errors.TooLarge, match="metadata"):
        upload.commit(10, other.token_ids, past)
    with pytest.raises(errors.TooLarge, match="metadata"):
        Sample(metadata=half | past).spec()


def test_metadata_that_json_makes_longer_fits_or_is_refused_but_never_breaks_the_file(store: SampleStore) -> None:
    for at, text in enumerate(("\x00" * METADATA_BYTES_MAX, '"' * (METADATA_BYTES_MAX - 10), "é" * 4000, "\U0001f600" * 4000)):
        known = Sample(f"known{at}", metadata={"k": text[: METADATA_BYTES_MAX - 1]})
        assert known.put(store) is False
        late = Sample(f"late{at}")
        upload = late.send(store)
        try:
            upload.commit(10, late.token_ids, {"k": text[: METADATA_BYTES_MAX - 1]})
        except errors.TooLarge:
            assert store.stat(late.key) is not None
        else:
            assert read_all(store, late.key)[0] == late.data
        assert store.verify(known.key).damage == ""


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"namespace": ""}, errors.BadNamespace),
        ({"namespace": "../up"}, errors.BadNamespace),
        ({"sample_id": ".hidden"}, errors.BadSampleId),
        ({"sample_id": "a/b"}, errors.BadSampleId),
        ({"model": "m" * 1025}, errors.TooLarge),
        ({"dtype": "I8"}, errors.BadParams),
        ({"layer_ids": ()}, errors.BadLayers),
        ({"layer_ids": (1, 1)}, errors.BadLayers),
        ({"layer_ids": tuple(range(1025))}, errors.BadLayers),
        ({"hidden_size": 0}, errors.BadParams),
        ({"hidden_size": 1 << 30}, errors.TooLarge),
        ({"rows_max": 0}, errors.BadParams),
        ({"rows_max": (1 << 21) + 1}, errors.TooLarge),
        ({"tags": {"": "x"}}, errors.BadTags),
        ({"metadata": {"k": "x" * METADATA_BYTES_MAX}}, errors.TooLarge),
    ],
)
def test_a_malformed_announcement_has_a_stable_code(change: dict[str, Any], error: type[Exception]) -> None:
    spec: dict[str, Any] = {
        "namespace": "n",
        "sample_id": "s",
        "model": "m",
        "dtype": "F32",
        "layer_ids": (1,),
        "hidden_size": 8,
        "rows_max": 4,
    }
    _announced(**spec)
    with pytest.raises(error):
        _announced(**{**spec, **change})


def _announced(dtype: str, layer_ids: tuple[int, ...], hidden_size: int, **others: Any) -> SampleSpec:
    return SampleSpec(layer_ids=layer_ids, row_format=RowFormat.of(dtype, len(layer_ids), hidden_size), **others)


def test_rows_in_too_many_pieces_fail_the_sample(store: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotstream.store.sample.upload._RANGES_MAX", 3)
    with pytest.raises(errors.TooLarge, match="separate ranges"):
        Sample(rows=20).send(store, [(row, row + 1) for row in range(0, 20, 2)])


def test_only_so_many_samples_may_arrive_at_a_time(tmp_path: Path) -> None:
    store = SampleStore.open(tmp_path, uploads_max=2)
    uploads = [Sample(f"s{n}").send(store) for n in range(2)]
    with pytest.raises(errors.StoreFull, match="arriving already"):
        Sample("s2").send(store)
    uploads[0].commit(10, Sample().token_ids)
    Sample("s2").put(store)
    store.close()
    assert (tmp_path / "catalog.sqlite").exists()


@pytest.mark.files_only
def test_files_and_directories_are_not_for_everybody(store: SampleStore) -> None:
    sample = Sample()
    sample.put(store)
    path = sample.path(store)
    assert path.stat().st_mode & 0o137 == 0
    assert all(directory.stat().st_mode & 0o027 == 0 for directory in (path.parent, path.parent.parent, store.data_dir))


def test_deleting(store: SampleStore) -> None:
    sample = Sample()
    with pytest.raises(errors.SampleNotFound):
        store.delete(sample.key)
    upload = sample.send(store)
    with pytest.raises(errors.StillArriving):
        store.delete(sample.key)
    upload.commit(10, sample.token_ids)
    reader = store.reader(sample.key)
    store.delete(sample.key)
    assert store.stat(sample.key) is None
    assert stored(store) == {}
    # A reader that was there first reads on.
    assert b"".join(bytes(p) for block in reader.blocks(0, 10) for p in block.data) == sample.data
    reader.close()
    assert replace(sample, seed=4).put(store) is False
    failed = Sample("f").send(store)
    failed.abort(Failure("X", "x"))
    store.delete(Sample("f").key)
    assert store.stat(Sample("f").key) is None


def test_totals_follow(store: SampleStore) -> None:
    Sample("a").put(store)
    Sample("b").put(store)
    Sample("c").send(store).abort(Failure("X", "x"))
    store.delete(Sample("b").key)
    record = store.stat(Sample("a").key)
    assert record is not None
    totals = store.totals()
    assert totals[State.COMMITTED] == (1, record.file_bytes)
    assert (totals[State.FAILED], totals[State.ARRIVING]) == ((1, 0), (0, 0))


def test_chunks_from_many_threads(store: SampleStore) -> None:
    sample = Sample(rows=200)
    upload = store.open_upload(sample.spec())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: sample.write(upload, *pair), pairwise(range(0, 201, CHUNK_ROWS + 1))))
    upload.commit(200, sample.token_ids)
    assert read_all(store, sample.key) == (sample.data, sample.token_ids)
    assert store.verify(sample.key).damage == ""
