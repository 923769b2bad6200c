"""Hostile peers against a real server process, while well-behaved ones go on: each wrong has its code, nobody else notices,
and once the attack is over the server holds what it held before."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.server_kit import FAILED, Peer, Reader, Sample, hello, status
from support.files import files_below
from support.server import ServerProcess
from support.waiting import wait_until

from slotstream.demo.processes import free_port
from slotstream.v1 import ingest_pb2 as pb
from slotstream.v1 import samples_pb2 as read_pb
from slotstream.wire.frames import encode_chunk
from slotstream.wire.hashing import xxh3

_OPENS = int(os.environ.get("SLOTSTREAM_HOSTILE_OPENS", "1200"))
_OPEN_MAX = 1000  # On one stream.
_GROWTH_MAX = 192 << 20  # Bytes, after the last attack: what the allocator keeps is no leak.
_GAUGES = ("open_samples", "ingest_streams", "reads", "waiting_reads")
_numbers = iter(range(1, 1 << 30))


class Target:
    """The server under attack, and what it holds."""

    def __init__(self, process: ServerProcess, metrics_port: int) -> None:
        self.process = process
        self.address = process.address
        self.data_dir = process.data_dir
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"

    def gauge(self, name: str) -> float:
        with urllib.request.urlopen(self._metrics, timeout=60) as answer:
            found = re.search(rf"^slotstream_{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    def descriptors(self) -> list[str]:
        links = Path(f"/proc/{self.process.process.pid}/fd").iterdir()
        found = []
        for link in links:
            with contextlib.suppress(FileNotFoundError):
                found.append(str(link.readlink()))
        return found

    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.process.process.pid}/status").read_text()
        (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", text)
        return int(kib) << 10

    def is_quiet(self) -> bool:
        """Nobody is connected and nothing is left over. One ingest stream is the bystander's."""
        return (
            all(self.gauge(name) == (name == "ingest_streams") for name in _GAUGES[1:])
            and self.gauge("open_samples") <= 1
            and len(files_below(self.data_dir, ".partial")) <= 1
            and len([link for link in self.descriptors() if link.endswith(".partial")]) <= 1
        )


def _patiently(call: Callable[[], Any]) -> Any:
    """To the server it is the same peer as the attacker, by its address. TOO_MANY says that it may be tried again."""
    for _ in range(20):
        try:
            return call()
        except grpc.RpcError as error:
            if status(error) != (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY"):
                raise
            time.sleep(0.5)
    return call()


class Bystander:
    """Stores samples and reads them back, over and over, on one stream. `samples` counts those that went right."""

    def __init__(self, address: str) -> None:
        self.samples = 0
        self.problem = ""
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._guarded, daemon=True)
        self._thread.start()

    def _guarded(self) -> None:
        try:
            with Peer(self._address, timeout_s=3600) as peer, Reader(self._address) as reader:
                while not self._stop.is_set():
                    sample = Sample(f"good-{self.samples}", rows=50, seed=self.samples, namespace="bystander")
                    peer.put(sample, self.samples + 1)
                    header, data = _patiently(partial(reader.read, sample.sample_id, namespace="bystander"))
                    assert (data, list(header.token_ids)) == (sample.data, sample.token_ids)
                    gone = read_pb.DeleteRequest(namespace="bystander", sample_id=sample.sample_id)
                    _patiently(partial(reader.delete, gone, timeout=60))
                    self.samples += 1
        except BaseException as error:
            self.problem = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        self._stop.set()
        self._thread.join(120)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, Bystander]]:
    port = free_port()
    options = ("--metrics", f"127.0.0.1:{port}", "--appear-grace-s", "60", "--open-samples-max", str(_OPEN_MAX))
    with ServerProcess(tmp_path_factory.mktemp("attacked"), *options) as process:
        target = Target(process, port)
        bystander = Bystander(target.address)
        wait_until(lambda: bystander.samples > 2 or bool(bystander.problem))
        before = target.resident_bytes()
        yield target, bystander
        bystander.close()
        assert not bystander.problem
        assert target.resident_bytes() - before < _GROWTH_MAX
        log = process.log()
        assert "Traceback" not in log, log[log.index("Traceback") - 300 :][:4000]


@pytest.fixture
def target(served: tuple[Target, Bystander]) -> Iterator[Target]:
    """The server; afterwards everything is as it was, and the bystander has gone on."""
    target, bystander = served
    before = bystander.samples
    yield target
    wait_until(lambda: bystander.samples > before + 1 or bool(bystander.problem))
    assert not bystander.problem
    wait_until(target.is_quiet)


@pytest.fixture
def sample() -> Sample:
    return Sample(f"hostile-{next(_numbers)}", namespace="hostile")


