"""Several real servers over one bucket and one catalogue: what one was told it stored, all have, also when one is killed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
from store.cluster_kit import World
from support.ingest_client import IngestClient
from support.ports import free_port
from support.postgres import cluster
from support.s3_proxy import S3Proxy
from support.seaweedfs import object_store
from support.server import ServerProcess, run_cli
from support.synthetic import SyntheticSample
from support.waiting import wait_until

from slotstream.client import Client, SampleFailed, SampleNotFound, connect
from slotstream.v1 import ingest_pb2

pytestmark = [pytest.mark.postgres, pytest.mark.objects]
_SECRET = "not-to-be-seen"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    opened = World(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def starts(world: World, tmp_path: Path) -> Iterator[_Starts]:
    with ExitStack() as ends:
        yield _Starts(world, tmp_path, ends)


class _Starts:
    """Starts servers of one world, and ends them with the test."""

    def __init__(self, world: World, place: Path, ends: ExitStack) -> None:
        self._world, self._place, self._ends = world, place, ends

    def __call__(self, name: str, address: str | None = None) -> ServerProcess:
        url = self._world.catalogue_url.replace("postgres@", f"postgres:{_SECRET}@")
        environment = {**self._world.environment, "SLOTSTREAM_SERVE_CATALOGUE": url}
        options = ("--store", self._world.store_url, "--scratch", str(self._place / name))
        return self._ends.enter_context(ServerProcess(None, *options, address=address, environment=environment))

    def connected(self, server: ServerProcess) -> Client:
        return self._ends.enter_context(connect(server.address))


def check(client: Client, sample: SyntheticSample, wait_s: float = 0.0) -> None:
    with client.read(sample.sample_id, wait_s=wait_s) as reading:
        found = b"".join(block.data for block in reading)
        assert list(reading.token_ids) == sample.token_ids
    assert found == sample.rows()


def test_each_server_has_what_the_other_stored(world: World, starts: _Starts) -> None:
    first, second = starts("a"), starts("b")
    samples = [SyntheticSample(f"s{number}", seed=number, tags={"n": str(number % 2)}) for number in range(8)]
    with IngestClient(first.address) as to_first, IngestClient(second.address) as to_second:
        to_first.store(*samples[:4])
        to_second.store(*samples[4:])
        for client in (starts.connected(first), starts.connected(second)):
            for sample in samples:
                check(client, sample)
            assert {info.sample_id for info in client.list(tags={"n": "1"})} == {"s1", "s3", "s5", "s7"}
        # Who waits at one server is told of what arrives at the other.
        late = SyntheticSample("late", seed=9)
        with ThreadPoolExecutor(1) as threads:
            number = to_first.open(late)
            to_first.send_rows(number, late)
            waits = threads.submit(check, starts.connected(second), late, 60.0)
            to_first.commit(number, late)
            waits.result()
        assert to_second.commit(_sent(to_second, late), late).duplicate
    client = starts.connected(second)
    shared = client.status().server.shared  # type: ignore[union-attr]
    assert (shared.bucket, shared.trouble) == (world.store_url, None)  # type: ignore[union-attr]
    assert shared.catalogue.startswith("postgresql://postgres@")  # type: ignore[union-attr]
    code = run_cli("doctor", "--server", second.address)
    assert "shared    ok" in code.stdout
    client.delete("s0")
    for one in (client, starts.connected(first)):
        with pytest.raises(SampleNotFound):
            one.read("s0", wait_s=0.0)
    verdicts = list(client.verify())
    assert len(verdicts) == 8
    assert not [verdict for verdict in verdicts if verdict.damage]
    for server in (first, second):
        assert server.stop() == 0
        assert _SECRET not in server.log()
        assert "postgresql://postgres@" in server.log()


def _sent(sender: IngestClient, sample: SyntheticSample) -> int:
    number = sender.open(sample)
    sender.send_rows(number, sample)
    return number


def test_a_killed_server_loses_nothing_that_it_acknowledged_and_leaves_nothing(world: World, starts: _Starts) -> None:
    """Senders through both; one server is killed in the middle, and its senders go on at the other."""
    first, second = starts("a"), starts("b")
    wait_until(lambda: world.sql("SELECT term FROM leader")[0][0] != 0)
    stored: list[SyntheticSample] = []
    unknown: list[SyntheticSample] = []
    enough = threading.Event()

    def send(line: int) -> None:
        server = (first, second)[line % 2]
        for number in range(30):
            sample = SyntheticSample(f"s{line}-{number}", seed=number, num_tokens=20 + 200 * (number % 3))
            try:
                with IngestClient(server.address) as sender:
                    sender.store(sample, rows_per_chunk=64)
                stored.append(sample)
            except (grpc.RpcError, StopIteration, AssertionError):
                unknown.append(sample)
                server = second
            if len(stored) >= 20:
                enough.set()

    with ThreadPoolExecutor(4) as threads:
        lines = [threads.submit(send, line) for line in range(4)]
        assert enough.wait(60)
        first.stop(signal.SIGKILL)
        for line in lines:
            line.result()
    assert len(stored) > 80
    client = starts.connected(second)
    for sample in stored:
        check(client, sample)
    # What its sender was not told of is sent again, and is stored once.
    with IngestClient(second.address) as sender:
        sender.store(*unknown)
    for sample in unknown:
        check(client, sample)
    # The other server leads now. In time it decides what the first one had not ended.
    wait_until(lambda: _is_swept(world))
    verdicts = list(client.verify())
    assert not [verdict for verdict in verdicts if verdict.damage]
    assert len(verdicts) == len(stored) + len(unknown) == len(world.objects())
    assert world.sql("SELECT 1 FROM samples WHERE state <> 'committed'") == []


def _is_swept(world: World) -> bool:
    world.let_pass()
    return world.sql("SELECT 1 FROM attempts") == []


def test_while_the_catalogue_is_away_nothing_is_stored_and_after_it_all_goes_on(tmp_path: Path) -> None:
    """Readers and senders are told that it may pass."""
    sample, other = SyntheticSample("s"), SyntheticSample("t", seed=3)
    world = World(tmp_path)
    with ExitStack() as ends:
        starts = _Starts(world, tmp_path, ends)
        server = starts("a")
        with IngestClient(server.address) as sender:
            sender.store(sample)
        cluster().kill()
        try:
            with pytest.raises(Exception, match="catalogue") as told:
                starts.connected(server).read("s").close()
            assert getattr(told.value, "retryable", False), repr(told.value)
            with pytest.raises((grpc.RpcError, StopIteration, AssertionError)), IngestClient(server.address) as sender:
                sender.store(other)
        finally:
            cluster().start()
        client = starts.connected(server)

        def stores() -> bool:
            try:
                with IngestClient(server.address) as sender:
                    sender.store(other)
                check(client, sample)
                check(client, other)
                return True
            except (grpc.RpcError, StopIteration, AssertionError, SampleFailed, SampleNotFound):
                return False

        wait_until(stores)


def test_servers_that_are_restarted_one_at_a_time_fail_no_read(world: World, starts: _Starts) -> None:
    """Readers that never pause; each server is stopped as soon as the other one is ready again."""
    servers = [starts(name, f"127.0.0.1:{free_port()}") for name in ("a", "b")]
    samples = [SyntheticSample(f"s{number}", seed=number, num_tokens=20 + 2000 * (number % 2)) for number in range(6)]
    with IngestClient(servers[0].address) as sender:
        sender.store(*samples, rows_per_chunk=64)
    ids = [sample.sample_id for sample in samples]
    over = threading.Event()

    def read(how: Callable[[Client], object]) -> int:
        times = 0
        with connect([server.address for server in servers]) as client:
            while not over.is_set():
                how(client)
                times += 1
        return times

    hows: list[Callable[[Client], object]] = [
        lambda client: check(client, samples[1]),
        lambda client: client.get("s3", count=False),
        lambda client: [answer.sample.token_ids for answer in client.get_many(ids) if answer.sample is not None],
        lambda client: client.stat("s2"),
        lambda client: list(client.list(page_size=2)),
        lambda client: client.lease("s4", 5.0),
    ]
    with ThreadPoolExecutor(len(hows)) as threads:
        reads = [threads.submit(read, how) for how in hows]
        try:
            for number in (0, 1, 0):
                address = servers[number].address
                assert servers[number].stop() == 0
                servers[number] = starts(f"again-{number}", address)
        finally:
            over.set()
        assert all(one.result() for one in reads)


@pytest.mark.extended
def test_while_the_object_store_is_away_nothing_is_lost(world: World, starts: _Starts) -> None:
    """It is killed while samples arrive, and comes back: what was acknowledged is there, and the rest can be sent again."""
    server = starts("a")
    samples = [SyntheticSample(f"s{number}", seed=number, num_tokens=200) for number in range(40)]
    stored: list[SyntheticSample] = []
    killed = threading.Event()

    def send() -> None:
        for sample in samples:
            with suppress(grpc.RpcError, StopIteration, AssertionError), IngestClient(server.address) as sender:
                sender.store(sample, rows_per_chunk=64)
                stored.append(sample)
            if len(stored) == 10 and not killed.is_set():
                object_store().kill()
                killed.set()

    with ThreadPoolExecutor(1) as threads:
        sends = threads.submit(send)
        assert killed.wait(60)
        object_store().start()
        sends.result()
    client = starts.connected(server)
    wait_until(lambda: client.status().health == "ok")
    with IngestClient(server.address) as sender:
        sender.store(*[sample for sample in samples if sample not in stored])
    for sample in samples:
        check(client, sample)
    wait_until(lambda: _is_swept(world))
    verdicts = list(client.verify())
    assert not [verdict for verdict in verdicts if verdict.damage]
    assert len(verdicts) == len(samples) == len(world.objects())


def test_a_commit_that_takes_long_is_answered_meanwhile(tmp_path: Path) -> None:
    """A connector gives a stream up that says nothing for as long as it waits for any answer."""
    sample = SyntheticSample("s")
    with S3Proxy(object_store().endpoint) as proxy, ExitStack() as ends:
        world = World(tmp_path, proxy.endpoint)
        server = _Starts(world, tmp_path, ends)("a")
        proxy.before = lambda line: time.sleep(6.0 * (line.startswith("PUT") and "/default/" in line))
        sender = ends.enter_context(IngestClient(server.address))
        number = _sent(sender, sample)
        commit = ingest_pb2.CommitSample(sample=number, row_count=sample.num_tokens, token_ids=sample.token_ids)
        sender.send(ingest_pb2.IngestRequest(commit=commit))
        assert list(sender.next_reply("ack").ack.chunks) == []
        assert sender.next_reply("committed").committed.sample == number


# What the command says.


def _serve(world: World, *options: str, **environment: str) -> tuple[int, str]:
    words = ("serve", "--store", world.store_url, "--listen", "127.0.0.1:0", *options)
    done = run_cli(*words, environment={**world.environment, **environment})
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_the_check_tries_both(world: World, tmp_path: Path) -> None:
    there = ("--scratch", str(tmp_path / "scratch"), "--check-config")
    right = ("--catalogue", world.catalogue_url)
    assert _serve(world, *there, *right) == (0, "The configuration is right.")
    assert not (tmp_path / "scratch").exists()
    assert world.objects() == []
    code, said = _serve(world, *there, *right, **object_store().environment("no-write"))
    assert (code, "lack the right s3:PutObject" in said) == (2, True), said
    code, said = _serve(world, *there, *right, AWS_SECRET_ACCESS_KEY="wrong")
    assert (code, "the credentials are not those of" in said) == (2, True), said
    code, said = _serve(world, *there, "--catalogue", cluster().database())
    assert (code, "run slotstream migrate" in said) == (2, True), said
    code, said = _serve(world, *there, "--catalogue", "postgresql://nobody@127.0.0.1:1/none")
    assert (code, "cannot be reached" in said) == (2, True), said
    code, said = _serve(world, *there, "--catalogue", f"postgresql://me:{_SECRET}@127.0.0.1/none")
    assert (code, "PGPASSFILE" in said, _SECRET in said) == (2, True, False), said


def test_a_start_says_what_is_wrong(world: World, tmp_path: Path) -> None:
    right = ("--catalogue", world.catalogue_url, "--scratch", str(tmp_path / "scratch"))
    code, said = _serve(world, *right, AWS_SECRET_ACCESS_KEY="wrong")
    assert (code, said.startswith("slotstream serve: the credentials are not those of")) == (1, True), said
    (tmp_path / "scratch" / "catalog.sqlite").write_text("")
    code, said = _serve(world, *right)
    assert (code, "is the data directory of a server" in said) == (1, True), said
