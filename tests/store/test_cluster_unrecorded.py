"""A failure that the catalogue cannot be told is not the last word: the sender hears nothing, and comes again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from store.store_kit import Sample, read_all, tree
from support.memory_blobs import Bucket, MemoryBlobs
from support.memory_catalogue import MemoryCatalogue
from support.memory_tables import Tables
from support.waiting import wait_until

from slotstream.server.disk_threads import DiskThreads
from slotstream.server.ingest.sample_writer import Abort, Chunk, Done, Ended, Item, Open, Refuse, SampleWriter
from slotstream.server.metrics import Metrics
from slotstream.store.cluster.generation import is_own
from slotstream.store.cluster.opening import open_store
from slotstream.store.cluster.store import ObjectStore
from slotstream.store.records import Failure, SampleRecord, State
from slotstream.store.sample.upload import Upload
from slotstream.wire.errors import HashMismatch, InternalFault, Interrupted, IoError, StoreFull, VerdictUnknown

FAILURE = Failure.of(HashMismatch("the rows are wrong"))
AWAY = IoError("the catalogue cannot be reached")


class AwayCatalogue(MemoryCatalogue):
    """Fails each operation that `fails` has an error for, by its name."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self.fails: dict[str, Exception] = {}

    def _or_failed(self, name: str, ask: Callable[[], Future[bool]]) -> Future[bool]:
        if name not in self.fails:
            return ask()
        failed: Future[bool] = Future()
        failed.set_exception(self.fails[name])
        return failed

    def end(self, attempt: str) -> Future[bool]:
        return self._or_failed("end", lambda: super(AwayCatalogue, self).end(attempt))

    def fail(self, record: SampleRecord, code: str, message: str) -> Future[bool]:
        return self._or_failed("fail", lambda: super(AwayCatalogue, self).fail(record, code, message))


class Pair:
    """One server's store, and what it shares with others."""

    def __init__(self, place: Path) -> None:
        self.tables, self.bucket = Tables(time.time_ns), Bucket()
        self.catalogue = AwayCatalogue(self.tables)
        self.scratch = place / "scratch"
        self.store: ObjectStore = open_store(
            "s3://bucket", "postgresql://somewhere", self.scratch, blobs=MemoryBlobs(self.bucket), catalogue=self.catalogue
        )

    def is_clean(self) -> bool:
        """Nothing of an upload is left in this server."""
        store = self.store
        return not (store._uploads or store._failing or store._keeper._good_until or tree(self.scratch))

    def let_pass(self) -> None:
        for attempt in self.tables.attempts.values():
            attempt.due = 0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    opened = Pair(tmp_path)
    yield opened
    opened.store.close()


@pytest.mark.parametrize("away", [{"end"}, {"fail"}, {"end", "fail"}], ids=lambda away: " and ".join(sorted(away)))
def test_a_failure_that_is_not_recorded_is_not_told(pair: Pair, away: set[str]) -> None:
    sample = Sample()
    upload = sample.send(pair.store)
    pair.catalogue.fails = dict.fromkeys(away, AWAY)
    with pytest.raises(VerdictUnknown, match="cannot be recorded"):
        upload.abort(FAILURE)
    pair.catalogue.fails = {}
    wait_until(pair.is_clean)
    assert sample.put(pair.store) is False
    assert read_all(pair.store, sample.key) == (sample.data, sample.token_ids)


def test_a_chunk_that_fails_its_sample_meanwhile_is_not_told_either(pair: Pair) -> None:
    upload = pair.store.open_upload(Sample().spec())
    pair.catalogue.fails = {"end": AWAY, "fail": AWAY}
    with pytest.raises(VerdictUnknown):
        upload.write_chunk(0, 1, bytes(64), 1)
    wait_until(pair.is_clean)


@pytest.mark.parametrize("away", [{"end"}, {"fail"}, {"end", "fail"}], ids=lambda away: " and ".join(sorted(away)))
def test_where_its_sender_is_gone_too_the_leader_says_that_it_failed(pair: Pair, away: set[str]) -> None:
    sample = Sample()
    upload = sample.send(pair.store)
    pair.catalogue.fails = dict.fromkeys(away, AWAY)
    with pytest.raises(VerdictUnknown):
        upload.abort(FAILURE)
    pair.catalogue.fails = {}
    wait_until(pair.is_clean)

    def is_swept() -> bool:
        pair.let_pass()
        pair.store._keeper.sweep()
        return not pair.tables.attempts

    wait_until(is_swept)
    assert pair.store.stat(sample.key).state is State.FAILED  # type: ignore[union-attr]
    assert [one for one in pair.bucket.objects if not is_own(one)] == []


