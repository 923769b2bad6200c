"""Which reads count: those whose last row reached their caller, once each, and none that somebody broke off or lost."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from support.fake_samples import read_header, read_rows, serving
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.waiting import wait_until

from slotstream.client import Client, connect
from slotstream.v1 import samples_pb2 as pb
from slotstream.v1 import samples_pb2_grpc

SAMPLE = SyntheticSample("s", num_tokens=40)
LATER = "later"  # Read last: what was to be counted before it is counted when it is.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("data"), "--metrics", "127.0.0.1:0", "--appear-grace-s", "60") as process:
        yield process


@pytest.fixture(params=[False, True], ids=["sent", "in place"])
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    with connect(server.address, data_dir=server.data_dir if request.param else None) as connected:
        yield connected


@pytest.fixture
def reads(server: ServerProcess, ingest: IngestClient, client: Client, namespace: str) -> Any:
    """How often each of three samples counts as read, once all that was read before is counted."""
    for name in ("a", "b", LATER):
        ingest.store(SyntheticSample(name, namespace=namespace, num_tokens=100, hidden_size=16))
    seen = 0

    def count() -> dict[str, int]:
        nonlocal seen
        seen += 1
        client.get(LATER, namespace=namespace)
        wait_until(lambda: client.stat(LATER, namespace=namespace).reads == seen)
        return {name: client.stat(name, namespace=namespace).reads for name in ("a", "b")}

    return count


def test_a_read_counts_once_its_last_row_is_here(client: Client, reads: Any, namespace: str) -> None:
    client.get("a", namespace=namespace)
    assert reads() == {"a": 1, "b": 0}
    client.get("a", namespace=namespace, layers=[2])
    for _ in client.read("b", namespace=namespace):
        pass
    assert reads() == {"a": 2, "b": 1}
    assert len(list(client.get_many(["a", "b", "a", "none"], namespace=namespace))) == 4
    assert reads() == {"a": 4, "b": 2}


def test_what_was_not_read_does_not_count(client: Client, reads: Any, namespace: str) -> None:
    client.get("a", namespace=namespace, stop=10)
    client.get("a", namespace=namespace, start=1)
    client.get("a", namespace=namespace, count=False)
    with client.read("a", namespace=namespace):
        pass  # Its header alone.
    with client.read("a", namespace=namespace) as reader:
        next(reader)
    list(client.read("b", namespace=namespace, count=False))
    one = client.get_many(["a", "b"], namespace=namespace)
    next(one)
    del one
    assert reads() == {"a": 1, "b": 0}  # The one that `get_many` gave.


def test_closing_a_client_tells_of_its_reads(server: ServerProcess, client: Client, reads: Any, namespace: str) -> None:
    with connect(server.address) as other:
        other.get("a", namespace=namespace)
    assert client.stat("a", namespace=namespace).reads == 1


def test_so_does_the_end_of_a_process(server: ServerProcess, client: Client, reads: Any, namespace: str) -> None:
    code = "import sys; from slotstream.client import connect; connect(sys.argv[1]).get('a', namespace=sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, server.address, namespace], check=True, timeout=120)
    assert client.stat("a", namespace=namespace).reads == 1


@pytest.mark.parametrize(
    ("counting", "rows", "expected"),
    [
        (pb.READ_COUNTING_SENT, False, 1),  # As a client of an earlier version asks: the server may have sent it all.
        (pb.READ_COUNTING_SENT, True, 1),
        (pb.READ_COUNTING_CALLED, False, 0),
        (pb.READ_COUNTING_CALLED, True, 0),
        (pb.READ_COUNTING_NOT, True, 0),
    ],
)
@pytest.mark.parametrize("call", ["Read", "ReadMany"])
def test_the_server_counts_as_the_request_says(
    server: ServerProcess, ingest: IngestClient, namespace: str, call: str, counting: Any, rows: bool, expected: int
) -> None:
    """Of a small sample, whose header a reader takes, and goes; or all of it."""
    sample = SyntheticSample("s", namespace=namespace, num_tokens=8)
    ingest.store(sample)
    read = pb.ReadRequest(namespace=namespace, sample_id="s", counting=counting)
    with grpc.insecure_channel(server.address) as channel, connect(server.address) as client:
        stub: Any = samples_pb2_grpc.SamplesStub(channel)  # type: ignore[no-untyped-call]
        replies = stub.Read(read) if call == "Read" else stub.ReadMany(pb.ReadManyRequest(reads=[read]))
        assert next(replies).header.counted_by_call == (counting == pb.READ_COUNTING_CALLED)
        if rows:
            list(replies)
        else:
            wait_until(lambda: server.metric("slotstream_reads") == 0)
            replies.cancel()
        wait_until(lambda: server.metric("slotstream_reads") == 0)
        wait_until(lambda: client.stat("s", namespace=namespace).reads == expected)
        info = client.stat("s", namespace=namespace)
        stub.CountRead(pb.CountReadRequest(namespace=namespace, sample_id="s", committed_unix_ns=info.committed_unix_ns))
        assert client.stat("s", namespace=namespace).reads == expected + 1  # And not more by now.


class _Server:
    """A server that says whether reads count by a call, and notes those calls."""

    def __init__(self, *, asks: bool, breaks_at: int = 0) -> None:
        self.asks = asks
        self.breaks_at = breaks_at
        self.asked: list[pb.ReadRequest] = []
        self.counted: list[str] = []
        self.calls = 0
        self.hang = threading.Event()
        self.hang.set()
        self.fails = False

    def read(self, request: pb.ReadRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        self.asked.append(request)
        start = request.start
        yield read_header(SAMPLE, start=start, token_ids=SAMPLE.token_ids[start:], counted_by_call=self.asks)
        if self.breaks_at > start:
            yield read_rows(SAMPLE, start, self.breaks_at)
            context.abort(grpc.StatusCode.UNAVAILABLE, "the server went away")
        yield read_rows(SAMPLE, start, 40)

    def read_many(self, request: pb.ReadManyRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        for read in request.reads:
            yield from self.read(read, context)

    def count(self, request: pb.CountReadRequest, context: grpc.ServicerContext) -> pb.CountReadReply:
        assert self.hang.wait(30)
        if self.fails:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")
        self.calls += 1
        self.counted += [one.sample_id for one in (request, *request.more)]
        return pb.CountReadReply()

    def serving(self) -> Any:
        return serving(Read=self.read, ReadMany=self.read_many, CountRead=self.count)


def test_a_server_that_counts_itself_is_told_nothing() -> None:
    server = _Server(asks=False)
    with server.serving() as address:
        with connect(address) as client:
            client.get("s")
            assert len(list(client.get_many(["s", "s"]))) == 2
        assert server.counted == []
        assert {read.counting for read in server.asked} == {pb.READ_COUNTING_CALLED}


def test_a_read_that_broke_and_went_on_counts_once() -> None:
    for breaks_at in (0, 15, 39):
        server = _Server(asks=True, breaks_at=breaks_at)
        with server.serving() as address:
            with connect(address) as client:
                (answer,) = client.get_many(["s"])
                assert answer.error is None
            assert server.counted == ["s"], breaks_at


def test_nobody_waits_for_the_count_and_one_that_is_lost_is_said(caplog: pytest.LogCaptureFixture) -> None:
    server = _Server(asks=True)
    with server.serving() as address, connect(address) as client:
        server.hang.clear()
        for _ in range(100):
            client.get("s")  # Though no call that counts is answered.
        server.hang.set()
        wait_until(lambda: len(server.counted) == 100)
        assert server.calls < 50  # Together.
        server.fails = True
        with caplog.at_level(logging.WARNING):
            client.get("s")
            wait_until(lambda: "did not count a read of default/s" in caplog.text)
        server.fails = False
        client.get("s")
        wait_until(lambda: len(server.counted) == 101)
