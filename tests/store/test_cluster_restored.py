"""A catalogue that is older than the bucket: a real dump is restored, or all of it is gone. Nothing acknowledged is deleted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from store.cluster_kit import World
from store.cluster_kit import world as world
from store.store_kit import Sample, read_all
from support.postgres import catalogue_url, cluster
from support.server import run_cli
from support.waiting import wait_until

from slotstream.server.metrics import Metrics
from slotstream.store.blobs.s3.bucket import S3Blobs
from slotstream.store.catalogue.queries import ListQuery, Queue
from slotstream.store.cluster import generation, rebuilding
from slotstream.store.cluster.opening import opened_pair
from slotstream.store.cluster.rebuilding import Outcome, Plan, Rebuild
from slotstream.store.cluster.store import ObjectStore
from slotstream.store.records import Failure, SampleKey, SampleRecord, State
from slotstream.wire.errors import SampleFailed, SampleNotFound, StoreGone

pytestmark = [pytest.mark.postgres, pytest.mark.objects]


def same(store: ObjectStore, *samples: Sample) -> bool:
    return all(read_all(store, sample.key) == (sample.data, sample.token_ids) for sample in samples)


def leader_of(*stores: ObjectStore) -> ObjectStore:
    wait_until(lambda: any(store._shared.lead() for store in stores))
    return next(store for store in stores if store._shared.lead())


def half_a_minute(leader: ObjectStore) -> None:
    assert leader._generations.raise_both(leader._shared.lead())


def rebuilt(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, Outcome]:
    monkeypatch.setattr(rebuilding, "_RENEWED_S", 0.1)
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    with opened_pair(world.store_url, world.catalogue_url) as (blobs, catalogue):
        rebuild = Rebuild(catalogue, blobs)
        plan = rebuild.plan()
        return plan, rebuild.carry_out(plan)


def told(store: ObjectStore) -> tuple[float | None, float | None]:
    """What the metrics say: whether it leads, and whether its catalogue is behind."""
    registry = Metrics(store).registry
    leads, behind = (registry.get_sample_value(f"slotstream_{name}") for name in ("leads", "catalogue_behind"))
    return leads, behind


@contextmanager
def opened(world: World) -> Iterator[S3Blobs]:
    blobs = world.blobs()
    yield blobs
    blobs.close()


def listing(store: ObjectStore) -> list[SampleRecord]:
    """But for what the catalogue alone knows."""
    found, token = store.list_page(ListQuery(page_size=100))
    assert token == ""
    return [record for record in found if record.state is State.COMMITTED]


@pytest.mark.parametrize("are_expired", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_dump_that_was_taken_while_samples_arrived(
    world: World, monkeypatch: pytest.MonkeyPatch, are_expired: bool, goes_on: bool
) -> None:
    """`goes_on`: its servers run over the restoration."""
    first, second = world.open(), world.open()
    before, gone, again = Sample("before"), Sample("gone", seed=1), Sample("again", seed=2)
    for sample in (before, gone, again):
        sample.put(first)
    during, twice = Sample("during", seed=3), Sample("twice", seed=4)
    sent = [(sample, sample.send(second)) for sample in (during, twice)]
    for _, upload in sent:
        upload.begun.result()  # type: ignore[attr-defined]
    dump = cluster().dump(world.catalogue_url)

    for sample, upload in sent:
        upload.commit(sample.rows, sample.token_ids)
    after = Sample("after", seed=5)
    after.put(second)
    first.delete(gone.key)
    first.delete(again.key)
    newer = replace(again, seed=6)
    newer.put(second)
    leader = leader_of(first, second)
    half_a_minute(leader)
    world.let_pass()
    assert leader._keeper.sweep() == 2
    acknowledged = set(world.objects())
    assert len(acknowledged) == 5

    if not goes_on:
        world.die(first)
        world.die(second)
    cluster().restore(world.catalogue_url, dump)
    if are_expired:
        world.let_pass()
    if not goes_on:
        first, second = world.open(), world.open()
    for store in (first, second):
        store._keeper.beat()
        assert store.is_behind
        for record in listing(store):
            with pytest.raises(StoreGone, match="slotstream rebuild"):
                store.delete(record.key)
        candidates = store._shared.candidates(Queue.OLDEST, before.namespace, (-1, -1), 10)
        assert candidates
        assert store.lifetimes.delete_unused(candidates) == []
        store.lifetimes.finish_deletions()
    # They read, and take samples: also under an id that the catalogue does not know of.
    assert same(first, before)
    late, other = Sample("late", seed=7), replace(twice, seed=8)
    late.put(first)
    other.put(second)
    leader = leader_of(first, second)
    for turn in range(3):
        assert leader._keeper.sweep() == 0
        assert set(world.objects()) >= acknowledged
        if turn:
            world.let_pass()
    assert not leader._generations.raise_both(leader._shared.lead())

    plan, outcome = rebuilt(world, monkeypatch)
    assert plan.is_behind
    assert {record.sample_id for record in plan.lost} == {"gone", "again"}
    assert (outcome.added, outcome.dropped) == (3, 1)
    assert [why for _, why in outcome.left] == [f"another sample has the id {twice.key}"]
    for store in (first, second):
        store._keeper.beat()
        assert same(store, before, during, after, newer, late, other)
        with pytest.raises(SampleNotFound):
            store.reader(gone.key)
    # And with time the leader deletes again, and none of what was acknowledged.
    half_a_minute(leader)
    first.delete(late.key)
    for _ in range(3):
        world.let_pass()
        leader._keeper.sweep()
    assert not [name for name in world.objects() if "/late." in name]
    assert set(world.objects()) >= acknowledged
    assert [verdict.damage for verdict in first.verify_all()].count("") == 5


@pytest.mark.parametrize("are_expired", [False, True])
def test_one_that_is_restored_before_anybody_can_tell(world: World, are_expired: bool) -> None:
    """Within half a minute of its dump: what it has as arriving is committed, since it is whole."""
    store = world.open()
    Sample("first").put(store)
    wait_until(lambda: not store._generations.is_due())  # The first of its term.
    sample = Sample("during", seed=3)
    upload = sample.send(store)
    upload.begun.result()  # type: ignore[attr-defined]
    dump = cluster().dump(world.catalogue_url)
    upload.commit(sample.rows, sample.token_ids)
    world.die(store)
    cluster().restore(world.catalogue_url, dump)
    store = world.open()
    if are_expired:
        world.let_pass()
    store._keeper.sweep()
    assert len(world.objects()) == 2
    assert not store.is_behind
    if are_expired:
        assert same(store, sample)


def test_a_catalogue_that_is_gone_is_rebuilt_to_the_same_listing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = world.open()
    samples = [
        Sample(f"s{number}", seed=number, rows=3 + number, tags={"n": str(number % 3)}, metadata={"engine_id": f"e{number}"})
        for number in range(12)
    ]
    for sample in samples:
        sample.put(store)
    Sample("failed").send(store).abort(Failure("ABORTED", "no"))
    with pytest.raises(SampleFailed):
        store.reader(SampleKey("default", "failed"))
    half_a_minute(store)
    before, tagged = listing(store), store.list_page(ListQuery(tags={"n": "1"}))[0]
    totals = store.totals()[State.COMMITTED]
    world.die(store)
    with opened(world) as blobs:
        blobs.swap("default/not-a-sample", b"x", "")
        blobs.swap(f"default/{SampleKey('default', 'broken').shard}/broken.0123456789abcdef.safetensors", b"x" * 100, "")

    world.catalogue_url = catalogue_url()
    store = world.open()
    assert listing(store) == []
    assert store.is_behind
    assert told(store) == (0, 1)
    words = ("rebuild", "--store", world.store_url, "--catalogue", world.catalogue_url)
    said = run_cli(*words, "--dry-run", environment=world.environment)
    assert said.returncode == 0, said.stderr
    assert "13 objects" in said.stdout
    assert "Nothing was changed." in said.stderr
    said = run_cli(*words, environment=world.environment)
    assert (said.returncode, "say --yes" in said.stderr) == (2, True), said.stderr
    assert listing(store) == []
    said = run_cli(*words, "--yes", environment=world.environment)
    assert said.returncode == 1, said.stderr
    assert "12 samples were committed again" in said.stderr
    assert "default/not-a-sample" in said.stdout
    assert "broken.0123456789abcdef" in said.stderr

    store._keeper.beat()
    assert not store.is_behind
    wait_until(lambda: told(store) == (1, 0))
    assert listing(store) == before
    assert store.list_page(ListQuery(tags={"n": "1"}))[0] == tagged
    assert store.totals()[State.COMMITTED] == totals
    assert same(store, *samples)
    # Once more, there is nothing to do.
    said = run_cli(*words, "--yes", environment=world.environment)
    assert "12 samples are the same" in said.stdout
    half_a_minute(store)


def test_a_catalogue_that_is_as_old_as_the_bucket_is_compared_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous standby took over, and lacks some commits: they come back. Nothing is dropped."""
    store = world.open()
    kept, lost, damaged = Sample("kept"), Sample("lost", seed=1), Sample("damaged", seed=2)
    for sample in (kept, lost, damaged):
        sample.put(store)
    arriving = Sample("arriving", seed=3).send(store)
    arriving.begun.result()  # type: ignore[attr-defined]
    record = store.stat(damaged.key)
    assert record is not None
    world.sql("DELETE FROM samples WHERE sample_id = 'lost'")
    with opened(world) as blobs:
        blobs.delete(f"{damaged.key.namespace}/{damaged.key.shard}/{damaged.key.sample_id}.{record.attempt}.safetensors")
    plan, outcome = rebuilt(world, monkeypatch)
    assert (plan.is_behind, plan.same, plan.objects) == (False, 1, 1)
    assert [one.key for one in plan.lost] == [damaged.key]
    assert (outcome.added, outcome.dropped, outcome.left) == (1, 0, [])
    assert same(store, kept, lost)
    arriving.commit(Sample("arriving").rows, Sample("arriving", seed=3).token_ids)


