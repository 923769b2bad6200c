"""Peers that do wrong: each wrong has its code, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.server_kit import FAILED, Peer, Reader, RunningServer, Sample, batch, hello
from support.files import files_below
from support.waiting import wait_until

from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.frames import encode_chunk
from slotstream.wire.hashing import xxh3
from slotstream.wire.names import BATCH_MAX, CHUNK_BYTES_MAX

S = Sample()


def _chunk(first_row: int, rows: int, data: bytes, digest: int | None = None) -> bytes:
    header = pb.ChunkHeader(sample=1, chunk=1, first_row=first_row, rows=rows, xxh3=xxh3(data) if digest is None else digest)
    return encode_chunk(header, data)


def _opened(**changes: object) -> list[pb.IngestRequest | bytes]:
    return [S.open(1, **changes)]


WRONG_SAMPLES = [
    pytest.param(_opened(namespace=""), "BAD_NAMESPACE", id="no namespace"),
    pytest.param(_opened(namespace=".."), "BAD_NAMESPACE", id="namespace"),
    pytest.param(_opened(sample_id="../../etc/passwd"), "BAD_SAMPLE_ID", id="path"),
    pytest.param(_opened(sample_id="a\x00b"), "BAD_SAMPLE_ID", id="nul"),
    pytest.param(_opened(sample_id="x" * 129), "BAD_SAMPLE_ID", id="long id"),
    pytest.param(_opened(model="m" * 1025), "TOO_LARGE", id="model"),
    pytest.param(_opened(dtype="I8"), "BAD_PARAMS", id="dtype"),
    pytest.param(_opened(layer_ids=[]), "BAD_LAYERS", id="no layers"),
    pytest.param(_opened(layer_ids=[1, 1]), "BAD_LAYERS", id="layer twice"),
    pytest.param(_opened(layer_ids=range(2000)), "BAD_LAYERS", id="layers"),
    pytest.param(_opened(hidden_size=0), "BAD_PARAMS", id="no hidden size"),
    pytest.param(_opened(hidden_size=2**32 - 1), "TOO_LARGE", id="hidden size"),
    pytest.param(_opened(rows_max=0), "BAD_PARAMS", id="no rows"),
    pytest.param(_opened(rows_max=2**63), "TOO_LARGE", id="rows"),
    pytest.param(_opened(tags={str(n): "" for n in range(33)}), "BAD_TAGS", id="tags"),
    pytest.param(_opened(tags={"k": "v" * 257}), "BAD_TAGS", id="tag"),
    pytest.param(_opened(metadata={"k": "v" * 20_000}), "TOO_LARGE", id="metadata"),
    pytest.param([S.open(1), _chunk(0, 2, bytes(512), digest=1)], "HASH_MISMATCH", id="hash"),
    pytest.param([S.open(1), _chunk(0, 3, bytes(512))], "BAD_CHUNK", id="chunk length"),
    pytest.param([S.open(1), _chunk(0, 0, b"")], "BAD_CHUNK", id="empty chunk"),
    pytest.param([S.open(1), _chunk(39, 2, bytes(512))], "BAD_CHUNK", id="chunk past the end"),
    pytest.param([S.open(1), _chunk(2**32 - 1, 2**32 - 1, bytes(512))], "BAD_CHUNK", id="chunk far away"),
    pytest.param(
        [S.open(1, rows_max=1 << 20, rows_exact=False), _chunk(0, (1 << 15) + 1, bytes(CHUNK_BYTES_MAX + 256))],
        "TOO_LARGE",
        id="chunk size",
    ),
    pytest.param([S.open(1), S.chunk(1, 1, 0, 39), S.commit(1)], "MISSING_ROWS", id="missing row"),
    pytest.param([S.open(1), S.chunk(1, 1, 0, 40), S.commit(1, row_count=2**63)], "BAD_PARAMS", id="row count"),
    pytest.param([S.open(1), S.chunk(1, 1, 0, 40), S.commit(1, token_ids=[1])], "BAD_PARAMS", id="token ids"),
    pytest.param([S.open(1), S.chunk(1, 1, 0, 40), S.commit(1, token_ids=[2**63] * 40)], "BAD_PARAMS", id="token id"),
    pytest.param([S.open(1), S.chunk(1, 1, 0, 40), S.commit(1, metadata={"k": "v" * 17_000})], "TOO_LARGE", id="metadata late"),
]


@pytest.mark.parametrize(("requests", "code"), WRONG_SAMPLES)
def test_what_is_wrong_with_a_sample_fails_that_sample(
    running: RunningServer, peer: Peer, reader: Reader, requests: list[pb.IngestRequest | bytes], code: str
) -> None:
    with Peer(running.address) as bystander:
        bystander.say(Sample("other").open(1), Sample("other").chunk(1, 1, 0, 20))
        peer.say(*requests)
        failed = peer.failed()
        assert (failed.sample, failed.code) == (1, code)
        assert "\n" not in failed.message
        if code not in ("BAD_NAMESPACE", "BAD_SAMPLE_ID"):
            assert reader.state("s") == (FAILED, code)
        # The stream goes on, and so does everybody else.
        assert peer.put(S, 2).sample == 2
        bystander.say(Sample("other").chunk(1, 2, 20, 40), Sample("other").commit(1))
        bystander.committed()
    assert not files_below(running.config.data_dir, ".partial")


def test_chunks_behind_a_failure_are_dropped_and_acked(peer: Peer) -> None:
    peer.say(S.open(1), _chunk(0, 2, bytes(512), digest=1))
    peer.say(*(S.chunk(1, chunk, 0, 40) for chunk in range(2, 30)), S.commit(1))
    acked: list[int] = []
    failures: list[str] = []
    while len(acked) < 29 or not failures:
        reply = peer.hear()
        acked += reply.ack.chunks
        failures += [reply.failed.code] if reply.HasField("failed") else []
    assert (sorted(acked), failures) == (list(range(1, 30)), ["HASH_MISMATCH"])


def _after_hello(*requests: pb.IngestRequest | bytes) -> list[pb.IngestRequest | bytes]:
    return [hello(), S.open(1), *requests]


VIOLATIONS = [
    pytest.param([S.open(1)], id="no hello"),
    pytest.param([b""], id="empty first frame"),
    pytest.param([b"\xff\xff\xff"], id="garbage first"),
    pytest.param([hello(protocol=2)], id="protocol 2"),
    pytest.param([hello(protocol=0)], id="protocol 0"),
    pytest.param(_after_hello(b"\xff" * 50), id="garbage"),
    pytest.param(_after_hello(b""), id="empty frame"),
    pytest.param(_after_hello(b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), id="long varint"),
    pytest.param(_after_hello(b"\x1a\x05abc"), id="cut short"),
    pytest.param(_after_hello(hello()), id="hello twice"),
    pytest.param(_after_hello(S.open(1)), id="number used twice"),
    pytest.param(_after_hello(S.chunk(2, 1, 0, 40)), id="chunk of no sample"),
    pytest.param(_after_hello(S.commit(2)), id="commit of no sample"),
    pytest.param(_after_hello(pb.IngestRequest(abort=pb.AbortSample(sample=9))), id="abort of no sample"),
    pytest.param(_after_hello(pb.IngestRequest(data=b"rows")), id="data alone"),
    pytest.param(_after_hello(pb.IngestRequest(commit=pb.CommitSample(sample=1), data=b"rows")), id="data with a commit"),
    pytest.param(_after_hello(batch()), id="empty batch"),
    pytest.param(_after_hello(batch(*(Sample(f"s{n}").open(n) for n in range(2, BATCH_MAX + 3)))), id="long batch"),
    pytest.param(_after_hello(batch(hello())), id="hello in a batch"),
    pytest.param(_after_hello(batch(batch(Sample("t").open(2)))), id="batch in a batch"),
    pytest.param(_after_hello(batch(pb.IngestRequest.FromString(S.chunk(1, 1, 0, 40)))), id="chunk in a batch"),
    pytest.param(_after_hello(batch(pb.IngestRequest(commit=pb.CommitSample(sample=1), data=b"r"))), id="data in a batch"),
    pytest.param(_after_hello(batch(S.commit(1, token_ids=[2**63] * 40_000))), id="batch of too many bytes"),
]


@pytest.mark.parametrize("requests", VIOLATIONS)
def test_what_breaks_the_protocol_ends_that_stream(
    running: RunningServer, peer: Peer, reader: Reader, requests: list[pb.IngestRequest | bytes]
) -> None:
    with Peer(running.address, greet=False) as rude:
        rude.say(*requests)
        assert rude.ending() == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL")
    wait_until(lambda: running.metric("open_samples") == 0)
    assert running.metric("protocol_violations_total") == 1
    peer.put(Sample("polite"), 1)
    if len(requests) > 1:
        assert reader.state("s") == (FAILED, "INTERRUPTED")
    assert not files_below(running.config.data_dir, ".partial")


def test_a_message_past_the_limit_ends_that_stream(running: RunningServer, peer: Peer) -> None:
    with Peer(running.address) as rude:
        rude.say(S.open(1), bytes(17 << 20))
        assert rude.ending()[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    wait_until(lambda: running.metric("open_samples") == 0)
    peer.put(S, 1)


def test_a_stream_may_open_only_so_many(tmp_path: Path) -> None:
    with RunningServer(tmp_path, open_samples_max=2) as running, Peer(running.address) as peer:
        samples = {number: Sample(f"s{number}") for number in (1, 2, 3)}
        peer.say(*(sample.open(number) for number, sample in samples.items()))
        failed = peer.failed()
        assert (failed.sample, failed.code, failed.retryable) == (3, "STORE_FULL", True)
        for number in (1, 2):
            peer.say(samples[number].chunk(number, 1, 0, 40), samples[number].commit(number))
            peer.committed()
        peer.put(samples[3], 4)


def test_a_flood_of_refused_samples_is_answered_one_by_one(peer: Peer) -> None:
    peer.say(*(S.open(number, dtype="X") for number in range(1, 1001)))
    assert sorted(peer.failed().sample for _ in range(1000)) == list(range(1, 1001))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(frames=st.lists(st.one_of(st.binary(max_size=60), st.binary(max_size=40).map(lambda b: b"\x1a\x24" + b)), max_size=4))
def test_no_frame_takes_the_server_down(running: RunningServer, frames: list[bytes]) -> None:
    with Peer(running.address) as rude:
        rude.say(S.open(1), *frames)
        rude.half_close()
        rude.ending()
    with Peer(running.address) as peer:
        peer.say(S.open(1), pb.IngestRequest(abort=pb.AbortSample(sample=1, code="ABORTED")))
        assert peer.failed().code == "ABORTED"


@pytest.mark.parametrize("act", [lambda peer: peer.cancel(), lambda peer: peer.close()], ids=["cancel", "close"])
def test_a_peer_that_leaves_in_the_middle_of_a_flood(running: RunningServer, act: Callable[[Peer], None]) -> None:
    long = Sample(rows=4000)
    with Peer(running.address) as rude:
        rude.say(long.open(1), *[long.chunk(1, 1, 0, 4000)] * 50)
        rude.hear_until("ack")
        act(rude)
    wait_until(lambda: running.metric("open_samples") == 0)
    wait_until(lambda: not files_below(running.config.data_dir, ".partial"))
    with Peer(running.address) as peer:
        peer.put(S, 1)
