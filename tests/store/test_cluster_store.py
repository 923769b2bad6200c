"""Samples of several servers as objects in one bucket: what one stores all read, and nothing is left that belongs to nobody."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from store.cluster_kit import World
from store.cluster_kit import world as world
from store.store_kit import Sample, read_all
from support.waiting import wait_until

from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.cluster import failure_shares, uploads
from slotstream.store.cluster.store import ObjectStore
from slotstream.store.records import Failure, SampleSpec, State
from slotstream.store.sample.upload import Upload
from slotstream.store.upkeep.retention import Policy, Reason, Rule
from slotstream.store.upkeep.sweeping import Sweeper
from slotstream.wire.columns import NO_COLUMNS, RowFormat
from slotstream.wire.errors import AlreadyExists, ConfigError, Interrupted, IoError, SampleFailed, SampleNotFound, StillArriving

pytestmark = [pytest.mark.postgres, pytest.mark.objects]
MIB = 1 << 20


def same(store: ObjectStore, sample: Sample) -> bool:
    return read_all(store, sample.key) == (sample.data, sample.token_ids)


def large(rows: int = 20) -> Sample:
    return LargeSample("large", rows)


class LargeSample(Sample):
    """Of rows of a MiB, so that it goes in parts."""

    @property
    def row_bytes(self) -> int:
        return MIB

    def spec(self) -> SampleSpec:
        return replace(super().spec(), layer_ids=(1,), row_format=RowFormat.of("F32", 1, MIB // 4))


def test_what_one_server_stores_the_other_reads(world: World) -> None:
    first, second = world.open(), world.open()
    samples = [Sample(f"s{number}", rows=3 + number, seed=number) for number in range(6)]
    for number, sample in enumerate(samples):
        assert sample.put((first, second)[number % 2]) is False
    for sample in samples:
        assert same(first, sample)
        assert same(second, sample)
    assert len(world.objects()) == 6
    assert first.totals() == second.totals()
    assert first.totals()[State.COMMITTED][0] == 6
    assert [one.damage for one in first.verify_all()] == [""] * 6
    assert world.sql("SELECT * FROM attempts") == []
    listed, _ = second.list_page(ListQuery())
    assert {record.sample_id for record in listed} == {sample.sample_id for sample in samples}


def test_scratch_is_empty_once_all_is_stored(world: World) -> None:
    store = world.open()
    Sample().put(store)
    Sample("t").send(store).abort(Failure("ABORTED", "no"))
    wait_until(lambda: list(store.data_dir.rglob("*.partial")) == [])


def test_rows_of_a_large_sample_are_sent_while_they_arrive(world: World) -> None:
    """In any order of theirs; the part with the header goes last."""
    store = world.open()
    sample = large(rows=30)
    upload = store.open_upload(sample.spec())
    assert isinstance(upload, uploads.ObjectUpload)
    for start, stop in reversed(sample.chunks()):
        sample.write(upload, start, stop)
    assert sorted(upload._sends) == [1, 2]
    wait_until(lambda: all(send.done() for send in upload._sends.values()))
    assert world.objects() == []
    upload.commit(sample.rows, sample.token_ids)
    assert same(world.open(), sample)


def test_a_large_sample_with_fewer_rows_than_it_was_said_to_have(world: World) -> None:
    """Rows that were sent on, and are not among those committed, are not in the object."""
    store = world.open()
    sample, whole = large(rows=18), large(rows=30)
    upload = store.open_upload(replace(whole.spec(), rows_exact=False))
    for start, stop in whole.chunks():
        whole.write(upload, start, stop)
    upload.commit(18, sample.token_ids)
    found, token_ids = read_all(store, sample.key)
    assert (found, token_ids) == (whole.data[: 18 * MIB], sample.token_ids)
    assert [one.damage for one in store.verify_all()] == [""]


def test_the_same_again_is_a_duplicate_and_other_content_is_refused(world: World) -> None:
    first, second = world.open(), world.open()
    sample = Sample(rows=10)
    sample.put(first)
    assert sample.put(second) is True
    assert replace(sample, rows_max=4000, exact=False).put(second) is True  # In another layout.
    with pytest.raises(AlreadyExists):
        Sample(rows=10, seed=1).put(second)
    assert same(second, sample)
    wait_until(lambda: len(world.objects()) == 1)


def test_of_many_at_once_one_is_stored(world: World) -> None:
    """Through two servers: all are told it is stored, or that another has the id, and one object is left."""
    stores = world.open(), world.open()
    for number in range(5):
        samples = [Sample(f"s{number}", seed=seed) for seed in (1, 1, 1, 2, 2, 2)]
        sent = [sample.send(stores[place % 2]) for place, sample in enumerate(samples)]
        with ThreadPoolExecutor(len(sent)) as threads:
            told = list(threads.map(partial(_commit, threading.Barrier(len(sent))), sent, samples))
        assert sorted(told) == ["again", "again", "stored", "taken", "taken", "taken"]
        winner = samples[told.index("stored")]
        assert same(stores[0], winner)
    world.let_pass()  # What was sent may arrive until then.
    wait_until(lambda: world.sql("SELECT * FROM attempts") == [])
    assert len(world.objects()) == 5


def _commit(together: threading.Barrier, upload: Upload, sample: Sample) -> str:
    together.wait()
    try:
        return "again" if upload.commit(sample.rows, sample.token_ids) else "stored"
    except AlreadyExists:
        return "taken"


def test_what_failed_leaves_nothing(world: World) -> None:
    store = world.open()
    sample = large()
    upload = sample.send(store)
    upload.abort(Failure("ABORTED", "the peer gave up"))
    with pytest.raises(SampleFailed, match="the peer gave up"):
        world.open().reader(sample.key)
    wait_until(lambda: world.sql("SELECT * FROM attempts") == [])
    assert world.objects() == []
    blobs = world.blobs()
    assert blobs._uploads("default") == []
    blobs.close()


def test_a_sample_arrives_at_another_server(world: World) -> None:
    first, second = world.open(), world.open()
    sample = Sample()
    upload = sample.send(first)
    wait_until(lambda: second.stat(sample.key) is not None)
    record = second.stat(sample.key)
    assert record is not None
    assert record.state is State.ARRIVING
    with pytest.raises(StillArriving):
        second.reader(sample.key)
    with pytest.raises(StillArriving):
        second.delete(sample.key)
    told: list[object] = []
    second.watch(told.append)
    upload.commit(10, sample.token_ids)
    wait_until(lambda: sample.key in told)
    assert same(second, sample)


# Deletion.


def test_what_is_deleted_is_gone_for_all_and_its_object_a_minute_later(world: World) -> None:
    first, second = world.open(), world.open()
    sample = Sample(rows=20)
    sample.put(first)
    with first.reader(sample.key) as reader:
        second.delete(sample.key)
        for store in (first, second):
            with pytest.raises(SampleNotFound):
                store.reader(sample.key)
        assert b"".join(bytes(piece) for block in reader.blocks(0, 20) for piece in block.data) == sample.data
    world.sweep()
    assert len(world.objects()) == 1
    again = Sample(rows=20, seed=5)
    assert again.put(second) is False  # Its id is free at once.
    world.let_pass()
    world.sweep()
    assert len(world.objects()) == 1
    assert same(first, again)


def test_a_read_that_takes_long_is_waited_for(world: World) -> None:
    first, second = world.open(), world.open()
    sample = Sample(rows=20)
    sample.put(first)
    with first.reader(sample.key) as reader:
        first._keeper.reads._since[reader.record.attempt] -= 1000
        first._keeper.beat()
        second.delete(sample.key)
        world.let_pass()
        world.sweep()
        assert len(world.objects()) == 1
    world.sql("UPDATE holds SET until_unix_ns = 0")
    world.sweep()
    assert world.objects() == []


def test_one_of_them_applies_the_rules(world: World) -> None:
    """The leader, and who leads after it."""
    first, second = world.open(), world.open()
    for number in range(8):
        Sample(f"s{number}", seed=number).put(second)
    wait_until(lambda: first.leads or second.leads)
    leader, other = (first, second) if first.leads else (second, first)
    sweeps = {
        store: Sweeper(store.lifetimes, Policy(default=Rule(samples_max=most)), store.free_bytes)
        for store, most in ((other, 2), (leader, 5))
    }
    sweeps[other].sweep()
    assert leader.totals()[State.COMMITTED][0] == 8
    sweeps[leader].sweep()
    assert leader.totals()[State.COMMITTED][0] == 5
    world.die(leader)
    wait_until(lambda: other.leads)
    sweeps[other].sweep()
    assert other.totals()[State.COMMITTED][0] == 2
    world.let_pass()
    world.sweep()
    assert len(world.objects()) == 2


def test_room_in_the_bucket_is_made_by_the_leader(world: World) -> None:
    first, second = world.open(), world.open()
    for number in range(5):
        Sample(f"s{number}", seed=number).put(second)
    nbytes = first.totals()[State.COMMITTED][1]
    wait_until(lambda: first.leads or second.leads)
    leader = first if first.leads else second
    policy = Policy(default=Rule(delete_when_full=True), free_bytes_target=nbytes // 5, bucket_bytes_max=nbytes)
    assert Sweeper(leader.lifetimes, policy, leader.free_bytes).make_room().samples == {Reason.FREE_SPACE: 1}
    assert {record.sample_id for record in second.list_page(ListQuery())[0]} == {"s1", "s2", "s3", "s4"}


def test_a_peer_has_one_share_of_failed_samples_over_all_servers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = world.open(), world.open()
    monkeypatch.setattr(failure_shares, "_AT_ONCE", 2)
    shares = {store: failure_shares.SharedFailureShares(store._shared, 5, 1e-9) for store in (first, second)}
    for store, own in shares.items():
        monkeypatch.setattr(store, "_failure_shares", own)
    for number in range(8):
        upload = (first, second)[number % 2].open_upload(Sample(f"s{number}").spec(), "rude")
        upload.abort(Failure("ABORTED", "no"))
    first.open_upload(Sample("other").spec(), "polite").abort(Failure("ABORTED", "no"))
    # The one that was left over was taken by one of both.
    wait_until(lambda: world.sql("SELECT 1 FROM samples WHERE state = 'arriving'") == [])
    known = [str(row[0]) for row in world.sql("SELECT sample_id FROM samples WHERE state = 'failed' ORDER BY sample_id")]
    assert "other" in known
    assert len(known) == 6
    # While the catalogue does not answer, each server counts by itself.
    monkeypatch.setattr(first._shared, "take_failures", _away)
    assert [shares[first].take("third") for _ in range(6)] == [True] * 5 + [False]


def _away(*unused: object) -> int:
    raise IoError("the catalogue is away")


def test_a_share_of_failed_samples_grows_again(world: World) -> None:
    catalogue = world.open()._shared
    assert [catalogue.take_failures("p", 4, 10, 0.001) for _ in range(4)] == [4, 4, 2, 0]
    world.sql("UPDATE failure_shares SET at_unix_ns = at_unix_ns - 3000000000000")
    assert catalogue.take_failures("p", 4, 10, 0.001) == 3
    world.sql("UPDATE failure_shares SET at_unix_ns = 0")
    assert catalogue.take_failures("q", 1, 10, 0.001) == 1
    assert len(world.sql("SELECT 1 FROM failure_shares")) == 1  # Who has all of it again is forgotten.
    assert catalogue.take_failures("\x00\ud800", 20, 10, 0.001) == 10


# Servers that are gone.


def test_what_a_dead_server_had_not_sent_whole_is_swept(world: World) -> None:
    first, second = world.open(), world.open()
    sample = large()
    upload = sample.send(first)
    assert isinstance(upload, uploads.ObjectUpload)
    wait_until(lambda: all(send.done() for send in upload._sends.values()))
    world.die(first)
    world.sweep()
    assert second.stat(sample.key).state is State.ARRIVING  # type: ignore[union-attr]
    world.let_pass()
    world.sweep()
    world.let_pass()
    world.sweep()
    record = second.stat(sample.key)
    assert record is not None
    assert (record.state, record.error_code) == (State.FAILED, "INTERRUPTED")
    assert world.sql("SELECT * FROM attempts") == []
    assert sample.put(second) is False
    assert same(second, sample)
    assert len(world.objects()) == 1


@pytest.mark.parametrize("is_free", [True, False])
def test_what_a_dead_server_had_sent_whole_is_a_sample_if_its_id_is_free(world: World, is_free: bool) -> None:
    first, second = world.open(), world.open()
    sample = Sample()
    upload = sample.send(first)
    assert isinstance(upload, uploads.ObjectUpload)
    upload.begun.result()
    record = replace(upload.seal(upload._draft(10, sample.token_ids, {}, NO_COLUMNS)), attempt=upload.attempt)
    upload.finish(record)
    world.die(first)
    other = Sample(seed=7)
    if not is_free:
        other.put(second)
    world.let_pass()
    world.sweep()
    world.let_pass()
    world.sweep()
    assert same(second, sample if is_free else other)
    assert len(world.objects()) == 1
    assert [one.damage for one in second.verify_all()] == [""]


def test_a_server_that_was_taken_for_dead_commits_nothing(world: World) -> None:
    first, second = world.open(), world.open()
    sample = Sample()
    upload = sample.send(first)
    assert isinstance(upload, uploads.ObjectUpload)
    upload.begun.result()
    world.let_pass()
    world.sweep()
    with pytest.raises(Interrupted):
        upload.commit(10, sample.token_ids)
    world.let_pass()
    world.sweep()
    wait_until(lambda: world.objects() == [])
    assert sample.put(second) is False


# Damage, and what is nobody's.


def test_a_damaged_object_is_named_and_another_upload_takes_its_place(world: World) -> None:
    store = world.open()
    sample = Sample()
    sample.put(store)
    (name,) = world.objects()
    blobs = world.blobs()
    opened = blobs.open(name)
    assert opened is not None
    rotten = bytearray(opened.read(0, opened.nbytes))
    rotten[-100] ^= 1
    blobs.put(name, len(rotten), lambda at, nbytes: bytes(rotten[at : at + nbytes])).finish(len(rotten))
    (verdict,) = store.verify_all()
    assert verdict.damage == "HASH_MISMATCH"
    assert sample.put(store) is False
    assert same(store, sample)
    world.let_pass()
    store._keeper.sweep()
    assert len(world.objects()) == 1
    (name,) = world.objects()
    blobs.delete(name)
    (verdict,) = store.verify_all()
    assert verdict.damage == "MISSING"
    assert store.lifetimes.quarantine(verdict) is not None
    with pytest.raises(SampleFailed):
        store.reader(sample.key)
    blobs.close()


def test_what_is_nobodys_is_named_and_stays(world: World) -> None:
    store = world.open()
    Sample().put(store)
    blobs = world.blobs()
    for name in ("default/notes.txt", "default/ab/s.0123.safetensors"):
        blobs.put(name, 5, lambda at, nbytes: b"ours!"[at : at + nbytes]).finish(5)
    found = [one for one in store.verify_all() if one.damage]
    assert [(one.damage, f"{one.namespace}/{one.sample_id}") for one in found] == [
        ("FOREIGN", "default/ab/s.0123.safetensors"),
        ("FOREIGN", "default/notes.txt"),
    ]
    store._keeper.sweep()
    assert len(world.objects()) == 3
    blobs.close()


# Starts.


def test_two_servers_do_not_share_scratch_and_a_start_empties_it(world: World) -> None:
    from slotstream.store.cluster.opening import open_store

    store = world.open()
    with pytest.raises(ConfigError, match="another server is using"):
        open_store(world.store_url, world.catalogue_url, store.data_dir)
    Sample().send(store)
    world.die(store)
    (store.data_dir / "mine.partial").write_text("not a scratch file of a sample")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in world.environment.items():
            patched.setenv(name, value)
        world.stores.append(open_store(world.store_url, world.catalogue_url, store.data_dir))
    assert [path.name for path in store.data_dir.rglob("*.partial")] == ["mine.partial"]