def test_a_refusal_that_is_not_recorded_is_not_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.catalogue.fails = {"fail": AWAY}
    with pytest.raises(VerdictUnknown):
        pair.store.record_failed(SampleRecord.refused(Sample().key, "m", 1), FAILURE)
    monkeypatch.setattr(pair.store, "_uploads_max", 0)
    with pytest.raises(VerdictUnknown):
        pair.store.open_upload(Sample().spec())
    assert pair.is_clean()
    pair.catalogue.fails = {}
    with pytest.raises(StoreFull):
        pair.store.open_upload(Sample().spec())
    assert pair.store.stat(Sample().key).state is State.FAILED  # type: ignore[union-attr]


def test_what_no_repetition_helps_is_told(pair: Pair) -> None:
    upload = Sample().send(pair.store)
    pair.catalogue.fails = {"end": InternalFault("a fault"), "fail": InternalFault("a fault")}
    assert upload.abort(FAILURE)
    wait_until(pair.is_clean)


def test_a_server_that_stops_meanwhile_stops(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for number in range(3):
        Sample(f"s{number}").send(pair.store)
    pair.catalogue.fails = {"end": AWAY, "fail": AWAY}
    pair.store.close()
    assert pair.is_clean()


def test_what_is_left_of_uploads_is_counted(pair: Pair) -> None:
    def told() -> list[float | None]:
        pair.store._keeper.beat()
        registry = Metrics(pair.store).registry
        attempts = [
            registry.get_sample_value("slotstream_attempts", {"state": state}) for state in ("arriving", "ended", "late")
        ]
        return [registry.get_sample_value("slotstream_scratch_bytes"), *attempts]

    assert told() == [0, 0, 0, 0]
    sample = Sample()
    upload = sample.send(pair.store)
    assert told() == [sum(tree(pair.scratch).values()), 1, 0, 0]
    assert told()[0] > len(sample.data)  # type: ignore[operator]
    pair.catalogue.fails = {"fail": AWAY}
    with pytest.raises(VerdictUnknown):
        upload.abort(FAILURE)
    pair.catalogue.fails = {}
    wait_until(pair.is_clean)
    assert told() == [0, 0, 1, 0]
    pair.store._keeper.trouble = "the bucket is away"
    state = pair.store.shared_state()
    assert (state.bucket, state.catalogue, state.trouble) == (
        "a bucket in memory",
        "a catalogue in memory",
        "the bucket is away",
    )


class Written:
    """A `SampleWriter`, and what it ended with."""

    def __init__(self, store: Any) -> None:
        self._threads = DiskThreads()
        self._done: list[Done] = []
        self.writer = SampleWriter(store, self._threads, 1, Sample().key, self._done.append)

    @property
    def ended(self) -> Ended | None:
        return next((done.ended for done in self._done if done.ended is not None), None)

    def close(self) -> Ended:
        wait_until(lambda: self.ended is not None)
        self._threads.shutdown()
        assert self.ended is not None
        return self.ended


def test_a_writer_ends_with_a_word_that_is_not_to_be_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.catalogue.fails = {"end": AWAY, "fail": AWAY}
    refused = SampleRecord.refused(Sample().key, "m", 1)
    cases: list[list[Item]] = [
        [Open(Sample().spec()), Abort(FAILURE)],
        [Open(Sample().spec()), Chunk(0, 0, 1, memoryview(bytes(64)), 1)],
        [Refuse(refused, FAILURE)],
    ]
    for items in cases:
        written = Written(pair.store)
        for item in items:
            written.writer.push(item)
        ended = written.close()
        assert (ended.failure.code if ended.failure else "", ended.is_known) == (Interrupted.code, False)

    def breaks(*arguments: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Upload, "write_chunk", breaks)
    for is_away in (True, False):
        pair.catalogue.fails = {"end": AWAY, "fail": AWAY} if is_away else {}
        written = Written(pair.store)
        written.writer.push(Open(Sample().spec()))
        written.writer.push(Chunk(0, 0, 1, memoryview(bytes(64)), 1))
        ended = written.close()
        assert (ended.failure.code if ended.failure else "", ended.is_known) == (InternalFault.code, not is_away)
