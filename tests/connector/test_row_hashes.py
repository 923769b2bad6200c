"""Hashes come in the order of their buffers, from any thread."""

from __future__ import annotations

import random
import threading

import pytest

from slotstream.connector.sending import row_hashes as digests
from slotstream.wire.hashing import xxh3

LARGE = 1 << 20


def buffers(*sizes: int) -> list[memoryview]:
    rng = random.Random(0)
    return [memoryview(rng.randbytes(size)) for size in sizes]


@pytest.mark.parametrize("cores", [1, 2, 8, 64])
@pytest.mark.parametrize("sizes", [(), (1,), (0, 5, 9), (LARGE, 1, 3 * LARGE, LARGE, 0, LARGE)], ids=str)
def test_hashes_come_in_order(cores: int, sizes: tuple[int, ...]) -> None:
    hashes = digests.Digests(cores)
    given = buffers(*sizes)
    for _ in range(3):
        assert list(hashes.of(given)) == [xxh3(buffer) for buffer in given]
    hashes.close()


@pytest.mark.parametrize(
    ("cores", "sizes", "elsewhere"),
    [(64, (2 * LARGE, 2 * LARGE), True), (64, (2 * LARGE, LARGE), False), (7, (2 * LARGE, 2 * LARGE), False)],
)
def test_threads_hash_where_there_are_cores_and_enough_to_do(
    monkeypatch: pytest.MonkeyPatch, cores: int, sizes: tuple[int, ...], elsewhere: bool
) -> None:
    threads = set()

    def note(buffer: memoryview) -> int:
        threads.add(threading.current_thread())
        return xxh3(buffer)

    monkeypatch.setattr(digests, "xxh3", note)
    hashes = digests.Digests(cores)
    assert len(list(hashes.of(buffers(*sizes)))) == 2
    hashes.close()
    assert (threading.current_thread() not in threads) == elsewhere
