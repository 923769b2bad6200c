"""One stream's opens and one sample's disk hold nobody else up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from server.server_kit import COMMITTED, Peer, Reader, RunningServer, Sample
from support.waiting import wait_until

from slotstream.server.lines import Lines, NarrowLines
from slotstream.store.disk.files import Files
from slotstream.store.samples import SampleStore
from slotstream.v1 import samples_pb2

WAIT_S = 60.0


def test_lines_are_served_in_turn_and_each_in_order() -> None:
    with ThreadPoolExecutor(1) as pool:
        lines, goes_on, done = Lines(pool), threading.Event(), list[str]()
        pool.submit(goes_on.wait, WAIT_S)
        for line in ("aaaaa", "bb", "c"):
            for number, name in enumerate(line):
                lines.submit(name, lambda name=name, number=number: done.append(f"{name}{number}"))  # type: ignore[misc]
        goes_on.set()
    assert done == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


class _HangingFiles(Files):
    """Opening a sample, and reading one that is stored, wait while the disk `hangs`."""

    def __init__(self) -> None:
        self.works = threading.Event()
        self.works.set()
        self.hangs_below = ""
        self.hanging = 0
        self.opens: list[str] = []

    def create(self, path: Path) -> int:
        self.opens.append(path.name.partition(".")[0])
        assert self.works.wait(WAIT_S)
        return super().create(path)

    def open_read(self, path: Path) -> int:
        if path.suffix == ".safetensors" and self.hangs_below in str(path) and not self.works.is_set():
            self.hanging += 1
            assert self.works.wait(WAIT_S)
        return super().open_read(path)


@pytest.fixture
def files() -> _HangingFiles:
    return _HangingFiles()


@pytest.fixture
def running(tmp_path: Path, files: _HangingFiles) -> Iterator[RunningServer]:
    with RunningServer(tmp_path / "data", store=SampleStore.open(tmp_path / "data", files=files)) as server:
        yield server


def test_a_flood_of_opens_lets_another_streams_sample_through(running: RunningServer, files: _HangingFiles) -> None:
    """On one thread: its open comes second, however many wait."""
    flood = [Sample(f"flood-{number}") for number in range(500)]
    with Peer(running.address) as greedy, Peer(running.address) as modest:
        files.works.clear()
        greedy.say(*(sample.open(number) for number, sample in enumerate(flood, 1)))
        wait_until(lambda: running.metric("open_samples") == len(flood))
        before = len(files.opens)
        modest.say(Sample("modest").open(1))
        wait_until(lambda: running.metric("open_samples") == len(flood) + 1)
        files.works.set()
        wait_until(lambda: "modest" in files.opens)
        threads = running.server._ingest._shared.disk_threads.chunk_threads
        assert files.opens.index("modest") <= before + 2 * threads
        greedy.cancel()


def test_reads_that_hang_hold_no_stat_up(running: RunningServer, files: _HangingFiles) -> None:
    with ExitStack() as stack:
        peer, reader = stack.enter_context(Peer(running.address)), stack.enter_context(Reader(running.address))
        stack.callback(files.works.set)
        for number in range(1, 20):
            peer.put(Sample(f"s{number}"), number)
        files.works.clear()
        hanging = [stack.enter_context(Reader(running.address)).frames(sample_id=f"s{number}") for number in range(1, 20)]
        wait_until(lambda: files.hanging >= 8)
        assert reader.state("s3") == (COMMITTED, "")
        assert len(reader.list(samples_pb2.ListRequest()).samples) == 19
        files.works.set()
        for frames in hanging:
            assert list(frames)


def test_no_line_has_more_than_its_threads_and_nothing_is_left_behind() -> None:
    with ThreadPoolExecutor(4) as pool:
        lines, goes_on, begun = NarrowLines(pool, 2), threading.Event(), list[str]()

        def hang(name: str) -> str:
            begun.append(name)
            assert goes_on.wait(WAIT_S)
            return name

        hanging = [lines.submit("a", hang, f"a{number}") for number in range(9)]
        assert lines.submit("b", len, "four").result(WAIT_S) == 4
        assert sorted(begun) == ["a0", "a1"]
        assert hanging[8].cancel()
        goes_on.set()
        assert [future.result(WAIT_S) for future in hanging[:8]] == [f"a{number}" for number in range(8)]
        failed = lines.submit("a", int, "none")
        assert isinstance(failed.exception(WAIT_S), ValueError)
    with ThreadPoolExecutor(1) as pool:  # A pool that ends does what waits in the lines, too.
        lines = NarrowLines(pool, 1)
        last = [lines.submit("a", time.sleep, 0.01) for _ in range(5)]
    assert all(future.done() for future in last)


@pytest.mark.parametrize("call", ["Read", "ReadMany"])
def test_reads_of_one_namespace_that_hang_leave_threads_to_another(
    running: RunningServer, files: _HangingFiles, call: str
) -> None:
    with ExitStack() as stack:
        peer, reader = stack.enter_context(Peer(running.address)), stack.enter_context(Reader(running.address))
        stack.callback(files.works.set)
        for number in range(1, 41):
            peer.put(Sample(f"s{number}", namespace="hangs"), number)
        for number, name in enumerate(("sound", "first"), 100):
            peer.put(Sample(name, namespace="sound"), number)
        files.hangs_below = "/hangs/"
        files.works.clear()
        asked = []
        for number in range(1, 41):
            one = stack.enter_context(Reader(running.address))
            names = [("sound", "first"), ("hangs", f"s{number}")]  # What hangs comes second: then its threads are its own too.
            reads = [samples_pb2.ReadRequest(namespace=space, sample_id=name) for space, name in names]
            if call == "Read":
                asked.append(one.frames(namespace="hangs", sample_id=f"s{number}"))
            else:
                asked.append(one.read_many(samples_pb2.ReadManyRequest(reads=reads), timeout=WAIT_S))
        wait_until(lambda: files.hanging >= 8)
        assert reader.read("sound", namespace="sound")[1] == Sample("sound", namespace="sound").data
        assert files.hanging == 8
        files.works.set()
        for replies in asked:
            assert list(replies)
