"""Where there are cores for it, chunks of one sample are written side by side: in any order, and with one verdict."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server_kit import TIMEOUT_S, Peer, Reader, RunningServer, Sample

from slotstream.server.lane import Chunk, Done, Lane, Open, Pools
from slotstream.store.records import Failure
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.errors import HashMismatch, Interrupted
from slotstream.wire.frames import encode_chunk
from slotstream.wire.hashing import xxh3

GROUP_ROWS = 16


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr("slotstream.server.lane._chunk_threads", lambda cores: 4)
    monkeypatch.setattr("slotstream.store.rowhash.GROUP_BYTES", GROUP_ROWS * Sample.row_bytes)
    with RunningServer(tmp_path) as server:
        yield server


def cut(sample: Sample, rng: random.Random) -> list[tuple[int, int]]:
    """Its rows in chunks of one or several hash groups, and now and then of a part of one, in no order."""
    chunks = []
    start = 0
    while start < sample.rows:
        whole = rng.randint(1, 3) * GROUP_ROWS
        stop = min(sample.rows, start + (whole if rng.random() < 0.8 else rng.randint(1, 40)))
        chunks.append((start, stop))
        start = stop
    rng.shuffle(chunks)
    return chunks


@pytest.mark.parametrize("seed", range(4))
def test_samples_whose_chunks_come_in_any_order(running: RunningServer, seed: int) -> None:
    rng = random.Random(seed)
    samples = [Sample(f"s{number}", rows=rng.randint(1, 900), seed=number) for number in range(1, 9)]
    with Peer(running.address) as peer, Reader(running.address) as reader:
        for number, sample in enumerate(samples, 1):
            peer.say(sample.open(number, rows_exact=rng.random() < 0.5))
            chunks = cut(sample, rng)
            peer.say(*(sample.chunk(number, number * 1000 + at, *rows) for at, rows in enumerate(chunks)))
            peer.say(sample.commit(number))
        for _ in samples:
            peer.committed()
        for sample in samples:
            assert reader.read(sample.sample_id)[1] == sample.data
        assert {reply.damage for reply in reader.verify()} == {""}
        # The hashes are those that chunks in order would have got: the same content is a duplicate.
        for number, sample in enumerate(samples, 101):
            assert peer.put(sample, number, chunk_rows=GROUP_ROWS).duplicate


def test_of_many_chunks_some_are_wrong(running: RunningServer) -> None:
    sample = Sample("bad", rows=60 * GROUP_ROWS)
    with Peer(running.address) as peer, Reader(running.address) as reader:
        peer.say(sample.open(1))
        for at in range(60):
            data = sample.part(at * GROUP_ROWS, (at + 1) * GROUP_ROWS)
            header = pb.ChunkHeader(sample=1, chunk=1 + at, first_row=at * GROUP_ROWS, rows=GROUP_ROWS, xxh3=xxh3(data))
            header.xxh3 ^= at in (5, 6, 7, 8, 40)
            peer.say(encode_chunk(header, data))
        peer.say(sample.commit(1))
        assert peer.failed().code == "HASH_MISMATCH"
        assert not peer.put(Sample("good", rows=400), 2).duplicate  # Its verdict is the next one.
        assert reader.state("bad")[1] == "HASH_MISMATCH"
    assert running.metric("samples_total", outcome="failed", code="HASH_MISMATCH") == 1
    assert running.metric("open_samples") == 0
    assert not list(running.config.data_dir.rglob("*.partial"))


def test_an_abort_comes_after_the_chunks_before_it(running: RunningServer) -> None:
    with Peer(running.address) as peer:
        for number in range(1, 30):
            sample = Sample(f"aborted-{number}", rows=8 * GROUP_ROWS)
            peer.say(sample.open(number))
            peer.say(*(sample.chunk(number, number * 100 + at, at * GROUP_ROWS, (at + 1) * GROUP_ROWS) for at in range(8)))
            peer.say(pb.IngestRequest(abort=pb.AbortSample(sample=number, code="ABORTED", message="m")))
        for _ in range(1, 30):
            assert peer.failed().code == "ABORTED"
    assert running.metric("held_bytes") == 0
    assert not list(running.config.data_dir.rglob("*.partial"))


class _Failing:
    """An upload whose first chunk fails, and is the last of four to say so."""

    hash_rows = 1

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self._all_there = threading.Barrier(4)
        self._others = threading.Semaphore(0)

    def write_chunk(self, first_row: int, rows: int, data: memoryview, digest: int) -> None:
        if first_row == 0:
            self.failure = Failure.of(HashMismatch("the first"))
        self._all_there.wait(TIMEOUT_S)
        if first_row:
            raise Interrupted("the sample is not open any more")
        assert self._others.acquire(timeout=TIMEOUT_S)
        raise HashMismatch("the first")

    def said(self) -> None:
        self._others.release()


def test_chunks_that_fail_side_by_side_have_one_verdict_and_the_first_reason() -> None:
    upload: Any = _Failing()
    store: Any = SimpleNamespace(open_upload=lambda spec: upload)
    done: queue.SimpleQueue[Done] = queue.SimpleQueue()

    def post(one: Done) -> None:
        done.put(one)
        if one.acked:
            upload.said()

    pools = Pools(chunk_threads=4)
    lane = Lane(store, pools, 1, None, post)
    spec: Any = None
    lane.push(Open(spec))
    for row in range(4):
        lane.push(Chunk(row, row, 1, memoryview(b""), 0))
    heard = [done.get(timeout=TIMEOUT_S) for _ in range(5)]
    pools.shutdown()
    assert [one.ended.failure.code for one in heard if one.ended and one.ended.failure] == ["HASH_MISMATCH"]
    assert sorted(one.acked for one in heard if one.acked is not None) == [0, 1, 2, 3]
