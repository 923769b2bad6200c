"""Streams that behave: every chunk acked, every sample one verdict, and what was committed is there."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from server.server_kit import ARRIVING, COMMITTED, FAILED, Peer, Reader, RunningServer, Sample, batch, hello
from support.files import files_below
from support.waiting import wait_until

from slotstream.store.disk.files import Files
from slotstream.store.samples import SampleStore
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.hashing import Buffer, xxh3
from slotstream.wire.names import CHUNK_BYTES_MAX, WINDOW_BYTES


def test_the_server_introduces_itself(peer: Peer) -> None:
    assert (peer.welcome.protocol, peer.welcome.window_bytes) == (1, WINDOW_BYTES)
    assert peer.welcome.chunk_bytes_max == CHUNK_BYTES_MAX
    assert peer.welcome.server_version


def test_a_sample_is_acked_committed_and_readable(running: RunningServer, peer: Peer, reader: Reader) -> None:
    sample = Sample(tags={"k": "v"}, metadata={"engine": "e"})
    peer.say(sample.open(1), sample.chunk(1, 11, 0, 30), sample.chunk(1, 12, 30, 40))
    assert peer.acks(2) == [11, 12]
    assert reader.state("s") == (ARRIVING, "")
    peer.say(sample.commit(1, metadata={"hits": "7"}))
    assert peer.hear() == pb.IngestReply(committed=pb.Committed(sample=1))
    header, data = reader.read("s")
    assert data == sample.data
    assert list(header.token_ids) == sample.token_ids
    assert (header.info.state, dict(header.info.tags)) == (COMMITTED, {"k": "v"})
    assert dict(header.info.metadata).items() >= {"engine": "e", "hits": "7", "chunks": "2"}.items()
    assert running.metric("samples_total", outcome="committed", code="") == 1
    assert running.metric("received_bytes_total") == len(sample.data)
    assert running.metric("open_samples") == 0


def test_requests_share_messages(peer: Peer, reader: Reader) -> None:
    assert peer.welcome.batches
    one, two, given_up = Sample("one"), Sample("two", seed=2), Sample("given-up")
    peer.say(batch(one.open(1), two.open(2), given_up.open(3)))
    peer.say(one.chunk(1, 11, 0, 40), two.chunk(2, 12, 0, 40))
    peer.say(batch(one.commit(1), pb.IngestRequest(abort=pb.AbortSample(sample=3, code="ABORTED")), two.commit(2)))
    verdicts = [peer.hear_until("committed", "failed") for _ in range(3)]  # A message each: it did not ask for others.
    assert sorted(one.committed.sample or one.failed.sample for one in verdicts) == [1, 2, 3]
    assert [one.failed.code for one in verdicts if one.HasField("failed")] == ["ABORTED"]
    assert (reader.read("one")[1], reader.read("two")[1]) == (one.data, two.data)


def test_replies_share_messages_for_a_peer_that_takes_that(running: RunningServer) -> None:
    with Peer(running.address, greet=False) as peer:
        peer.say(hello(batches=True))
        assert peer.hear().welcome.batches
        shared = number = 0
        while not shared:  # The first time that two replies are ready at once.
            numbers = range(number + 1, number + 9)
            number += 8
            peer.say(batch(*(Sample(f"s{n}").open(n) for n in numbers)), *(Sample(f"s{n}").chunk(n, n, 0, 40) for n in numbers))
            peer.say(batch(*(Sample(f"s{n}").commit(n) for n in numbers)))
            acked: list[int] = []
            committed: list[int] = []
            while len(committed) < len(numbers):
                message = peer.hear()
                shared += len(message.batch.replies)
                for reply in message.batch.replies or (message,):
                    acked += reply.ack.chunks
                    committed += [reply.committed.sample] if reply.HasField("committed") else []
                    assert set(committed) <= set(acked)  # Each verdict behind the acks of its chunks.
            assert sorted(acked) == sorted(committed) == list(numbers)


def test_ordinary_protobuf_frames_are_understood(peer: Peer, reader: Reader) -> None:
    """`data` first and the header after it: valid, though not how slotstream writes it."""
    sample = Sample(rows=2)
    chunk = pb.IngestRequest(chunk=pb.ChunkHeader(sample=1, chunk=5, first_row=0, rows=2, xxh3=xxh3(sample.data)))
    raw = b"\x7a\x80\x04" + sample.data + chunk.SerializeToString()
    assert pb.IngestRequest.FromString(raw).data == sample.data
    peer.say(sample.open(1), raw, sample.commit(1))
    peer.committed()
    assert reader.read("s")[1] == sample.data


def test_chunks_in_any_order_and_twice(peer: Peer, reader: Reader) -> None:
    sample = Sample()
    pairs = [(20, 40), (0, 25), (20, 40), (10, 12)]
    peer.say(sample.open(1), *(sample.chunk(1, at, *pair) for at, pair in enumerate(pairs)))
    assert peer.acks(4) == [0, 1, 2, 3]
    peer.say(sample.commit(1))
    peer.committed()
    assert reader.read("s")[1] == sample.data
    assert [reply.damage for reply in reader.verify(sample_id="s")] == [""]


def test_a_commit_right_behind_its_chunks(peer: Peer, reader: Reader) -> None:
    """The commit is sent before any ack came back, and waits for its own chunks only."""
    samples = [Sample(f"s{n}", rows=300, seed=n) for n in range(1, 9)]
    for number, sample in enumerate(samples, 1):
        peer.say(sample.open(number))
        peer.say(*(sample.chunk(number, at, at, at + 10) for at in range(0, 300, 10)))
        peer.say(sample.commit(number))
    assert sorted(peer.committed().sample for _ in samples) == list(range(1, 9))
    for sample in samples:
        assert reader.read(sample.sample_id)[1] == sample.data


def test_the_same_sample_again_is_a_duplicate_and_another_is_refused(
    running: RunningServer, peer: Peer, reader: Reader
) -> None:
    sample = Sample()
    assert peer.put(sample, 1).duplicate is False
    with Peer(running.address) as other:
        assert other.put(sample, 1).duplicate is True
    peer.say((stranger := Sample(seed=2)).open(2), stranger.chunk(2, 1, 0, 40), stranger.commit(2))
    failed = peer.failed()
    assert (failed.sample, failed.code, failed.retryable) == (2, "ALREADY_EXISTS", False)
    assert failed.message
    assert reader.read("s")[1] == sample.data
    assert running.metric("samples_total", outcome="duplicate", code="") == 1
    assert running.metric("samples_total", outcome="failed", code="ALREADY_EXISTS") == 1
    assert reader.others_refused("s") == {"ALREADY_EXISTS": 1}
    peer.say(stranger.open(3), pb.IngestRequest(abort=pb.AbortSample(sample=3, code="BAD_PARAMS", message="a typo")))
    assert peer.failed().code == "BAD_PARAMS"
    assert reader.others_refused("s") == {"ALREADY_EXISTS": 1, "BAD_PARAMS": 1}
    assert reader.state("s") == (COMMITTED, "")


def test_a_sample_of_unknown_length_ends_where_it_is_committed(peer: Peer, reader: Reader) -> None:
    sample = Sample(rows=13)
    peer.say(sample.open(1, rows_max=100_000, rows_exact=False), sample.chunk(1, 1, 0, 13), sample.commit(1))
    peer.committed()
    header, data = reader.read("s")
    assert (header.stop, data) == (13, sample.data)


def test_an_abort_is_answered_with_its_own_code(peer: Peer, reader: Reader) -> None:
    sample = Sample()
    peer.say(sample.open(1), sample.chunk(1, 1, 0, 40))
    peer.say(pb.IngestRequest(abort=pb.AbortSample(sample=1, code="SLOT_MISMATCH", message="slots differ")))
    failed = peer.failed()
    assert (failed.sample, failed.code, failed.message, failed.retryable) == (1, "SLOT_MISMATCH", "slots differ", False)
    assert reader.state("s") == (FAILED, "SLOT_MISMATCH")
    peer.say(sample.open(2), pb.IngestRequest(abort=pb.AbortSample(sample=2, code="a\nweird code", message="x" * 9999)))
    failed = peer.failed()
    assert failed.code == "ABORTED"
    assert len(failed.message) == 1024
    peer.put(sample, 3)


def test_late_requests_for_an_ended_sample_are_dropped(peer: Peer) -> None:
    sample = Sample()
    peer.put(sample, 1)
    abort = pb.IngestRequest(abort=pb.AbortSample(sample=1, code="ABORTED"))
    peer.say(sample.chunk(1, 77, 0, 40), sample.commit(1), abort, sample.chunk(1, 78, 0, 40))
    assert peer.acks(2) == [77, 78]


@pytest.mark.parametrize("how", ["half_close", "cancel", "close"])
def test_when_a_stream_ends_its_open_samples_are_interrupted(running: RunningServer, reader: Reader, how: str) -> None:
    done, open_ = Sample("done"), Sample("open")
    with Peer(running.address) as peer:
        peer.put(done, 1)
        peer.say(open_.open(2), open_.chunk(2, 1, 0, 20))
        peer.hear_until("ack")
        getattr(peer, how)()
        if how == "half_close":
            assert peer.failed().code == "INTERRUPTED"
            assert peer.ending() == (grpc.StatusCode.OK, "")
        wait_until(lambda: running.metric("open_samples") == 0)
    assert reader.state("open") == (FAILED, "INTERRUPTED")
    assert reader.state("done") == (COMMITTED, "")
    assert not files_below(running.config.data_dir, ".partial")
    wait_until(lambda: running.metric("ingest_streams") == 0)


def test_a_peer_that_says_no_more_still_gets_its_commits(running: RunningServer) -> None:
    with Peer(running.address) as peer:
        for number in range(1, 6):
            sample = Sample(f"s{number}", seed=number)
            peer.say(sample.open(number), sample.chunk(number, 1, 0, 40), sample.commit(number))
        peer.half_close()
        assert sorted(peer.committed().sample for _ in range(5)) == [1, 2, 3, 4, 5]
        assert peer.ending() == (grpc.StatusCode.OK, "")


def test_a_window_smaller_than_the_flood_slows_it_and_loses_nothing(tmp_path: Path) -> None:
    sample = Sample(rows=20_000)
    with RunningServer(tmp_path, window_bytes=CHUNK_BYTES_MAX) as running, Peer(running.address) as peer:
        peer.say(sample.open(1))
        data = sample.data
        for start in range(0, 20_000, 4000):
            part = data[start * 256 : (start + 4000) * 256]
            header = pb.ChunkHeader(sample=1, chunk=start, first_row=start, rows=4000, xxh3=xxh3(part))
            for _ in range(10):
                peer.say(pb.IngestRequest(chunk=header, data=part))
        peer.say(sample.commit(1))
        peer.committed()
        with Reader(running.address) as reader:
            assert reader.read("s")[1] == data


class _Stuck(Files):
    """A disk whose first write of rows is slow, and whose later ones wait until they are let go."""

    def __init__(self) -> None:
        self.writes = 0
        self.may_go_on = threading.Event()

    def pwrite(self, fd: int, data: Buffer, at: int) -> None:
        self.writes += 1
        if self.writes == 1:
            time.sleep(0.1)
        else:
            assert self.may_go_on.wait(60)
        super().pwrite(fd, data, at)


def test_a_disk_that_gets_stuck_after_it_was_slow_holds_nothing_but_writes(tmp_path: Path) -> None:
    files = _Stuck()
    store = SampleStore.open(tmp_path, files=files)
    sample = Sample()
    with RunningServer(tmp_path, store=store) as running, Peer(running.address) as peer, Reader(running.address) as reader:
        peer.say(sample.open(1), sample.chunk(1, 11, 0, 20))
        assert peer.acks(1) == [11]
        peer.say(sample.chunk(1, 12, 20, 40))
        wait_until(lambda: files.writes == 2)
        assert reader.state("s") == (ARRIVING, "")
        files.may_go_on.set()
        peer.say(sample.commit(1))
        peer.committed()
        assert reader.read("s")[1] == sample.data


class _Full(Files):
    free = 1 << 40

    def free_bytes(self, path: Path) -> int:
        return self.free


def test_a_full_disk_fails_what_arrives_and_nothing_else(tmp_path: Path) -> None:
    files = _Full()
    store = SampleStore.open(tmp_path, files=files)
    with RunningServer(tmp_path, store=store) as running, Peer(running.address) as peer, Reader(running.address) as reader:
        peer.put(Sample("kept"), 1)
        growing = Sample("growing")
        peer.say(growing.open(2, rows_exact=False), growing.chunk(2, 1, 0, 10))
        peer.hear_until("ack")
        files.free = 0
        peer.say(growing.chunk(2, 2, 10, 20), Sample("new").open(3))
        verdicts = {failed.sample: failed for failed in (peer.failed(), peer.failed())}
        assert {(failed.code, failed.retryable) for failed in verdicts.values()} == {("STORE_FULL", True)}
        assert reader.state("growing") == reader.state("new") == (FAILED, "STORE_FULL")
        assert reader.read("kept")[1] == Sample("kept").data
        files.free = 1 << 40
        peer.put(growing, 4)


def test_a_fault_of_our_own_fails_one_sample(
    running: RunningServer, peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("slotstream.store.sample.upload.Upload._claim", lambda *_: 1 / 0)
        peer.say(Sample("bad").open(1), Sample("bad").chunk(1, 1, 0, 40))
        failed = peer.failed()
    assert (failed.code, "ZeroDivision" in failed.message) == ("INTERNAL", False)
    assert "ZeroDivisionError" in caplog.text
    peer.put(Sample("good"), 2)
    assert not files_below(running.config.data_dir, ".partial")


def test_draining_lets_open_samples_finish_and_takes_no_new_ones(tmp_path: Path) -> None:
    with RunningServer(tmp_path, drain_s=120.0) as running, Peer(running.address) as peer:
        sample = Sample()
        peer.say(sample.open(1), sample.chunk(1, 1, 0, 20))
        peer.hear_until("ack")
        drained = running.start_drain()
        peer.hear_until("draining")
        peer.say(Sample("new").open(2))
        failed = peer.failed()
        assert (failed.code, failed.retryable) == ("SERVER_DRAINING", True)
        with Peer(running.address, greet=False) as late:
            late.say(hello())
            assert late.hear().WhichOneof("kind") == "welcome"
            assert late.hear().WhichOneof("kind") == "draining"
            peer.say(sample.chunk(1, 2, 20, 40), sample.commit(1))
            peer.committed()
            assert peer.ending() == late.ending() == (grpc.StatusCode.UNAVAILABLE, "SERVER_DRAINING")
        drained.result(60)


def test_a_peer_that_is_not_greeted_yet_hears_of_the_drain_after_its_welcome(tmp_path: Path) -> None:
    """Said before, it would be the first reply, and no connector takes it for a welcome."""
    with RunningServer(tmp_path, drain_s=120.0) as running, Peer(running.address) as peer:
        peer.say(Sample().open(1), Sample().chunk(1, 1, 0, 20))  # Without it the drain would be over at once.
        peer.hear_until("ack")
        with Peer(running.address, greet=False) as slow:
            wait_until(lambda: running.metric("ingest_streams") == 2)
            drained = running.start_drain()
            peer.hear_until("draining")
            slow.say(hello())
            assert [slow.hear().WhichOneof("kind") for _ in range(2)] == ["welcome", "draining"]
            peer.say(Sample().chunk(1, 2, 20, 40), Sample().commit(1))
            peer.committed()
            assert slow.ending() == (grpc.StatusCode.UNAVAILABLE, "SERVER_DRAINING")
        drained.result(60)


def test_what_is_open_when_the_drain_ends_fails(tmp_path: Path) -> None:
    with RunningServer(tmp_path, drain_s=0.0) as running, Peer(running.address) as peer:
        peer.say(Sample().open(1), Sample().chunk(1, 1, 0, 20))
        peer.hear_until("ack")
        running.start_drain().result(60)
        assert peer.failed().code == "SERVER_DRAINING"
        assert peer.ending() == (grpc.StatusCode.UNAVAILABLE, "SERVER_DRAINING")
        assert not files_below(tmp_path, ".partial")
        store = running.server.store
        record = store.stat(Sample().key)
        assert record is not None
        assert record.error_code == "SERVER_DRAINING"


def test_a_busy_peer_cannot_keep_the_server_from_stopping(tmp_path: Path) -> None:
    with RunningServer(tmp_path, drain_s=0.0) as running, Peer(running.address) as peer:
        stopped = threading.Event()

        def flood() -> None:
            number = 1
            while not stopped.is_set():
                peer.say(Sample(f"s{number}").open(number), Sample().chunk(number, number, 0, 40))
                number += 1
                peer.hear_until("ack", "failed")

        def survives() -> None:
            with contextlib.suppress(grpc.RpcError, StopIteration):
                flood()

        thread = threading.Thread(target=survives)
        thread.start()
        wait_until(lambda: running.metric("chunks_total", transport="grpc") > 20)
        running.call(running.server.stop())
        stopped.set()
        thread.join()
    assert not files_below(tmp_path, ".partial")


def test_failures_are_logged_at_once_and_then_once_a_minute_with_their_count(
    running: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    now = [1000.0]
    monkeypatch.setattr("slotstream.common.throttle.time", SimpleNamespace(monotonic=lambda: now[0]))

    def fail(first: int, count: int) -> list[str]:
        caplog.clear()
        with Peer(running.address) as peer:
            for number in range(first, first + count):
                peer.say(Sample(f"s{number}").open(number, dtype="X"))
                peer.failed()
                abort = pb.AbortSample(sample=number + 1000, code="MADE_UP_" + "ABCD"[number % 4], message="no")
                peer.say(Sample(f"a{number}").open(number + 1000), pb.IngestRequest(abort=abort))
                peer.failed()
        return [line for line in caplog.messages if line.startswith("sample ")]

    assert [line.split()[1] for line in fail(1, 50)] == ["default/s1", "default/a1"]
    now[0] += 59
    assert fail(51, 5) == []
    now[0] += 2
    assert [line.partition(" (")[::2] for line in fail(56, 2)] == [
        ("sample default/s56 failed: BAD_PARAMS", "54 more of its kind were not logged)"),
        ("sample default/a56 failed: MADE_UP_A: no", "54 more of its kind were not logged)"),
    ]
