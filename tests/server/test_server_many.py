"""ReadMany: the replies of many reads in one call, each in its turn, and what limits them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server.server_kit import Peer, Reader, RunningServer, Sample
from support.waiting import wait_until

from slotstream.server.samples import many as many_reads
from slotstream.store.records import SampleKey
from slotstream.v1 import samples_pb2 as read_pb
from slotstream.wire.frames import decode_reply, split_replies
from slotstream.wire.hashing import xxh3
from slotstream.wire.layout import header_length


def messages(reader: Reader, *reads: dict[str, Any], batches: bool, files: bool = False) -> list[bytes]:
    asked = [read_pb.ReadRequest(**read) for read in reads]
    request = read_pb.ReadManyRequest(reads=asked, batches=batches, files=files)
    return [reply.SerializeToString() for reply in reader.read_many(request, timeout=60)]


def many(reader: Reader, *reads: dict[str, Any], batches: bool = False) -> list[tuple[str, bytes]]:
    """Of each read "header" and all its rows, or its error's code, in the order in which they came."""
    found: list[tuple[str, bytes]] = []
    replies = [reply for message in messages(reader, *reads, batches=batches) for reply in split_replies(message)]
    for reply in replies:
        message, data = decode_reply(reply)
        match message.WhichOneof("kind"):
            case "header":
                found.append((message.header.info.sample_id, b""))
            case "error":
                found.append((f"{message.error.read} {message.error.code}", message.error.reason.encode()))
            case _:
                found[-1] = found[-1][0], found[-1][1] + bytes(data)
    return found


@pytest.mark.parametrize("batches", [False, True])
def test_each_read_is_answered_in_its_turn(running: RunningServer, peer: Peer, reader: Reader, batches: bool) -> None:
    one, long = Sample("one"), Sample("long", rows=20_000, seed=3)
    peer.put(one, 1)
    peer.put(long, 2, chunk_rows=4096)
    peer.say(Sample("arriving").open(3))
    wait_until(lambda: running.metric("open_samples") == 1)
    found = many(
        reader,
        {"sample_id": "long"},
        {"sample_id": "nobody"},
        {"sample_id": "one", "start": 3, "stop": 9},
        {"sample_id": "arriving"},
        {"sample_id": "one", "layer_ids": [7]},
        {"sample_id": "one", "start": 3, "stop": 41},
        {"sample_id": "one", "layer_ids": [9, 4]},
        {"sample_id": "one", "in_place": True},
        batches=batches,
    )
    swapped = b"".join(one.data[at + 128 : at + 256] + one.data[at : at + 128] for at in range(0, len(one.data), 256))
    assert found == [
        ("long", long.data),
        ("1 NOT_FOUND", b""),
        ("one", one.part(3, 9)),
        ("3 STILL_ARRIVING", b""),
        ("4 BAD_LAYERS", b""),
        ("5 BAD_TOKEN_RANGE", b""),
        ("one", swapped),
        ("one", b""),
    ]
    assert running.metric("requests_total", method="ReadMany", code="") == 1
    # Two reads had every row of a sample, whichever layers, and count.
    wait_until(lambda: reads(reader, "one") == 1 and reads(reader, "long") == 1)


def test_small_replies_come_together_where_the_reader_takes_that(peer: Peer, reader: Reader) -> None:
    peer.put(Sample("small", rows=4), 1)
    long = Sample("long", rows=40_000, seed=3)
    peer.put(long, 2, chunk_rows=4096)
    small = [{"sample_id": "small"}] * 100
    assert [len(split_replies(message)) for message in messages(reader, *small, batches=True)] == [8, 16, 32, 64, 64, 16]
    assert [len(split_replies(message)) for message in messages(reader, *small, batches=False)] == [1] * 200
    together = messages(reader, *small[:10], {"sample_id": "long"}, *small[:10], batches=True)
    assert max(map(len, together)) < 3 << 20  # A message of the small ones stays far below what a message may be.
    assert 1 + len(long.data) // (2 << 20) <= len(together) <= 10


