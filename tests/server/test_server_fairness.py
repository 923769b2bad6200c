"""One stream's opens and one sample's disk hold nobody else up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from server.server_kit import COMMITTED, Peer, Reader, RunningServer, Sample
from support.waiting import wait_until

from slotstream.server.lines import Lines
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
        self.hanging = 0
        self.opens: list[str] = []

    def create(self, path: Path) -> int:
        self.opens.append(path.name.partition(".")[0])
        assert self.works.wait(WAIT_S)
        return super().create(path)

    def open_read(self, path: Path) -> int:
        if path.suffix == ".safetensors" and not self.works.is_set():
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
