"""The samples of a data directory, copied into a bucket and a catalogue: as they are, once, and beside a running server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from store.cluster_kit import World
from store.cluster_kit import world as world
from store.store_kit import Sample, read_all
from support.ingest_client import IngestClient
from support.s3_proxy import Answer, S3Proxy
from support.seaweedfs import object_store
from support.server import ServerProcess, run_cli
from support.synthetic import SyntheticSample

from slotstream.client import connect
from slotstream.store.catalogue.queries import ListQuery
from slotstream.store.cluster.copying import Copied, Copy
from slotstream.store.cluster.opening import opened_pair
from slotstream.store.cluster.store import ObjectStore
from slotstream.store.directory.looking import opened_to_read
from slotstream.store.records import Failure, SampleKey, SampleRecord, State
from slotstream.store.samples import SampleStore
from slotstream.wire.errors import ConfigError, IoError

pytestmark = [pytest.mark.postgres, pytest.mark.objects]
MIB = 1 << 20


@pytest.fixture
def local(tmp_path: Path) -> Iterator[SampleStore]:
    opened = SampleStore.open(tmp_path / "data")
    yield opened
    opened.close()


def copy(world: World, data_dir: Path, namespace: str = "") -> Copied:
    with opened_to_read(data_dir) as source, pytest.MonkeyPatch.context() as patched:
        for name, value in world.environment.items():
            patched.setenv(name, value)
        with opened_pair(world.store_url, world.catalogue_url) as (blobs, catalogue):
            return Copy(source, data_dir, catalogue, blobs).run(namespace)


def listing(store: SampleStore) -> list[SampleRecord]:
    found, _ = store.list_page(ListQuery(page_size=100))
    return [replace(record, attempt="") for record in found if record.state is State.COMMITTED]


def same(store: ObjectStore, *samples: Sample) -> bool:
    return all(read_all(store, sample.key) == (sample.data, sample.token_ids) for sample in samples)


def test_all_of_it_goes_as_it_is(world: World, local: SampleStore, tmp_path: Path) -> None:
    samples = [
        Sample(f"s{number}", seed=number, rows=3 + number, tags={"n": str(number % 2)}, metadata={"engine_id": f"e{number}"})
        for number in range(9)
    ]
    for sample in samples:
        sample.put(local)
    Sample("failed").send(local).abort(Failure("ABORTED", "no"))
    open_still = Sample("arriving").send(local)
    local._catalogue.count_reads([(samples[2].key, listing_of(local, samples[2].key).committed_unix_ns)]).result()
    assert local._catalogue.ack(samples[3].key)
    acked = local._catalogue.standing(samples[3].key).acked_unix_ns
    before = listing(local)

    done = copy(world, tmp_path / "data")
    assert (done.copied, done.same, done.gone, done.left) == (9, 0, 0, [])
    assert done.nbytes == sum(record.file_bytes for record in before)
    store = world.open()
    assert listing(store) == before
    assert same(store, *samples)
    assert store._shared.standing(samples[2].key).reads == 1
    assert store._shared.standing(samples[3].key).acked_unix_ns == acked
    assert len(world.objects()) == 9
    assert world.sql("SELECT * FROM attempts") == []
    assert [one.damage for one in store.verify_all()] == [""] * 9

    # Again: what is new goes, and an ack that came since.
    open_still.commit(Sample("arriving").rows, Sample("arriving").token_ids)
    assert local._catalogue.ack(samples[4].key)
    done = copy(world, tmp_path / "data")
    assert (done.copied, done.same) == (1, 9)
    assert listing(store) == listing(local)
    assert store._shared.standing(samples[4].key).acked_unix_ns
    assert len(world.objects()) == 10


def listing_of(store: SampleStore, key: SampleKey) -> SampleRecord:
    record = store.stat(key)
    assert record is not None
    return record


def test_what_does_not_go_is_named(world: World, local: SampleStore, tmp_path: Path) -> None:
    rotten, missing, taken, well = (Sample(name, seed=seed) for seed, name in enumerate(("rotten", "missing", "taken", "well")))
    for sample in (rotten, missing, taken, well):
        sample.put(local)
    path = rotten.path(local)
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    missing.path(local).unlink()
    store = world.open()
    other = replace(taken, seed=99)
    other.put(store)
    words = ("copy", "--data", str(tmp_path / "data"), "--store", world.store_url, "--catalogue", world.catalogue_url)
    said = run_cli(*words, environment=world.environment)
    assert said.returncode == 1
    assert sorted(line.split(": ")[0] for line in said.stdout.splitlines()) == [
        "default/missing",
        "default/rotten",
        "default/taken",
    ]
    assert "another sample has its id there" in said.stdout
    assert "1 samples were copied" in said.stderr
    assert same(store, well, other)
    assert len(world.objects()) == 2
    # Once the file is what it was, it goes.
    path.write_bytes(sound)
    assert copy(world, tmp_path / "data").copied == 1
    assert same(store, rotten)


def test_one_namespace_alone(world: World, local: SampleStore, tmp_path: Path) -> None:
    Sample("a").put(local)
    other = Sample("b", namespace="other")
    other.put(local)
    assert copy(world, tmp_path / "data", "other").copied == 1
    assert same(world.open(), other)


def test_it_goes_beside_a_server_that_takes_samples(world: World, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, IngestClient(server.address) as sender, connect(server.address) as client:
        samples = [SyntheticSample(f"s{number}", seed=number) for number in range(20)]
        sender.store(*samples[:10])
        first = copy(world, tmp_path / "data")
        assert first.copied == 10
        sender.store(*samples[10:])
        client.delete("s0")
        second = copy(world, tmp_path / "data")
        assert (second.copied, second.same, second.left) == (10, 9, [])
    store = world.open()
    assert len(listing(store)) == 20  # What was deleted here after it went stays there.


def test_what_is_cut_off_is_swept_and_goes_the_next_time(world: World, local: SampleStore, tmp_path: Path) -> None:
    samples = [Sample(f"s{number}", seed=number) for number in range(4)]
    for sample in samples:
        sample.put(local)
    with S3Proxy(object_store().endpoint) as proxy:
        proxy.plan("PUT", "/default/", *[Answer(403, "AccessDenied")] * 1)
        through = World(tmp_path / "through", proxy.endpoint)
        through.store_url, through.catalogue_url = world.store_url, world.catalogue_url
        with pytest.raises(IoError, match="AccessDenied"):
            copy(through, tmp_path / "data")
    assert copy(world, tmp_path / "data").left == []
    store = world.open()
    assert same(store, *samples)
    world.let_pass()
    world.sweep()
    assert world.sql("SELECT * FROM attempts") == []
    assert len(world.objects()) == 4


def test_what_is_no_data_directory_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no data directory"):
        copy(world, tmp_path)
    assert list(tmp_path.iterdir()) == []