def test_the_catalogue_is_asked_for_some_samples_at_a_time(
    running: RunningServer, peer: Peer, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again where the reader took his time."""
    names = [f"s{number:02}" for number in range(20)]
    for number, name in enumerate(names):
        peer.put(Sample(name, rows=4), number + 1)
    catalogue = running.server.store._catalogue
    asked: list[str] = []

    def noted(name: str, ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noting(what: Any) -> Any:
            asked.append(name)
            return ask(what)

        return noting

    for name in ("get", "get_many"):
        monkeypatch.setattr(catalogue, name, noted(name, getattr(catalogue, name)))
    read = [{"sample_id": name} for name in names]
    for files in (False, True):
        asked.clear()
        messages(reader, *read, batches=True, files=files)
        assert asked == ["get_many"] * 3
    asked.clear()
    monkeypatch.setattr(many_reads, "_FRESH_S", 0.0)
    messages(reader, *read, batches=True)
    assert asked == ["get_many"] * 20


def test_who_leaves_a_call_keeps_no_sample_from_the_rules(running: RunningServer, peer: Peer, reader: Reader) -> None:
    peer.put(Sample("long", rows=60_000), 1, chunk_rows=4096)
    for number in range(7):
        peer.put(Sample(f"s{number}", rows=4), number + 2)
    asked = [read_pb.ReadRequest(sample_id=name) for name in ("long", *(f"s{number}" for number in range(7)))]
    call = reader.read_many(read_pb.ReadManyRequest(reads=asked), timeout=60)
    next(call)
    catalogue = running.server.store._catalogue
    assert all(catalogue.is_held(SampleKey("default", read.sample_id)) for read in asked)
    call.cancel()
    wait_until(lambda: not any(catalogue.is_held(SampleKey("default", read.sample_id)) for read in asked))


def reads(reader: Reader, sample_id: str) -> int:
    return int(reader.stat(read_pb.StatRequest(sample_id=sample_id), timeout=60).reads)


def test_what_a_call_may_ask_for(running: RunningServer, peer: Peer, reader: Reader) -> None:
    peer.put(Sample("s", rows=1), 1)
    assert len(many(reader, *[{"sample_id": "s"}] * 1000)) == 1000
    bad = ("INVALID_ARGUMENT", "BAD_PARAMS")
    assert reader.refused(lambda: many(reader, *[{"sample_id": "s"}] * 1001)) == bad
    assert reader.refused(lambda: many(reader, {"sample_id": "s", "wait_s": 1})) == bad
    assert reader.refused(lambda: many(reader, {"sample_id": ".."})) == ("INVALID_ARGUMENT", "BAD_SAMPLE_ID")
    assert many(reader) == []
    wait_until(lambda: running.metric("reads") == 0)


def test_one_call_counts_many_reads(peer: Peer, reader: Reader) -> None:
    for number, name in enumerate(("a", "b")):
        peer.put(Sample(name, rows=1), number + 1)

    def one(name: str, more: Any = ()) -> read_pb.CountReadRequest:
        info = reader.stat(read_pb.StatRequest(sample_id=name), timeout=60)
        return read_pb.CountReadRequest(sample_id=name, committed_unix_ns=info.committed_unix_ns, more=more)

    reader.count_read(one("a", [one("b"), one("a")]), timeout=60)
    assert (reads(reader, "a"), reads(reader, "b")) == (2, 1)
    assert reader.refused(lambda: reader.count_read(one("a", [one("b")] * 1000), timeout=60))[1] == "BAD_PARAMS"
    assert reads(reader, "b") == 1


def test_a_call_is_one_read_of_its_peer(tmp_path: Path) -> None:
    with (
        RunningServer(tmp_path, reads_max=1, peer_reads_max=1) as server,
        Peer(server.address) as peer,
        Reader(server.address) as reader,
    ):
        peer.put(Sample("long", rows=80_000), 1, chunk_rows=8192)
        ask = read_pb.ReadManyRequest(reads=[read_pb.ReadRequest(sample_id="long")])
        first = reader.read_many(ask, timeout=60)
        next(first)
        assert reader.refused(lambda: many(reader, {"sample_id": "long"})) == ("RESOURCE_EXHAUSTED", "TOO_MANY")
        assert reader.refused(lambda: list(reader.frames(sample_id="long"))) == ("RESOURCE_EXHAUSTED", "TOO_MANY")
        first.cancel()
        wait_until(lambda: server.metric("reads") == 0)
        assert len(many(reader, {"sample_id": "long"})) == 1


def test_a_reader_that_stands_still_does_not_stop_another(running: RunningServer, peer: Peer, reader: Reader) -> None:
    long = Sample("long", rows=80_000, seed=5)
    peer.put(long, 1, chunk_rows=8192)
    for number in range(2, 12):
        peer.put(Sample(f"s{number}", seed=number), number)
    slow = reader.read_many(read_pb.ReadManyRequest(reads=[read_pb.ReadRequest(sample_id="long")] * 4), timeout=60)
    next(slow)  # And no more: what gRPC holds for it is full long before its 80 MB are.
    with Reader(running.address) as other:
        names = [f"s{number}" for number in range(2, 12)] * 30 + ["long"]
        found = many(other, *({"sample_id": name} for name in names))
        wait_until(lambda: running.metric("reads") == 1)  # The slow one's.
    rows = {name: Sample(name, seed=int(name[1:])).data for name in names[:10]} | {"long": long.data}
    assert found == [(name, rows[name]) for name in names]
    assert sum(len(reply.data) for reply in slow) == 4 * len(long.data)  # It was not forgotten.


def test_a_server_that_is_to_stop_ends_the_call(tmp_path: Path) -> None:
    with RunningServer(tmp_path) as server, Peer(server.address) as peer, Reader(server.address) as reader:
        peer.put(Sample("long", rows=80_000), 1, chunk_rows=8192)
        ask = read_pb.ReadManyRequest(reads=[read_pb.ReadRequest(sample_id="long")] * 100)
        replies = reader.read_many(ask, timeout=60)
        next(replies)
        drained = server.start_drain()
        assert reader.refused(lambda: replies) == ("UNAVAILABLE", "SERVER_DRAINING")
        drained.result(60)


def test_a_reader_that_takes_all_in_place_is_answered_out_of_the_catalogue(
    running: RunningServer, peer: Peer, reader: Reader
) -> None:
    """Without a look at the file, which says for itself what is in it; refusals stay those of any read."""
    sample = Sample("one")
    peer.put(sample, 1)
    reads: list[dict[str, Any]] = [
        {"sample_id": "one", "start": 3},
        {"sample_id": "one", "start": 3, "stop": 41},
        {"sample_id": "one", "layer_ids": [7]},
        {"sample_id": "nobody"},
    ]
    (path,) = running.data_dir.glob("*/*/one.safetensors")
    header_xxh3 = reader.list(read_pb.ListRequest()).samples[0].header_xxh3
    raw = path.read_bytes()
    assert header_xxh3 == xxh3(raw[: header_length(raw)])
    path.unlink()
    in_place = [{**read, "in_place": True, "all_in_place": True} for read in reads]
    first, *refused = [decode_reply(message)[0] for message in messages(reader, *in_place, batches=False)]
    assert (first.header.header_xxh3, first.header.all_in_place, first.header.start) == (header_xxh3, True, 3)
    assert not first.header.token_ids
    assert not first.header.HasField("file")
    assert [reply.error.code for reply in refused] == ["BAD_TOKEN_RANGE", "BAD_LAYERS", "NOT_FOUND"]
    assert many(reader, {"sample_id": "one"}) == [("0 DAMAGED", b"")]


def test_a_small_sample_comes_as_its_file_where_the_reader_takes_that(
    running: RunningServer, peer: Peer, reader: Reader
) -> None:
    """Unchecked, and only where all of it is wanted: anything else, and what a file cannot be read for, is as in any read."""
    samples = [Sample(f"s{number:02}", seed=number) for number in range(20)]
    long = Sample("long", rows=5000)
    for number, sample in enumerate([*samples, long], 1):
        peer.put(sample, number, chunk_rows=4096)
    paths = {path.stem: path for path in running.data_dir.glob("*/*/*.safetensors")}
    assert paths["long"].stat().st_size > 1 << 20 > paths["s00"].stat().st_size
    spoiled = bytearray(paths["s01"].read_bytes())
    spoiled[-1] ^= 1
    paths["s01"].write_bytes(spoiled)
    paths["s02"].write_bytes(paths["s02"].read_bytes()[:-1])
    paths["s03"].unlink()
    whole: list[dict[str, Any]] = [{"sample_id": sample.sample_id} for sample in samples]
    whole[4] |= {"stop": samples[4].rows, "layer_ids": [4, 9]}
    others: list[dict[str, Any]] = [
        {"sample_id": "long"},
        {"sample_id": "s00", "start": 1},
        {"sample_id": "s00", "stop": 3},
        {"sample_id": "s00", "layer_ids": [9, 4]},
        {"sample_id": "s00", "layer_ids": [4]},
        {"sample_id": "s00", "in_place": True},
        {"sample_id": "s00", "in_place": True, "all_in_place": True},
        {"sample_id": "nobody"},
    ]
    together = messages(reader, *whole, *others, batches=True, files=True)
    parts = [decode_reply(reply) for message in together for reply in split_replies(message)]
    files, rest = parts[: len(whole)], parts[len(whole) :]
    for sample, (reply, data) in zip(samples, files, strict=True):
        if sample.sample_id in ("s02", "s03"):
            assert reply.error.code == "DAMAGED"
            continue
        told, raw = reply.header, paths[sample.sample_id].read_bytes()
        assert (told.has_file, told.info.sample_id, told.start, told.stop) == (True, sample.sample_id, 0, sample.rows)
        assert bytes(data) == raw
        assert told.header_xxh3 == xxh3(raw[: header_length(raw)])
        assert not told.token_ids
    assert not any(reply.header.has_file for reply, _ in rest)
    assert sum(reply.WhichOneof("kind") == "header" for reply, _ in rest) == len(others) - 1
    assert rest[-1][0].error.code == "NOT_FOUND"
    # Each file counts as a read of every row; so does any other read of all rows.
    wait_until(lambda: reads(reader, "s05") == reads(reader, "s04") == 1 and reads(reader, "s00") == 3)
    plain = [decode_reply(message)[0] for message in messages(reader, *whole, batches=False)]
    assert not any(reply.header.has_file for reply in plain)
