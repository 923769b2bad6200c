"""Engines that go away in the middle: what a sender is told stays true, and nothing is left that belongs to nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest
from store.cluster_kit import World
from store.store_kit import Sample
from store.test_cluster_store import large, same
from support.postgres import cluster
from support.s3_proxy import LOST, Answer, S3Proxy
from support.seaweedfs import object_store
from support.waiting import wait_until

from slotstream.store.blobs.s3 import requests
from slotstream.store.cluster.store import ObjectStore
from slotstream.store.cluster.uploads import ObjectUpload
from slotstream.store.records import SampleRecord, State
from slotstream.wire.errors import AlreadyExists, Interrupted, IoError, StoreFull, StoreGone, VerdictUnknown

pytestmark = [pytest.mark.postgres, pytest.mark.objects]


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    monkeypatch.setattr(requests, "_PAUSES_S", (0.01, 0.01))
    with S3Proxy(object_store().endpoint) as between:
        yield between


@pytest.fixture
def world(tmp_path: Path, proxy: S3Proxy) -> Iterator[World]:
    opened = World(tmp_path, proxy.endpoint)
    yield opened
    opened.close()


def swept(world: World, store: ObjectStore) -> bool:
    world.let_pass()
    with suppress(IoError):
        store._keeper.sweep()
    return world.sql("SELECT 1 FROM attempts") == []


@pytest.mark.parametrize(
    ("answer", "told"),
    [(Answer(500, "InternalError"), IoError), (LOST, IoError), (Answer(507, "InsufficientStorage"), StoreFull)],
)
@pytest.mark.parametrize("reaches", [False, True])
def test_a_bucket_that_is_away_at_the_commit(
    world: World, proxy: S3Proxy, answer: Answer, told: type[Exception], reaches: bool
) -> None:
    """The sample failed, also where the object got there all the same; sent again it is stored."""
    store = world.open()
    sample = Sample()
    upload = sample.send(store)
    proxy.plan("PUT", "/default/", *[answer] * (1 if told is StoreFull else 3), reaches=reaches)
    with pytest.raises(told):
        upload.commit(10, sample.token_ids)
    record = store.stat(sample.key)
    assert record is not None
    assert record.state is State.FAILED
    wait_until(lambda: swept(world, store))
    assert world.objects() == []
    assert store.stat(sample.key).state is State.FAILED  # type: ignore[union-attr]
    assert sample.put(store) is False
    assert same(store, sample)


def test_parts_that_could_not_be_sent_are_sent_by_the_commit(world: World, proxy: S3Proxy) -> None:
    store = world.open()
    sample = large(30)
    proxy.plan("PUT", "partNumber=2", *[Answer(503, "SlowDown")] * 3)
    upload = sample.send(store)
    upload.commit(30, sample.token_ids)
    assert same(store, sample)
    assert [one.damage for one in store.verify_all()] == [""]


def test_an_upload_whose_end_nobody_told(world: World, proxy: S3Proxy) -> None:
    """The object is there, and its sender was told that it failed: it goes."""
    store = world.open()
    sample = large(30)
    upload = sample.send(store)
    proxy.plan("POST", "uploadId=", *[LOST] * 9, reaches=True)
    with pytest.raises(IoError):
        upload.commit(30, sample.token_ids)
    wait_until(lambda: swept(world, store))
    assert world.objects() == []
    assert store.stat(sample.key).state is State.FAILED  # type: ignore[union-attr]


def test_a_request_that_arrives_after_its_repetition(world: World, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given up and sent again, and the sample lost its id to another one: what comes late is removed, too."""
    monkeypatch.setattr(requests, "_ANSWER_S", 2)
    store, second = world.open(), world.open()
    winner, loser = Sample(seed=1), Sample(seed=2)
    upload, other = loser.send(store), winner.send(second)
    may_arrive = threading.Event()
    first = [True]

    def hold(line: str) -> None:
        if line.startswith("PUT /") and "/default/" in line and first:
            first.clear()
            other.commit(10, winner.token_ids)
            may_arrive.wait(60)

    proxy.before = hold
    with pytest.raises(AlreadyExists):
        upload.commit(10, loser.token_ids)
    world.stores.remove(store)
    store.close()  # What it cleans at once is cleaned.
    may_arrive.set()
    wait_until(lambda: len(world.objects()) == 2)
    wait_until(lambda: swept(world, second))
    assert len(world.objects()) == 1
    assert same(second, winner)


def test_a_catalogue_that_is_away_at_the_commit_leaves_it_open(world: World, proxy: S3Proxy) -> None:
    """The object is whole, so the leader makes a sample of it: nobody may be told that it failed."""
    store = world.open()
    sample = Sample()
    upload = sample.send(store)
    assert isinstance(upload, ObjectUpload)
    upload.begun.result()
    killed: list[bool] = []

    def kill(line: str) -> None:
        if line.startswith("PUT /") and "/default/" in line and not killed:
            killed.append(True)
            cluster().kill()

    proxy.before = kill
    try:
        with pytest.raises(VerdictUnknown):
            upload.commit(10, sample.token_ids)
    finally:
        cluster().start()
    wait_until(lambda: swept(world, store))
    assert same(store, sample)
    assert len(world.objects()) == 1
    assert sample.put(store) is True


def test_what_the_leader_committed_for_a_server_that_slept_is_what_that_server_stored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = world.open()
    wait_until(lambda: second.leads)
    first = world.open()
    sample = Sample()
    upload = sample.send(first)
    commit = first._shared.commit

    def late(record: SampleRecord) -> Future[SampleRecord | None]:
        world.let_pass()
        second._keeper.sweep()
        assert same(second, sample)
        return commit(record)

    monkeypatch.setattr(first._shared, "commit", late)
    assert upload.commit(10, sample.token_ids) is False
    assert same(first, sample)
    assert len(world.objects()) == 1


def test_a_server_that_could_not_renew_sends_nothing(world: World, proxy: S3Proxy) -> None:
    store = world.open()
    sample = Sample()
    upload = sample.send(store)
    assert isinstance(upload, ObjectUpload)
    store._keeper._good_until[upload.attempt] = 0
    proxy.seen.clear()
    with pytest.raises(Interrupted, match="may have expired"):
        upload.commit(10, sample.token_ids)
    assert not [line for line in proxy.seen if line.startswith("PUT")]


def test_a_server_without_its_engines_says_so_until_they_are_back(world: World, proxy: S3Proxy) -> None:
    store = world.open()
    store.check_directory()
    proxy.plan("GET", ".slotstream-generation", *[Answer(503)] * 9)
    with pytest.raises(IoError):
        store._keeper.beat()
    store._keeper.trouble = "the object store does not answer"
    with pytest.raises(StoreGone, match="does not answer"):
        store.check_directory()


def test_one_object_that_cannot_be_removed_does_not_keep_others(world: World, proxy: S3Proxy) -> None:
    store = world.open()
    samples = [Sample(f"s{number}", seed=number) for number in range(5)]
    for sample in samples:
        sample.put(store)
    for sample in samples:
        store.delete(sample.key)
    stuck = world.objects()[2]
    proxy.plan("DELETE", stuck, *[Answer(403, "AccessDenied")] * 9)
    world.let_pass()  # From here on the store itself may sweep, too.
    with pytest.raises(IoError, match="AccessDenied"):
        store._keeper.sweep()
    assert world.objects() == [stuck]
    assert len(world.sql("SELECT 1 FROM attempts")) == 1
