"""The Samples service: exact rows, patient reads, and a stable code for everything that cannot be answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.server_kit import ARRIVING, COMMITTED, FAILED, Peer, Reader, RunningServer, Sample, status
from support.waiting import wait_until

from slotstream.v1 import ingest_pb2 as pb
from slotstream.v1 import samples_pb2 as read_pb


def _reason(error: Any) -> str:
    """Why the sample failed that a read was refused for."""
    return str(dict(error.trailing_metadata())["slotstream-reason"])


@contextmanager
def _waiting(running: RunningServer, reader: Reader, sample_id: str, wait_s: float = 3600) -> Iterator[Future[Any]]:
    """A read that is waiting on the server by the time the block begins."""
    with ThreadPoolExecutor(1) as pool:
        before = running.metric("waiting_reads")
        future = pool.submit(reader.read, sample_id, wait_s=wait_s)
        wait_until(lambda: running.metric("waiting_reads") == before + 1 or future.done())
        assert not future.done()
        yield future


@pytest.mark.parametrize("layers", [(), (4,), (9, 4), (4, 9)], ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 40), (7, 31), (39, 40), (5, 5), (40, 40), (0, 0)])
def test_exactly_the_rows_and_layers_asked_for(
    peer: Peer, reader: Reader, start: int, stop: int | None, layers: tuple[int, ...]
) -> None:
    sample = Sample()
    peer.put(sample, 1)
    header, data = reader.read("s", start=start, stop=stop, layer_ids=layers)
    until = 40 if stop is None else stop
    assert (header.start, header.stop, tuple(header.layer_ids)) == (start, until, layers or (4, 9))
    assert list(header.token_ids) == sample.token_ids[start:until]
    cells = {(row, layer): sample.data[row * 256 + at * 128 :][:128] for row in range(40) for at, layer in enumerate((4, 9))}
    assert data == b"".join(cells[row, layer] for row in range(start, until) for layer in layers or (4, 9))


def test_a_long_sample_comes_in_blocks(peer: Peer, reader: Reader) -> None:
    sample = Sample(rows=20_000)
    peer.put(sample, 1, chunk_rows=4096)
    assert reader.read("s")[1] == sample.data
    assert len(list(reader.frames(sample_id="s"))) == 1 + 3


@pytest.mark.parametrize(
    ("request_fields", "status", "code"),
    [
        ({"sample_id": "unknown"}, "NOT_FOUND", "NOT_FOUND"),
        ({"sample_id": ""}, "INVALID_ARGUMENT", "BAD_SAMPLE_ID"),
        ({"sample_id": "s", "namespace": "a/b"}, "INVALID_ARGUMENT", "BAD_NAMESPACE"),
        ({"sample_id": "s", "namespace": "other"}, "NOT_FOUND", "NOT_FOUND"),
        ({"sample_id": "s", "start": 3, "stop": 2}, "INVALID_ARGUMENT", "BAD_TOKEN_RANGE"),
        ({"sample_id": "s", "stop": 41}, "INVALID_ARGUMENT", "BAD_TOKEN_RANGE"),
        ({"sample_id": "s", "start": 2**64 - 1}, "INVALID_ARGUMENT", "BAD_TOKEN_RANGE"),
        ({"sample_id": "s", "layer_ids": [5]}, "INVALID_ARGUMENT", "BAD_LAYERS"),
        ({"sample_id": "s", "layer_ids": [4, 4]}, "INVALID_ARGUMENT", "BAD_LAYERS"),
        ({"sample_id": "s", "wait_s": -1}, "INVALID_ARGUMENT", "BAD_PARAMS"),
        ({"sample_id": "s", "wait_s": 3601}, "INVALID_ARGUMENT", "BAD_PARAMS"),
        ({"sample_id": "s", "wait_s": float("nan")}, "INVALID_ARGUMENT", "BAD_PARAMS"),
        ({"sample_id": "broken"}, "FAILED_PRECONDITION", "SAMPLE_FAILED"),
        ({"sample_id": "arriving"}, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        ({"sample_id": "rotten"}, "DATA_LOSS", "DAMAGED"),
    ],
    ids=str,
)
def test_what_cannot_be_read_says_why(
    running: RunningServer, peer: Peer, reader: Reader, request_fields: dict[str, Any], status: str, code: str
) -> None:
    peer.put(Sample(), 1)
    peer.put(Sample("rotten"), 2)
    path = Sample("rotten").key.path(running.config.data_dir)
    path.write_bytes(path.read_bytes()[:-1])
    peer.say(Sample("broken").open(3), pb.IngestRequest(abort=pb.AbortSample(sample=3, code="SLOT_MISMATCH", message="no")))
    peer.failed()
    peer.say(Sample("arriving").open(4), Sample("arriving").chunk(4, 1, 0, 1))
    peer.hear_until("ack")
    assert reader.refused(lambda: reader.frames(**request_fields)) == (status, code)
    assert running.metric("requests_total", method="Read", code=code) == 1
    if code == "SAMPLE_FAILED":
        with pytest.raises(grpc.RpcError) as failed:
            next(reader.frames(**request_fields))
        assert _reason(failed.value) == "SLOT_MISMATCH"
    assert reader.read("s")[1] == Sample().data


def test_rotten_rows_are_never_sent(running: RunningServer, peer: Peer, reader: Reader) -> None:
    peer.put(Sample(), 1)
    path = Sample().key.path(running.config.data_dir)
    raw = bytearray(path.read_bytes())
    raw[-400] ^= 1
    path.write_bytes(raw)
    frames = reader.frames(sample_id="s")
    next(frames)
    with pytest.raises(grpc.RpcError) as failed:
        next(frames)
    assert failed.value.code() is grpc.StatusCode.DATA_LOSS
    assert [(reply.sample_id, reply.damage) for reply in reader.verify()] == [("s", "HASH_MISMATCH")]


def test_a_read_waits_for_a_sample_that_nobody_has_opened_yet(running: RunningServer, peer: Peer, reader: Reader) -> None:
    with _waiting(running, reader, "s") as waiting:
        peer.put(Sample(), 1)
        assert waiting.result()[1] == Sample().data
    assert running.metric("waiting_reads") == 0


def test_reads_wait_for_a_sample_that_is_arriving(running: RunningServer, peer: Peer, reader: Reader) -> None:
    sample = Sample()
    peer.say(sample.open(1), sample.chunk(1, 1, 0, 20))
    peer.hear_until("ack")
    with _waiting(running, reader, "s") as first, _waiting(running, reader, "s") as second:
        peer.put(Sample("unrelated"), 2)
        assert not first.done()
        peer.say(sample.chunk(1, 2, 20, 40), sample.commit(1))
        peer.committed()
        assert first.result()[1] == second.result()[1] == sample.data


def test_waiting_ends_with_the_failure_of_the_sample(running: RunningServer, peer: Peer, reader: Reader) -> None:
    peer.say(Sample().open(1))
    with _waiting(running, reader, "s") as waiting:
        peer.say(pb.IngestRequest(abort=pb.AbortSample(sample=1, code="STAGING_FULL", message="full")))
        with pytest.raises(grpc.RpcError) as failed:
            waiting.result()
        assert _reason(failed.value) == "STAGING_FULL"


def test_a_sample_that_failed_with_its_server_is_waited_for(tmp_path: Path) -> None:
    """Its sender sends it again. Who waits is told of the failure only once the wait is over."""
    sample = Sample()
    with RunningServer(tmp_path, drain_s=0.0) as before, Peer(before.address) as peer:
        peer.say(sample.open(1), sample.chunk(1, 1, 0, 20))
        peer.hear_until("ack")
        before.start_drain().result(60)
        assert peer.failed().code == "SERVER_DRAINING"
    with RunningServer(tmp_path) as running, Reader(running.address) as reader, Peer(running.address) as peer:
        for wait_s in (0, 0.1):
            with pytest.raises(grpc.RpcError) as failed:
                list(reader.frames(sample_id="s", wait_s=wait_s))
            assert _reason(failed.value) == "SERVER_DRAINING"
        with _waiting(running, reader, "s") as waiting:
            peer.put(sample, 1)
            assert waiting.result()[1] == sample.data


def test_a_sample_that_was_announced_outlives_the_grace_for_unknown_ones(tmp_path: Path) -> None:
    with (
        RunningServer(tmp_path, appear_grace_s=0.05) as running,
        Peer(running.address) as peer,
        Reader(running.address) as reader,
    ):
        assert reader.refused(lambda: reader.frames(sample_id="s", wait_s=3600)) == ("NOT_FOUND", "NOT_FOUND")
        peer.say(Sample().open(1), Sample().chunk(1, 1, 0, 40))
        peer.hear_until("ack")
        assert reader.refused(lambda: reader.frames(sample_id="s", wait_s=0.3))[0] == "DEADLINE_EXCEEDED"
        with _waiting(running, reader, "s") as waiting:
            peer.say(Sample().commit(1))
            assert waiting.result()[1] == Sample().data


def test_only_so_many_reads_at_a_time(tmp_path: Path) -> None:
    with RunningServer(tmp_path, reads_max=1) as running, Reader(running.address) as reader, Peer(running.address) as peer:
        with _waiting(running, reader, "s") as waiting:
            assert reader.refused(lambda: reader.frames(sample_id="x"))[1] == "TOO_MANY"
            peer.put(Sample(), 1)
            waiting.result()
        wait_until(lambda: running.metric("reads") == 0)
        reader.read("s")


def test_those_who_wait_leave_room_for_those_who_need_not(tmp_path: Path) -> None:
    with RunningServer(tmp_path, reads_max=8) as running, Reader(running.address) as reader, Peer(running.address) as peer:
        peer.put(Sample(), 1)
        # Six may wait, and the last quarter of those is for peers that have none.
        waiting = [reader.frames(sample_id=f"never-{number}", wait_s=3600) for number in range(4)]
        wait_until(lambda: running.metric("waiting_reads") == 4)
        assert reader.refused(lambda: reader.frames(sample_id="never", wait_s=1)) == ("RESOURCE_EXHAUSTED", "TOO_MANY")
        assert reader.read("s")[1] == Sample().data
        for call in waiting:
            call.cancel()  # type: ignore[attr-defined]
        wait_until(lambda: running.metric("reads") == 0)


def test_a_request_that_cannot_be_parsed_has_a_code(running: RunningServer) -> None:
    with grpc.insecure_channel(running.address) as channel:
        for name in ("Read", "Stat", "List", "Delete", "Verify"):
            kind: Any = channel.unary_stream if name in ("Read", "Verify") else channel.unary_unary
            for raw, code in ((b"\xff", "BAD_PARAMS"), (b"\x0a\x01\xff", "BAD_PARAMS"), (bytes(300_000), "TOO_LARGE")):
                with pytest.raises(grpc.RpcError) as refused:
                    list(kind(f"/slotstream.v1.Samples/{name}")(raw, timeout=60))
                assert status(refused.value) == (grpc.StatusCode.INVALID_ARGUMENT, code)


def test_a_reader_that_leaves_is_forgotten(running: RunningServer, peer: Peer, reader: Reader) -> None:
    peer.put(Sample(rows=60_000), 1, chunk_rows=16_384)
    waiting, reading = reader.frames(sample_id="never", wait_s=3600), reader.frames(sample_id="s")
    next(reading)
    wait_until(lambda: running.metric("waiting_reads") == 1)
    for call in (waiting, reading):
        call.cancel()  # type: ignore[attr-defined]
    wait_until(lambda: running.metric("reads") == 0)
    assert running.metric("waiting_reads") == 0


def test_waiting_reads_are_told_when_the_server_goes(tmp_path: Path) -> None:
    with RunningServer(tmp_path) as running, Reader(running.address) as reader:
        with _waiting(running, reader, "s") as waiting:
            running.start_drain().result(60)
            with pytest.raises(grpc.RpcError) as failed:
                waiting.result()
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


def test_stat_and_delete(peer: Peer, reader: Reader) -> None:
    ask, drop = read_pb.StatRequest(sample_id="s"), read_pb.DeleteRequest(sample_id="s")
    assert reader.refused(lambda: reader.stat(ask)) == ("NOT_FOUND", "NOT_FOUND")
    assert reader.refused(lambda: reader.delete(drop)) == ("NOT_FOUND", "NOT_FOUND")
    assert reader.refused(lambda: reader.delete(read_pb.DeleteRequest(sample_id="/"))) == ("INVALID_ARGUMENT", "BAD_SAMPLE_ID")
    peer.say(Sample().open(1), Sample().chunk(1, 1, 0, 40))
    peer.hear_until("ack")
    assert reader.stat(ask).state == ARRIVING
    assert reader.refused(lambda: reader.delete(drop)) == ("FAILED_PRECONDITION", "STILL_ARRIVING")
    peer.say(Sample().commit(1))
    peer.committed()
    info = reader.stat(ask)
    assert (info.state, info.num_tokens, info.namespace) == (COMMITTED, 40, "default")
    assert info.file_bytes > 40 * 256
    reader.delete(drop)
    assert reader.refused(lambda: reader.stat(ask)) == ("NOT_FOUND", "NOT_FOUND")
    assert reader.refused(lambda: reader.frames(sample_id="s")) == ("NOT_FOUND", "NOT_FOUND")


def test_list(peer: Peer, reader: Reader) -> None:
    for number in range(1, 8):
        peer.put(Sample(f"s{number}", rows=1, namespace=f"n{number % 2}", tags={"odd": str(number % 2)}), number)
    peer.say(Sample("bad", namespace="n0").open(9, dtype="X"))
    peer.failed()
    everything = reader.list(read_pb.ListRequest())
    assert [info.sample_id for info in everything.samples] == ["bad", *(f"s{n}" for n in range(7, 0, -1))]
    assert everything.next_page_token == ""
    first = reader.list(read_pb.ListRequest(tags={"odd": "1"}, page_size=3))
    rest = reader.list(read_pb.ListRequest(tags={"odd": "1"}, page_size=3, page_token=first.next_page_token))
    assert [i.sample_id for i in (*first.samples, *rest.samples)] == ["s7", "s5", "s3", "s1"]
    assert [i.sample_id for i in reader.list(read_pb.ListRequest(state=FAILED)).samples] == ["bad"]
    assert len(reader.list(read_pb.ListRequest(namespace="n0", state=COMMITTED)).samples) == 3
    for wrong, code in (
        (read_pb.ListRequest(page_token="garbage"), "BAD_PAGE"),
        (read_pb.ListRequest(page_size=1001), "BAD_PARAMS"),
        (read_pb.ListRequest(state=77), "BAD_PARAMS"),  # type: ignore[arg-type]
        (read_pb.ListRequest(namespace="/"), "BAD_NAMESPACE"),
        (read_pb.ListRequest(tags={str(n): "" for n in range(9)}), "BAD_PARAMS"),
    ):
        assert reader.refused(partial(reader.list, wrong)) == ("INVALID_ARGUMENT", code)


def test_verify(running: RunningServer, peer: Peer, reader: Reader) -> None:
    for number, name in enumerate("abc", 1):
        peer.put(Sample(name, namespace="n"), number)
    directory = running.config.data_dir
    Sample("b", namespace="n").key.path(directory).unlink()
    (directory / "n" / "notes").write_text("")
    found = {reply.sample_id: reply for reply in reader.verify()}
    assert {name: reply.damage for name, reply in found.items()} == {"a": "", "b": "MISSING", "c": "", "notes": "FOREIGN"}
    assert found["a"].bytes > 40 * 256
    assert [reply.damage for reply in reader.verify(namespace="n", sample_id="b")] == ["MISSING"]
    assert reader.verify(namespace="other") == []
    assert reader.refused(lambda: reader.verify(sample_id="x")) == ("NOT_FOUND", "NOT_FOUND")


def test_a_fault_of_our_own_is_one_call(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("slotstream.store.samples.SampleStore.stat", lambda *_: 1 / 0)
        assert reader.refused(lambda: reader.stat(read_pb.StatRequest(sample_id="s"))) == ("INTERNAL", "INTERNAL")
        assert reader.refused(lambda: reader.frames(sample_id="s")) == ("INTERNAL", "INTERNAL")
    assert reader.refused(lambda: reader.stat(read_pb.StatRequest(sample_id="s"))) == ("NOT_FOUND", "NOT_FOUND")


def test_many_readers_at_once(peer: Peer, running: RunningServer) -> None:
    samples = [Sample(f"s{n}", rows=3000, seed=n) for n in range(4)]
    for number, sample in enumerate(samples, 1):
        peer.put(sample, number, chunk_rows=3000)
    wrong: list[str] = []

    def read(sample: Sample) -> None:
        with Reader(running.address) as reader:
            for _ in range(5):
                if reader.read(sample.sample_id)[1] != sample.data:
                    wrong.append(sample.sample_id)

    threads = [threading.Thread(target=read, args=(sample,)) for sample in samples * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
