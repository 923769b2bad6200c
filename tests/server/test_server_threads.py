"""Where there are cores for it, several threads check and write chunks: of one sample in order, and one at a time."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server.server_kit import TIMEOUT_S, Peer, Reader, RunningServer, Sample
from support.files import files_below

from slotstream.server.disk_threads import DiskThreads
from slotstream.server.ingest.sample_writer import Chunk, Commit, Done, Open, SampleWriter
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.errors import HashMismatch
from slotstream.wire.frames import encode_chunk
from slotstream.wire.hashing import xxh3

GROUP_ROWS = 16


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr("slotstream.server.disk_threads.for_cores", lambda most: most)
    monkeypatch.setattr("slotstream.store.sample.row_hash.GROUP_BYTES", GROUP_ROWS * Sample.row_bytes)
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
    assert not files_below(running.config.data_dir, ".partial")


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
    assert not files_below(running.config.data_dir, ".partial")


class _Recording:
    """An upload that notes what is written to it, by whom, and whether by two at a time."""

    def __init__(self, wrong: int | None) -> None:
        self.rows: list[int] = []
        self.found: list[int | None] = []
        self.crowded = False
        self._wrong = wrong
        self._alone = threading.Lock()

    def write_chunk(self, first_row: int, rows: int, data: memoryview, digest: int, found: int | None = None) -> None:
        self.crowded |= not self._alone.acquire(blocking=False)
        self.rows.append(first_row)
        self.found.append(found)
        time.sleep(0.001)  # The others are checked meanwhile.
        self._alone.release()
        if first_row == self._wrong:
            raise HashMismatch("wrong")


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("wrong", [None, 20])
def test_chunks_are_written_in_order_and_checked_ahead(threads: int, wrong: int | None) -> None:
    uploads = [_Recording(wrong) for _ in range(3)]
    unopened = iter(uploads)
    store: Any = SimpleNamespace(open_upload=lambda spec, peer: next(unopened))
    done: queue.SimpleQueue[Done] = queue.SimpleQueue()
    disk_threads = DiskThreads(chunk_threads=threads)
    writers = [SampleWriter(store, disk_threads, number, None, done.put) for number in range(3)]
    spec: Any = None
    for writer in writers:
        writer.push(Open(spec))
        done.get(timeout=TIMEOUT_S)
    for row in range(40):
        for writer in writers:
            data = bytes([row, writer.number]) * 1000
            writer.push(Chunk(row, row, 1, memoryview(data), xxh3(data)))
    heard = [done.get(timeout=TIMEOUT_S) for _ in range(40 * 3)]
    disk_threads.shutdown()
    verdicts = [one.ended.failure.code for one in heard if one.ended and one.ended.failure]
    assert verdicts == ([] if wrong is None else ["HASH_MISMATCH"] * 3)
    for writer, upload in zip(writers, uploads, strict=True):
        assert [one.acked for one in heard if one.writer is writer] == list(range(40))
        written = range(40 if wrong is None else wrong + 1)
        assert upload.rows == list(written)
        assert not upload.crowded
        hashes = [xxh3(bytes([row, writer.number]) * 1000) for row in written]
        assert all(found in (None, expected) for found, expected in zip(upload.found, hashes, strict=True))
        assert any(upload.found)


@pytest.mark.parametrize(("chunk_bytes", "waits"), [(1 << 20, True), (4 << 20, False)])
def test_one_thread_finishes_a_sample_before_it_turns_to_the_next(chunk_bytes: int, waits: bool) -> None:
    """Else all samples of a step are finished when the last one is. Past 64 MiB the others have their turn."""
    data = memoryview(bytes(chunk_bytes))
    digest = xxh3(data)
    begin = threading.Event()
    order: list[int] = []

    def open_upload(number: int, peer: str) -> Any:
        begin.wait(TIMEOUT_S)
        return SimpleNamespace(write_chunk=lambda *_: order.append(number))

    store: Any = SimpleNamespace(open_upload=open_upload)
    done: queue.SimpleQueue[Done] = queue.SimpleQueue()
    disk_threads = DiskThreads(chunk_threads=1)
    disk_threads.disk_speed.note(60.0)  # The event loop leaves all chunks to the thread.
    writers = [SampleWriter(store, disk_threads, number, None, done.put) for number in range(3)]
    for writer in writers:
        number: Any = writer.number
        writer.push(Open(number))
    for row in range(40):
        for writer in writers:
            writer.push(Chunk(row, row, 1, data, digest), chunk_bytes)
    begin.set()
    for _ in range(3 * 41):
        done.get(timeout=TIMEOUT_S)
    disk_threads.shutdown()
    changes = sum(one != other for one, other in itertools.pairwise(order))
    assert (changes == 2) == waits
    assert [order.count(number) for number in range(3)] == [40] * 3


def test_a_commit_does_not_wait_for_chunks_of_other_samples() -> None:
    stuck = threading.Event()
    stored: Any = SimpleNamespace(write_chunk=lambda *_: stuck.wait(TIMEOUT_S), commit=lambda *_: False)
    store: Any = SimpleNamespace(open_upload=lambda spec, peer: stored)
    done: queue.SimpleQueue[Done] = queue.SimpleQueue()
    disk_threads = DiskThreads(chunk_threads=1)
    disk_threads.disk_speed.note(60.0)  # The event loop leaves all chunks to the thread.
    writing, whole = (SampleWriter(store, disk_threads, number, None, done.put) for number in range(2))
    spec: Any = None
    for writer in (writing, whole):
        writer.push(Open(spec))
        assert done.get(timeout=TIMEOUT_S).opened
    writing.push(Chunk(1, 0, 1, memoryview(b"row"), xxh3(b"row")))
    whole.push(Commit(1, [1], {}))
    first = done.get(timeout=TIMEOUT_S)
    stuck.set()
    assert first.writer is whole
    assert first.ended is not None
    assert first.ended.failure is None
    disk_threads.shutdown()
