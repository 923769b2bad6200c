"""How objects are read: in few requests, with bounded memory, and all of it also where a connection ends in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from store.test_blobs_conformance import MIB, stored
from support.s3_proxy import LOST, Answer, S3Proxy
from support.seaweedfs import object_store

from slotstream.store.blobs.s3 import bucket, requests
from slotstream.store.blobs.s3.bucket import S3Blobs
from slotstream.store.blobs.s3.reading import Room, S3Blob

pytestmark = pytest.mark.objects
_HEAD = 4096
_BLOCK = 2 * MIB


@pytest.fixture
def proxy() -> Iterator[S3Proxy]:
    with S3Proxy(object_store().endpoint) as between:
        yield between


@pytest.fixture
def blobs(proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Blobs]:
    for name, value in object_store().environment(endpoint=proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(requests, "_PAUSES_S", (0.01, 0.01))
    opened = S3Blobs(object_store().bucket())
    yield opened
    opened.close()


def opened(blobs: S3Blobs, key: str = "a", *, all_of_it: bool = True) -> S3Blob:
    found = blobs.open(key, all_of_it=all_of_it)
    assert found is not None
    return found


def as_a_sample(blob: S3Blob) -> bytes:
    """Its header, its end, and then its rows in order."""
    head, end = blob.read(0, _HEAD), blob.read(blob.nbytes - 100, 100)
    rows = b"".join(blob.read(at, min(_BLOCK, blob.nbytes - at)) for at in range(_HEAD, blob.nbytes, _BLOCK))
    assert rows.endswith(end)
    return head + rows


def asked(proxy: S3Proxy) -> int:
    return sum(line.startswith("GET") for line in proxy.seen)


@pytest.mark.parametrize(("nbytes", "most"), [(10_000, 1), (4 * MIB, 1), (8 * MIB, 1), (8 * MIB + 1, 3), (50 * MIB, 4)])
def test_a_sample_takes_few_requests(blobs: S3Blobs, proxy: S3Proxy, nbytes: int, most: int) -> None:
    data = stored(blobs, "a", nbytes)
    blob = opened(blobs)
    assert as_a_sample(blob) == data
    blob.close()
    assert asked(proxy) <= most


def test_what_is_read_from_its_middle_on_is_in_order_too(blobs: S3Blobs, proxy: S3Proxy) -> None:
    data = stored(blobs, "a", 40 * MIB)
    blob = opened(blobs)
    middle = 20 * MIB + 5
    assert b"".join(blob.read(at, _BLOCK) for at in range(middle, len(data), _BLOCK)) == data[middle:]
    assert asked(proxy) <= 3
    assert blob.read(7 * MIB, MIB) == data[7 * MIB : 8 * MIB]
    blob.close()


def test_memory_for_small_ones_is_bounded_and_given_back(
    blobs: S3Blobs, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "_room", Room(9 * MIB))
    data = stored(blobs, "a", 4 * MIB)
    held = [opened(blobs) for _ in range(5)]
    assert sum(len(blob._first) > MIB for blob in held) == 2
    assert [as_a_sample(blob) == data for blob in held] == [True] * 5
    for blob in held:
        blob.close()
        blob.close()
    assert blobs._room.take(9 * MIB)
    assert not blobs._room.take(1)


def test_a_look_takes_no_memory(blobs: S3Blobs) -> None:
    stored(blobs, "a", 4 * MIB)
    blob = opened(blobs, all_of_it=False)
    assert blobs._room.take(bucket._ROOM_BYTES)
    blob.close()


@pytest.mark.parametrize("nbytes", [4 * MIB, 30 * MIB])
@pytest.mark.parametrize("cut", [1, MIB // 4, 3 * MIB])
def test_an_answer_that_ends_early_is_asked_for_again(blobs: S3Blobs, proxy: S3Proxy, nbytes: int, cut: int) -> None:
    data = stored(blobs, "a", nbytes)
    proxy.plan("GET", "/a", Answer(0, cut=cut), LOST, Answer(0, cut=cut), Answer(503, "SlowDown"))
    blob = opened(blobs)
    assert as_a_sample(blob) == data
    blob.close()
    assert blobs._room.take(bucket._ROOM_BYTES)


def test_several_threads_read_one(blobs: S3Blobs) -> None:
    data = stored(blobs, "a", 24 * MIB)
    blob = opened(blobs)
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda at: blob.read(at, MIB + 3), range(0, len(data), MIB + 3))
    assert b"".join(found) == data
    blob.close()


def test_connections_are_used_again(blobs: S3Blobs) -> None:
    stored(blobs, "a", 4 * MIB)
    stored(blobs, "b", 20 * MIB)
    pools = blobs._requests._pool.pools
    for _ in range(5):
        for key in ("a", "b"):
            blob = opened(blobs, key)
            as_a_sample(blob)
            blob.close()
    assert [pools[key].num_connections for key in pools.keys()] <= [3]  # noqa: SIM118  # A container of urllib3's own.