def _verdict(peer: Peer) -> str:
    reply = peer.hear_until("failed", "committed")
    return reply.failed.code if reply.HasField("failed") else "duplicate" if reply.committed.duplicate else "committed"


def _chunk(sample: int, first_row: int, rows: int, data: bytes) -> bytes:
    return encode_chunk(pb.ChunkHeader(sample=sample, chunk=1, first_row=first_row, rows=rows, xxh3=xxh3(data)), data)


# Samples and rows.


@pytest.mark.parametrize(
    ("first_row", "rows", "code"),
    [
        pytest.param(39, 2, "BAD_CHUNK", id="past the end"),
        pytest.param(2**32 - 1, 2, "BAD_CHUNK", id="offset"),
        pytest.param(0, 2**32 - 1, "BAD_CHUNK", id="count"),
        pytest.param(2**31, 2**31, "BAD_CHUNK", id="offset and count"),
    ],
)
def test_wrong_offsets_and_counts(target: Target, sample: Sample, first_row: int, rows: int, code: str) -> None:
    with Peer(target.address) as peer:
        peer.say(sample.open(1), _chunk(1, first_row, rows, bytes(512)))
        assert _verdict(peer) == code


def test_overlapping_rows_with_other_content_change_nothing(target: Target, sample: Sample) -> None:
    """The first rows to arrive are the sample's; what is sent over them is dropped."""
    with Peer(target.address) as peer, Reader(target.address) as reader:
        peer.say(sample.open(1), sample.chunk(1, 1, 0, 25), _chunk(1, 10, 20, bytes(20 * 256)), sample.chunk(1, 3, 30, 40))
        peer.say(sample.commit(1))
        assert _verdict(peer) == "committed"
        _, data = reader.read(sample.sample_id, namespace="hostile")
        assert data == sample.part(0, 25) + bytes(5 * 256) + sample.part(30, 40)


def test_replays(target: Target, sample: Sample) -> None:
    """Of chunks, of a whole sample on this and on another stream, and with other content."""
    with Peer(target.address) as peer, Peer(target.address) as other, Reader(target.address) as reader:
        peer.say(sample.open(1), *(sample.chunk(1, chunk, 0, 40) for chunk in range(200)), sample.commit(1))
        assert _verdict(peer) == "committed"
        peer.say(sample.chunk(1, 1, 0, 40), sample.commit(1))  # Of a sample that has ended: ignored.
        for number, stream in enumerate((peer, other), 2):
            stream.say(sample.open(number), sample.chunk(number, 1, 0, 40), sample.commit(number))
            assert _verdict(stream) == "duplicate"
        changed = Sample(sample.sample_id, seed=9, namespace="hostile")
        other.say(changed.open(7), changed.chunk(7, 1, 0, 40), changed.commit(7))
        assert _verdict(other) == "ALREADY_EXISTS"
        assert reader.read(sample.sample_id, namespace="hostile")[1] == sample.data


def test_another_streams_sample_number_is_not_ours(target: Target, sample: Sample) -> None:
    with Peer(target.address) as owner, Peer(target.address) as thief:
        owner.say(sample.open(77), sample.chunk(77, 1, 0, 20))
        owner.acks(1)
        thief.say(sample.chunk(77, 1, 20, 40))
        assert thief.ending() == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL")
        owner.say(sample.chunk(77, 2, 20, 40), sample.commit(77))
        assert _verdict(owner) == "committed"


def test_another_streams_sample_id_is_nobodys_until_it_is_committed(target: Target, sample: Sample) -> None:
    """Two send one id: the first to commit has it, and neither gets a row into the other's."""
    with Peer(target.address) as owner, Peer(target.address) as thief, Reader(target.address) as reader:
        forged = Sample(sample.sample_id, seed=5, namespace="hostile")
        owner.say(sample.open(1), sample.chunk(1, 1, 0, 20))
        owner.acks(1)
        thief.say(forged.open(1), forged.chunk(1, 1, 0, 40), pb.IngestRequest(abort=pb.AbortSample(sample=1, code="ABORTED")))
        assert _verdict(thief) == "ABORTED"
        thief.say(forged.open(2), forged.chunk(2, 1, 0, 40))
        owner.say(sample.chunk(1, 2, 20, 40), sample.commit(1))
        assert _verdict(owner) == "committed"
        thief.say(forged.commit(2))
        assert _verdict(thief) == "ALREADY_EXISTS"
        assert reader.read(sample.sample_id, namespace="hostile")[1] == sample.data


