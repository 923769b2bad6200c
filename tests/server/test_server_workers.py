"""A server of several processes: streams are shared out; there is one catalogue, one set of metrics, one word on each id."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import grpc
import pytest
from server.server_kit import (
    ARRIVING,
    COMMITTED,
    FAILED,
    NOT_SERVING,
    SERVING,
    Peer,
    Reader,
    RunningServer,
    Sample,
    health,
    status,
)
from support.descendants import descendants
from support.files import files_below
from support.waiting import wait_until

from slotstream.server.app import _until_free
from slotstream.store.samples import SampleStore
from slotstream.v1 import ingest_pb2 as pb
from slotstream.wire.errors import ConfigError

pytestmark = pytest.mark.timeout(240)
PEERS = 10  # Spread over three processes by the kernel: all in one of them is a chance of one in 20,000.


def children(pid: int) -> list[int]:
    """Worker processes that `pid` started and that live."""
    return descendants(pid, "slotstream.server.processes.worker")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("workers") / "data", workers=3) as server:
        yield server


@pytest.fixture
def peers(running: RunningServer) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Peer(running.address)) for _ in range(PEERS)]


def test_every_process_takes_streams_and_there_is_one_catalogue(running: RunningServer, peers: list[Peer]) -> None:
    before = running.metric("samples_total", outcome="committed", code="")
    samples = [[Sample(f"many-{peer}-{n}", rows=40 + n, seed=peer * 10 + n) for n in range(3)] for peer in range(PEERS)]
    for peer, mine in zip(peers, samples, strict=True):
        for number, sample in enumerate(mine, 1):
            peer.put(sample, number)
    for reader_number in range(4):  # Each on a connection of its own, that any process may get.
        with Reader(running.address) as reader:
            for sample in samples[reader_number]:
                assert reader.read(sample.sample_id)[1] == sample.data
            assert reader.state(samples[-1][-1].sample_id) == (COMMITTED, "")
            assert [reply.damage for reply in reader.verify(sample_id=samples[0][0].sample_id)] == [""]
    wait_until(lambda: running.metric("samples_total", outcome="committed", code="") == before + 3 * PEERS)
    wait_until(lambda: running.metric("ingest_streams") == PEERS)
    own = running.server.metrics._own.get_sample_value("slotstream_ingest_streams")
    assert own is not None
    assert own < PEERS  # The others took their part.


def test_one_id_is_stored_once_whoever_sends_it(peers: list[Peer], running: RunningServer) -> None:
    sample, other = Sample("same", seed=1), Sample("same", seed=2)
    assert not peers[0].put(sample, 100).duplicate
    for peer in peers[1:]:
        assert peer.put(sample, 100).duplicate
    for peer in peers:
        peer.say(other.open(101), other.chunk(101, 5, 0, other.rows), other.commit(101))
        assert peer.failed().code == "ALREADY_EXISTS"
    # The same rows, though this time their number is not known beforehand.
    for peer in peers:
        peer.say(sample.open(102, rows_max=90000, rows_exact=False), sample.chunk(102, 6, 0, sample.rows), sample.commit(102))
        assert peer.committed().duplicate
    with Reader(running.address) as reader:
        assert reader.read("same")[1] == sample.data
        assert reader.others_refused("same") == {"ALREADY_EXISTS": len(peers)}


def test_failures_are_told_and_recorded(peers: list[Peer], running: RunningServer) -> None:
    with Reader(running.address) as reader:
        for index, peer in enumerate(peers):
            sample = Sample(f"wrong-{index}")
            peer.say(sample.open(200), sample.chunk(200, 6, 0, 1))
            peer.acks(1)
            assert reader.state(sample.sample_id) == (ARRIVING, "")
            chunk = bytearray(sample.chunk(200, 7, 0, sample.rows))
            chunk[-1] ^= 1
            peer.say(bytes(chunk))
            assert peer.failed().code == "HASH_MISMATCH"
            assert reader.state(sample.sample_id) == (FAILED, "HASH_MISMATCH")
            peer.say(Sample(f"refused-{index}").open(201, layer_ids=()))
            assert peer.failed().code == "BAD_LAYERS"
            assert reader.state(f"refused-{index}") == (FAILED, "BAD_LAYERS")


def test_a_worker_that_dies_fails_what_it_had_open_and_nothing_else(peers: list[Peer], running: RunningServer) -> None:
    samples = [Sample(f"dies-{index}", seed=index) for index in range(PEERS)]
    for peer, sample in zip(peers, samples, strict=True):
        peer.say(sample.open(300), sample.chunk(300, 8, 0, 20))
        peer.acks(1)
    victims = children(os.getpid())
    assert len(victims) == 2
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    outcomes = []
    for peer, sample in zip(peers, samples, strict=True):
        try:
            peer.say(sample.chunk(300, 9, 20, sample.rows), sample.commit(300))
            peer.committed()
            outcomes.append((COMMITTED, ""))
        except grpc.RpcError:
            outcomes.append((FAILED, "INTERRUPTED"))
    assert (FAILED, "INTERRUPTED") in outcomes
    wait_until(lambda: len(set(children(os.getpid())) - set(victims)) == 2)
    partials = [path for path in files_below(running.config.data_dir / "default", ".partial") if path.name.startswith("dies")]
    assert partials == []
    with Reader(running.address) as reader:
        for sample, outcome in zip(samples, outcomes, strict=True):

            def has_it(name: str = sample.sample_id, want: tuple[int, str] = outcome) -> bool:
                return reader.state(name) == want

            wait_until(has_it)
    wait_until(lambda: len(running.server._workers._orders) == 2)
    for index in range(PEERS):  # Each lands where the kernel puts it.
        with Peer(running.address) as peer:
            assert not peer.put(Sample(f"again-{index}"), 1).duplicate


def test_every_process_says_when_the_data_directory_is_away(tmp_path: Path) -> None:
    others = set(children(os.getpid()))
    with RunningServer(tmp_path / "data", workers=3) as server:
        away = tmp_path / "unmounted"
        server.config.data_dir.rename(away)
        wait_until(lambda: {health(server) for _ in range(PEERS)} == {NOT_SERVING})
        os.kill((set(children(os.getpid())) - others).pop(), signal.SIGKILL)
        wait_until(lambda: len(server.server._workers._orders) == 1)
        wait_until(lambda: len(server.server._workers._orders) == 2)  # The new one learns it too.
        wait_until(lambda: {health(server) for _ in range(PEERS)} == {NOT_SERVING})
        away.rename(server.config.data_dir)
        wait_until(lambda: {health(server) for _ in range(PEERS)} == {SERVING})
        with Peer(server.address) as peer:
            peer.put(Sample("back"), 1)


def test_a_server_that_drains_lets_workers_finish(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "data", workers=3) as server, ExitStack() as stack:
        peers = [stack.enter_context(Peer(server.address)) for _ in range(PEERS)]
        samples = [Sample(f"drain-{index}", seed=index) for index in range(PEERS)]
        for peer, sample in zip(peers, samples, strict=True):
            peer.say(sample.open(1), sample.chunk(1, 1, 0, 20))
            peer.acks(1)
        draining = server.start_drain()
        for peer in peers:
            assert peer.hear_until("draining")
        for peer, sample in zip(peers[1:], samples[1:], strict=True):
            peer.say(sample.chunk(1, 2, 20, sample.rows), sample.commit(1))
            peer.committed()
        assert not draining.done()
        peers[0].say(samples[0].chunk(1, 2, 20, samples[0].rows), samples[0].commit(1))
        peers[0].committed()
        draining.result(60)
    with closing(SampleStore.open(tmp_path / "data")) as store:
        for sample in samples:
            assert store.verify(sample.key).damage == ""


@contextmanager
def server_process(data_dir: Path, address: str = "127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of two processes, as a process of its own, and its address."""
    command = [sys.executable, "-m", "slotstream.cli.main", "serve", "--listen", address, "--workers", "2"]
    process = subprocess.Popen([*command, "--data", str(data_dir)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"listening on (127\S+)", line):
                yield process, found[1]
                return
        raise AssertionError("it did not start")
    finally:
        process.kill()
        process.communicate()


def is_gone(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return not path.exists() or "Z" in path.read_text()


def test_workers_end_with_a_primary_that_is_killed(tmp_path: Path) -> None:
    with server_process(tmp_path / "data") as (process, _):
        (worker,) = children(process.pid)
        process.kill()
        wait_until(lambda: is_gone(worker))


def replies_until_the_end(peer: Peer) -> tuple[list[str], grpc.StatusCode]:
    heard: list[str] = []
    while True:
        try:
            heard.append(str(peer.hear().WhichOneof("kind")))
        except grpc.RpcError as error:
            return heard, status(error)[0]


def test_a_worker_that_outlives_its_primary_says_nothing_of_samples(tmp_path: Path) -> None:
    """What it had open may be stored, or can be sent again: each stream ends without a verdict, for every request."""
    with server_process(tmp_path / "data") as (process, address), ExitStack() as stack:
        peers = [stack.enter_context(Peer(address)) for _ in range(PEERS)]
        samples = [Sample(f"left-{number}", seed=number) for number in range(PEERS)]
        for peer, sample in zip(peers, samples, strict=True):
            peer.say(sample.open(1), sample.chunk(1, 1, 0, sample.rows))
            peer.acks(1)
        process.send_signal(signal.SIGSTOP)  # It is asked, and does not answer.
        for number, (peer, sample) in enumerate(zip(peers, samples, strict=True)):
            abort = pb.IngestRequest(abort=pb.AbortSample(sample=1, code="SLOT_MISMATCH", message="it was given up"))
            bad_rows = sample.chunk(1, 2, sample.rows, sample.rows + 1)
            peer.say((sample.commit(1), abort, bad_rows, sample.open(2), Sample("refused").open(2, layer_ids=()))[number % 5])
        process.kill()
        for heard, end in map(replies_until_the_end, peers):
            assert set(heard) <= {"ack"}
            assert end is grpc.StatusCode.UNAVAILABLE


def test_a_server_waits_for_the_port_that_a_worker_of_a_killed_one_still_holds() -> None:
    async def test() -> None:
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", 0))
            held.listen()
            address = f"127.0.0.1:{held.getsockname()[1]}"
            with pytest.raises(ConfigError, match="cannot listen"):
                await _until_free(address, 0.0)
            waiting = asyncio.create_task(_until_free(address, 60.0))
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting

    asyncio.run(test())


def test_a_unix_socket_has_one_process(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only one process can listen on a unix socket"):
        RunningServer(tmp_path / "data", listen=f"unix:{tmp_path}/s", workers=2)
