"""What every store of objects does, by each one there is. A line of `BLOBS` an implementation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.memory_blobs import Bucket, MemoryBlobs

from slotstream.store.blobs.base import Blobs, Put
from slotstream.wire.errors import Interrupted

MIB = 1 << 20


def _s3(monkeypatch: pytest.MonkeyPatch) -> Blobs:
    from support.seaweedfs import object_store

    from slotstream.store.blobs.s3.bucket import S3Blobs

    store = object_store()
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    return S3Blobs(store.bucket())


def _memory(monkeypatch: pytest.MonkeyPatch) -> Blobs:
    return MemoryBlobs(Bucket())


BLOBS: dict[str, Callable[[pytest.MonkeyPatch], Blobs]] = {"s3": _s3, "memory": _memory}


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.objects), "memory"])
def blobs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Blobs]:
    opened = BLOBS[request.param](monkeypatch)
    yield opened
    opened.close()


def content(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def begun(blobs: Blobs, key: str, data: bytes, bytes_max: int = 0) -> Put:
    return blobs.put(key, bytes_max or len(data), lambda at, nbytes: data[at : at + nbytes])


def stored(blobs: Blobs, key: str, nbytes: int = 1000) -> bytes:
    data = content(nbytes)
    begun(blobs, key, data).finish(nbytes)
    return data


def read(blobs: Blobs, key: str) -> bytes | None:
    opened = blobs.open(key)
    return None if opened is None else opened.read(0, opened.nbytes)


def test_what_is_put_is_read(blobs: Blobs) -> None:
    """Also by ranges, and no further than it goes."""
    data = stored(blobs, "n/ab/a.x", 3 * MIB)
    opened = blobs.open("n/ab/a.x")
    assert opened is not None
    assert opened.nbytes == len(data)
    for at, nbytes in ((0, 8), (7, 1), (MIB - 3, MIB), (3 * MIB - 1, 1), (0, 3 * MIB)):
        assert opened.read(at, nbytes) == data[at : at + nbytes]
        assert opened.view(at, nbytes) == data[at : at + nbytes]
    assert opened.read(3 * MIB - 5, 100) == opened.view(3 * MIB - 5, 100) == data[-5:]
    assert opened.read(3 * MIB, 1) == opened.view(3 * MIB, 1) == b""
    opened.close()


def test_keys_are_taken_as_they_are(blobs: Blobs) -> None:
    for number, key in enumerate(("n/a b+c%2F&=?.x", "n/ü€.x", "n/a.b.c~-_.x")):
        begun(blobs, key, content(10, number)).finish(10)
    for number, key in enumerate(("n/a b+c%2F&=?.x", "n/ü€.x", "n/a.b.c~-_.x")):
        assert read(blobs, key) == content(10, number)
    assert sorted(one.key for one in blobs.list("n/")) == sorted(("n/a b+c%2F&=?.x", "n/ü€.x", "n/a.b.c~-_.x"))


def test_what_is_not_there_is_not_there(blobs: Blobs) -> None:
    assert blobs.open("none") is None
    assert blobs.checksum("none") is None
    assert list(blobs.list("none")) == []
    blobs.delete("none")
    blobs.abort("none")
    stored(blobs, "some/thing")
    assert blobs.open("some") is None
    assert blobs.open("some/thing/more") is None


def test_what_is_deleted_is_gone(blobs: Blobs) -> None:
    stored(blobs, "a")
    stored(blobs, "ab")
    blobs.delete("a")
    assert blobs.open("a") is None
    assert [one.key for one in blobs.list()] == ["ab"]


def test_the_store_says_how_large_an_object_is_and_what_it_sums_to(blobs: Blobs) -> None:
    stored(blobs, "a", 1000)
    begun(blobs, "b", content(1000, 1)).finish(1000)
    first, second = blobs.checksum("a"), blobs.checksum("b")
    assert first is not None
    assert second is not None
    assert (first.nbytes, second.nbytes) == (1000, 1000)
    assert first.checksum
    assert first.checksum != second.checksum


def test_a_list_has_all_pages_in_order(blobs: Blobs) -> None:
    def put(number: int) -> None:
        begun(blobs, f"n/{number:04}", b"x" * (1 + number % 7)).finish(1 + number % 7)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(put, range(1005)))
    begun(blobs, "o/1", b"x").finish(1)
    found = [(one.key, one.nbytes) for one in blobs.list("n/")]
    assert found == [(f"n/{number:04}", 1 + number % 7) for number in range(1005)]


def test_a_small_one_is_swapped_for_the_one_that_is_named(blobs: Blobs) -> None:
    assert blobs.get_small("g") is None
    assert not blobs.swap("g", b"none", "an-other")
    assert blobs.swap("g", b"1", "")
    assert not blobs.swap("g", b"2", "")
    first = blobs.get_small("g")
    assert first is not None
    assert first.data == b"1"
    assert blobs.swap("g", b"2", first.tag)
    assert not blobs.swap("g", b"3", first.tag)
    second = blobs.get_small("g")
    assert second is not None
    assert second.data == b"2"
    blobs.delete("g")
    assert not blobs.swap("g", b"3", second.tag)
    assert blobs.get_small("g") is None


def test_of_several_that_swap_at_once_one_does(blobs: Blobs) -> None:
    assert blobs.swap("g", b"0", "")
    with ThreadPoolExecutor(8) as threads:
        for turn in range(10):
            there = blobs.get_small("g")
            assert there is not None
            tag = there.tag
            did = list(threads.map(lambda n: blobs.swap("g", f"{turn}-{n}".encode(), tag), range(8)))  # noqa: B023
            found = blobs.get_small("g")
            assert found is not None
            assert (did.count(True), found.data) == (1, f"{turn}-{did.index(True)}".encode())


# In parts.


def test_parts_are_sent_in_any_order_and_at_once(blobs: Blobs) -> None:
    data = content(3 * 8 * MIB + 12345)
    put = begun(blobs, "large", data)
    assert put.part_bytes == 8 * MIB
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(put.send, (2, 1)))
    assert blobs.open("large") is None
    put.finish(len(data))
    assert read(blobs, "large") == data


def test_an_object_may_become_shorter_than_it_was_said_to(blobs: Blobs) -> None:
    """What was sent too early is sent again, or left out."""
    early = bytearray(content(5 * 8 * MIB))
    put = blobs.put("short", len(early), lambda at, nbytes: bytes(early[at : at + nbytes]))
    for number in (1, 2, 3):
        put.send(number)
    nbytes = 2 * 8 * MIB + 500
    early[nbytes - 400 : nbytes] = b"c" * 400
    put.forget(nbytes - 400)
    put.finish(nbytes)
    assert read(blobs, "short") == bytes(early[:nbytes])


def test_one_that_fits_a_part_after_all(blobs: Blobs) -> None:
    data = content(20 * MIB)
    put = begun(blobs, "small", data)
    put.send(1)
    put.forget(MIB)
    put.finish(MIB)
    assert read(blobs, "small") == data[:MIB]


def test_of_what_is_given_up_nothing_stays(blobs: Blobs) -> None:
    data = content(20 * MIB)
    put = begun(blobs, "given-up", data)
    put.abort()
    put.send(1)
    put.abort()
    finished = begun(blobs, "finished", data)
    finished.finish(len(data))
    finished.abort()
    assert list(blobs.list()) == []


def test_others_may_give_up_what_was_begun(blobs: Blobs) -> None:
    """As for a server that died: who was sending finds nothing to finish."""
    data = content(20 * MIB)
    put, other = begun(blobs, "theirs", data), begun(blobs, "theirs-too", data)
    put.send(1)
    other.send(1)
    blobs.abort("theirs")
    with pytest.raises(Exception, match="object store"):
        put.finish(len(data))
    assert blobs.open("theirs") is None
    other.finish(len(data))
    assert read(blobs, "theirs-too") == data


def uploads_to(blobs: Any, key: str) -> int:
    """That go on."""
    if isinstance(blobs, MemoryBlobs):
        return sum(one == key for one, _ in blobs._bucket.uploads)
    return len(blobs._uploads(key))


def test_what_must_not_be_sent_leaves_not_even_an_upload(blobs: Blobs) -> None:
    """Of a server that stood still: those who removed what it had sent do not look again. A random machine found it."""
    data = content(20 * MIB)

    def too_late() -> None:
        raise Interrupted("this may have been removed already")

    put = blobs.put("late", len(data), lambda at, nbytes: data[at : at + nbytes], too_late)
    with pytest.raises(Interrupted):
        put.send(1)
    assert uploads_to(blobs, "late") == 0
    other = begun(blobs, "early", data)
    other.send(1)
    assert uploads_to(blobs, "early") == 1
    other.abort()


def test_it_is_checked_what_can_be_done(blobs: Blobs) -> None:
    stored(blobs, "a")
    blobs.check()
    assert [one.key for one in blobs.list()] == ["a"]