def test_a_bucket_of_another_catalogue_is_left_alone(world: World) -> None:
    """Two that were given one bucket by mistake."""
    first = world.open()
    Sample("mine").put(first)
    half_a_minute(first)
    other = World(first.data_dir / "other")
    other.store_url = world.store_url
    store = other.open()
    assert store.is_behind
    Sample("theirs").put(store)
    other.let_pass()
    assert store._keeper.sweep() == 0
    with pytest.raises(StoreGone):
        store.delete(Sample("theirs").key)
    other.close()
    half_a_minute(first)


def test_what_says_no_generation_stops_deletions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = world.open()
    half_a_minute(store)
    with opened(world) as blobs:
        there = blobs.get_small(generation.KEY)
        assert there is not None
        assert json.loads(there.data)["number"] == store._shared.generation().number
        assert blobs.swap(generation.KEY, b"what", there.tag)
    assert not store._generations.raise_both(store._shared.lead())
    assert store.is_behind
    rebuilt(world, monkeypatch)
    half_a_minute(store)


def test_who_does_not_lead_begins_no_generation(world: World) -> None:
    store = world.open()
    wait_until(lambda: not store._generations.is_due())
    term = store._shared.lead()
    number = store._shared.generation().number
    assert not store._generations.raise_both(term + 1)
    assert not store._generations.raise_both(0)
    assert store._shared.generation().number == number