def test_wrong_hashes_fail_their_own_samples(target: Target, sample: Sample) -> None:
    with Peer(target.address) as peer:
        for number in range(1, 51):
            one = Sample(f"{sample.sample_id}-{number}", namespace="hostile")
            peer.say(one.open(number), encode_chunk(pb.ChunkHeader(sample=number, chunk=1, rows=40, xxh3=number), one.data))
        assert {_verdict(peer) for _ in range(50)} == {"HASH_MISMATCH"}


# Streams.


def test_many_opens(target: Target, sample: Sample) -> None:
    """More samples than a stream may have: each is answered, most with STORE_FULL; then the stream breaks."""
    with Peer(target.address, timeout_s=3600) as peer:
        peer.say(*(Sample(f"{sample.sample_id}-{n}", rows=1, namespace="hostile").open(n) for n in range(1, _OPENS + 1)))
        refused = [peer.failed() for _ in range(max(0, _OPENS - _OPEN_MAX))]
        assert {failed.code for failed in refused} == {"STORE_FULL"}
        assert len({failed.sample for failed in refused}) == len(refused)
        wait_until(lambda: target.gauge("open_samples") >= _OPEN_MAX)


@pytest.mark.extended
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_opens(target: Target, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_OPENS", 100_000)
    test_many_opens(target, sample)


def test_slow_loris(target: Target, sample: Sample) -> None:
    """Streams that send a row of two bytes now and then hold a descriptor each, and nobody up."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(target.address)) for _ in range(40)]
        for at, peer in enumerate(peers):
            peer.say(
                sample.open(
                    1, sample_id=f"{sample.sample_id}-{at}", layer_ids=[0], hidden_size=1, rows_max=1 << 20, rows_exact=False
                )
            )
        for row in range(5):
            for peer in peers:
                peer.say(_chunk(1, row * 3, 1, b"ab"))
                peer.acks(1)
        for peer in peers[::2]:
            peer.cancel()


def test_half_open_streams(target: Target, sample: Sample) -> None:
    """Those that never say Hello, those that say nothing after it, and connections that are no HTTP/2 at all."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(Peer(target.address, greet=False)) for _ in range(60)]
        greeted = [stack.enter_context(Peer(target.address)) for _ in range(60)]
        path = target.address.removeprefix("unix:")
        for _ in range(60):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(path)
            connection.sendall(random.Random(0).randbytes(50))
        for peer in (*silent[::2], *greeted[::2]):
            peer.half_close()
        assert {peer.ending()[0] for peer in (*silent[::2], *greeted[::2])} == {grpc.StatusCode.OK}


_KILLED = """
import sys
sys.path[:0] = [{here!r}]
from server.server_kit import Peer, Sample
peer = Peer({address!r})
for number in range(1, 100):
    sample = Sample(f"{sample_id}-{{number}}", rows=4000, namespace="hostile")
    peer.say(sample.open(number), sample.chunk(number, 1, 0, 2000))
print("sent", flush=True)
peer.acks(99)
print("acked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("said", ["sent", "acked"])
def test_a_peer_that_is_killed(target: Target, sample: Sample, said: str) -> None:
    code = _KILLED.format(here=str(Path(__file__).parents[1]), address=target.address, sample_id=sample.sample_id)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert any(line.strip() == said for line in killed.stdout)
        killed.send_signal(signal.SIGKILL)
    with Reader(target.address) as reader:
        if said == "acked":
            wait_until(lambda: reader.state(f"{sample.sample_id}-1", "hostile") == (FAILED, "INTERRUPTED"))


@pytest.mark.parametrize(
    ("request_of", "expected"),
    [
        pytest.param(lambda s: s.open(1, metadata={"k": "v" * 20_000}), "TOO_LARGE", id="metadata"),
        pytest.param(lambda s: s.open(1, tags={str(n): "v" * 200 for n in range(40)}), "BAD_TAGS", id="tags"),
        pytest.param(lambda s: s.open(1, metadata={str(n): "" for n in range(40_000)}), "PROTOCOL", id="metadata past any use"),
        pytest.param(lambda s: s.open(1, layer_ids=range(1_000_000)), "PROTOCOL", id="layers past any use"),
        pytest.param(
            lambda s: pb.IngestRequest(abort=pb.AbortSample(message="m" * 300_000)), "PROTOCOL", id="message past any use"
        ),
        pytest.param(lambda s: pb.IngestRequest(commit=pb.CommitSample(token_ids=[1] * 3_000_000)), "PROTOCOL", id="token ids"),
        pytest.param(lambda s: b"\x12\x05\x1a\x03\xff\xfe\xfd", "PROTOCOL", id="invalid UTF-8"),
        pytest.param(lambda s: hello(protocol=2), "PROTOCOL", id="protocol version"),
        pytest.param(lambda s: b"\xa0\x06\x01" * 200_000, "PROTOCOL", id="unknown fields by the thousand"),
        pytest.param(lambda s: bytes(17 << 20), "RESOURCE_EXHAUSTED", id="a message past the limit"),
    ],
)
def test_messages(target: Target, sample: Sample, request_of: Callable[[Sample], Any], expected: str) -> None:
    with Peer(target.address) as peer:
        peer.say(request_of(sample))
        if expected in ("PROTOCOL", "RESOURCE_EXHAUSTED"):
            code, stable = peer.ending()
            assert expected in (code.name, stable)
        else:
            assert _verdict(peer) == expected


def test_unknown_fields_are_what_a_newer_peer_sends(target: Target, sample: Sample) -> None:
    def newer(request: pb.IngestRequest) -> bytes:
        return request.SerializeToString() + b"\xa2\x06\x03new\xa8\x06\x01"

    with Peer(target.address) as peer:
        peer.say(newer(sample.open(1)), sample.chunk(1, 1, 0, 40), newer(sample.commit(1)))
        assert _verdict(peer) == "committed"


def test_a_message_that_is_small_until_it_is_unpacked(target: Target) -> None:
    with grpc.insecure_channel(target.address, options=(("grpc.max_send_message_length", -1),)) as channel:
        stream = channel.stream_stream("/slotstream.v1.Ingest/Stream", request_serializer=None, response_deserializer=None)
        call = stream(iter([bytes(64 << 20)]), compression=grpc.Compression.Gzip, timeout=60)
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# Reads.


@pytest.fixture
def stored(target: Target, sample: Sample) -> Sample:
    with Peer(target.address) as peer:
        peer.put(sample, 1)
    return sample


@pytest.mark.parametrize(
    ("request_of", "code"),
    [
        pytest.param({"start": 2**64 - 1}, "BAD_TOKEN_RANGE", id="start"),
        pytest.param({"stop": 2**64 - 1}, "BAD_TOKEN_RANGE", id="stop"),
        pytest.param({"start": 5, "stop": 4}, "BAD_TOKEN_RANGE", id="backwards"),
        pytest.param({"layer_ids": range(10_000)}, "BAD_LAYERS", id="layers"),
        pytest.param({"layer_ids": [4] * 10_000}, "BAD_LAYERS", id="one layer again and again"),
        pytest.param({"layer_ids": range(1_000_000)}, "TOO_LARGE", id="layers past any use"),
        pytest.param({"wait_s": float("inf")}, "BAD_PARAMS", id="wait"),
        pytest.param({"wait_s": float("nan")}, "BAD_PARAMS", id="wait for no time that is"),
    ],
)
def test_reads(target: Target, stored: Sample, request_of: dict[str, Any], code: str) -> None:
    with Reader(target.address) as reader:
        wanted = {"sample_id": stored.sample_id, "namespace": "hostile", **request_of}
        assert reader.refused(lambda: reader.frames(**wanted))[1] == code


def test_forged_page_tokens(target: Target, stored: Sample) -> None:
    rng = random.Random(3)
    with Reader(target.address) as reader:
        for _ in range(100):
            token = "".join(rng.choice("ABCDEFGHabcdefgh0123-_=") for _ in range(rng.choice((1, 20, 28, 400))))
            assert reader.refused(partial(reader.list, read_pb.ListRequest(page_token=token)))[1] == "BAD_PAGE"
        request = read_pb.ListRequest(page_size=2**32 - 1)
        assert reader.refused(lambda: reader.list(request))[1] == "BAD_PARAMS"


def test_floods_of_listings(target: Target, stored: Sample) -> None:
    with Reader(target.address) as reader, ThreadPoolExecutor(16) as pool:
        request = read_pb.ListRequest(namespace="hostile", page_size=1000)
        listed = list(pool.map(lambda _: len(reader.list(request, timeout=120).samples), range(60)))
        assert min(listed) >= 1


def test_waiting_reads_by_the_thousand(target: Target, stored: Sample) -> None:
    """Those past the limit are told so; who reads what is there is served beside them."""
    with Reader(target.address) as reader, Reader(target.address) as polite:
        waiting: list[Any] = [reader.frames(sample_id=f"never-{n}", namespace="hostile", wait_s=50) for n in range(2000)]
        wait_until(lambda: sum(call.done() for call in waiting) >= 2000 - 384)  # Three quarters of --peer-reads-max may wait.
        refused = {status(call) for call in waiting if call.done()}
        # gRPC itself refuses what a connection asks past its limit of calls, before it has heard of that limit.
        assert refused - {(grpc.StatusCode.UNAVAILABLE, "")} == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY")}
        assert _patiently(partial(polite.read, stored.sample_id, namespace="hostile"))[1] == stored.data
        for call in waiting:
            call.cancel()
