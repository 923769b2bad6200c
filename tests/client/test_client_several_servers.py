"""One client of several servers that hold the same samples: each call goes to one that is there."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_samples import failing, info_of, read_header, read_rows, serving
from support.ingest_client import IngestClient
from support.numbered import NumberedSample, store
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.waiting import wait_until

from slotstream.client import Client, ConfigError, SampleNotFound, ServerUnavailable, connect, many, rows
from slotstream.client.connection import Connection
from slotstream.v1 import samples_pb2 as pb
from slotstream.wire.errors import PermissionDenied, SlotStreamError
from slotstream.wire.frames import Frame

LENGTHS = [20_000] * 12
SAMPLE = SyntheticSample("s", dtype="F32", num_tokens=40)
AWAY = grpc.StatusCode.UNAVAILABLE


def nobody() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[NumberedSample]]:
    """A data directory whose server was stopped, and what is in it."""
    path = tmp_path_factory.mktemp("stored") / "data"
    with ServerProcess(path) as server, IngestClient(server.address) as ingest:
        return path, store(ingest, "n", LENGTHS)


@pytest.fixture
def twins(stored: tuple[Path, list[NumberedSample]], tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Two servers with the same samples."""
    with contextlib.ExitStack() as stack:
        for name in ("a", "b"):
            shutil.copytree(stored[0], tmp_path / name)
        yield [stack.enter_context(ServerProcess(tmp_path / name)) for name in ("a", "b")]


def asked(client: Client, servers: list[ServerProcess]) -> ServerProcess:
    """The server that the client's next call goes to."""
    address = client._rpc._servers.current().address
    return next(server for server in servers if server.address == address)


def addresses(servers: list[ServerProcess]) -> list[str]:
    return [server.address for server in servers]


def assert_numbers(found: dict[str, Any], samples: list[NumberedSample]) -> None:
    assert sorted(found) == [sample.sample_id for sample in samples]
    for sample in samples:
        numbers = found[sample.sample_id].hidden_states[:, 0, 0].tolist()
        assert numbers == list(range(sample.first, sample.first + sample.num_tokens))


def test_a_first_address_where_nobody_is_costs_no_call(
    twins: list[ServerProcess], stored: tuple[Path, list[NumberedSample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = nobody(), twins[0].address
    ids = [sample.sample_id for sample in stored[1]]
    for at in range(8):  # Which one is asked first is chance.
        with connect([dead, alive] if at % 2 else f"{dead}, {alive}", connect_timeout_s=at % 4 * 5.0) as client:
            assert client.addresses == (dead, alive)
            assert [info.sample_id for info in client.list(namespace="n")] == ids[::-1]
            assert client.stat(ids[0], namespace="n").sample_id == ids[0]
            assert client.get(ids[0], namespace="n").token_ids.tolist() == stored[1][0].token_ids
            assert all(answer.sample is not None for answer in client.get_many(ids[:3], namespace="n", retry_s=0))
            assert all(verdict.damage is None for verdict in client.verify(ids[0], namespace="n"))
            assert client.lease(ids[0], 60, namespace="n") > 0
            client.ack(ids[0], namespace="n")
            assert client.status().health == "ok"
            with pytest.raises(SampleNotFound):
                client.delete("not-there", namespace="n")
    monkeypatch.setenv("SLOTSTREAM_SERVER", f"{dead},{alive}")
    with contextlib.closing(Connection(None)) as connection:
        assert connection.client().stat(ids[0], namespace="n").sample_id == ids[0]


def test_a_kill_amid_many_reads_costs_none_of_them(
    twins: list[ServerProcess], stored: tuple[Path, list[NumberedSample]]
) -> None:
    with connect(addresses(twins)) as client:
        answers = client.get_many(client.list(namespace="n"), retry_s=0)
        found = [next(answers) for _ in range(2)]
        first = asked(client, twins)
        first.stop(signal.SIGKILL)
        found += answers
        assert asked(client, twins) is not first
        assert_numbers({answer.sample_id: answer.sample for answer in found}, stored[1])


@pytest.mark.parametrize("behind", [1, 2])
def test_a_server_that_goes_right_behind_the_last_row_of_a_sample_costs_none(
    twins: list[ServerProcess], stored: tuple[Path, list[NumberedSample]], behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, headers = many._Call.take, 0

    def breaks(call: many._Call, limit_s: float) -> Frame | None:
        nonlocal headers
        frame = take(call, limit_s)
        headers += frame is not None and frame[0] == many._HEADER_TAG
        if headers == behind + 1:
            headers = -len(stored[1])  # Once.
            raise ServerUnavailable("of a test")
        return frame

    monkeypatch.setattr(many._Call, "take", breaks)
    with connect(addresses(twins)) as client:
        found = list(client.get_many(client.list(namespace="n"), retry_s=0))
    assert headers < 0
    assert_numbers({answer.sample_id: answer.sample for answer in found}, stored[1])


def test_a_kill_amid_rows_costs_none_of_them(twins: list[ServerProcess], stored: tuple[Path, list[NumberedSample]]) -> None:
    with connect(addresses(twins)) as client:
        batches = iter(rows(4, 512, client=client, namespace="n", buffer_rows=4000, retry_s=0))
        numbers = [int(number) for number in next(batches)[:, 0]]
        asked(client, twins).stop(signal.SIGKILL)
        numbers += [int(number) for batch in batches for number in batch[:, 0]]
        assert sorted(numbers) == list(range(sum(LENGTHS)))


def test_a_kill_amid_pages_costs_none_of_them(twins: list[ServerProcess], stored: tuple[Path, list[NumberedSample]]) -> None:
    with connect(addresses(twins)) as client:
        infos = client.list(namespace="n", page_size=3)
        found = [next(infos).sample_id for _ in range(3)]
        asked(client, twins).stop(signal.SIGKILL)
        found += [info.sample_id for info in infos]
        assert found == [sample.sample_id for sample in stored[1][::-1]]


def test_copies_with_other_tokens_move_together(twins: list[ServerProcess]) -> None:
    with connect(addresses(twins)) as client:
        other = client.with_token("another-token-of-a-test")
        first = asked(client, twins)
        assert asked(other, twins) is first
        first.stop(signal.SIGKILL)
        other.status()
        assert asked(client, twins) is asked(other, twins) is not first


def test_a_server_that_was_away_is_asked_again_once_the_other_is(twins: list[ServerProcess], tmp_path: Path) -> None:
    with connect(addresses(twins)) as client:
        first = asked(client, twins)
        first.stop(signal.SIGKILL)
        client.status()
        with ServerProcess(first.data_dir, address=first.address):
            asked(client, twins).stop(signal.SIGKILL)
            wait_until(lambda: _answers(client.status))


def _answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except ServerUnavailable:
        return False  # gRPC waits a little before it connects again.
    return True


def test_all_away_is_one_error_that_names_them_all() -> None:
    dead = [nobody(), nobody(), "unix:/no/such/socket"]
    said = "none of 3 servers answers: "
    with pytest.raises(ServerUnavailable, match=said) as caught:
        connect(dead, connect_timeout_s=0.5)
    errors: list[SlotStreamError] = [caught.value]
    with connect(dead, connect_timeout_s=0) as client:
        for call in (
            lambda: client.stat("s"),
            lambda: list(client.list()),
            lambda: client.get("s"),
            lambda: list(client.get_many(["s"], retry_s=0)),
            lambda: list(client.verify()),
        ):
            with pytest.raises(ServerUnavailable, match=said) as caught:
                call()
            errors.append(caught.value)
    for error in errors:
        assert error.code == "SERVER_UNAVAILABLE"
        for address in dead:
            assert str(error).count(address) == 1


def _first_asked(client: Client, address: str) -> None:
    """Have the client ask this server next."""
    servers = client._rpc._servers
    while servers.current().address != address:
        servers.after(servers.current())


def test_a_server_that_shuts_down_is_left() -> None:
    draining = failing(AWAY, "the server is shutting down", slotstream_code="SERVER_DRAINING")
    with (
        serving(Stat=draining, Read=draining, ReadMany=draining) as leaving,
        serving(
            Stat=lambda request, context: info_of(SAMPLE),
            Read=lambda request, context: iter([read_header(SAMPLE), read_rows(SAMPLE, 0, 40)]),
            ReadMany=lambda request, context: iter([read_header(SAMPLE), read_rows(SAMPLE, 0, 40)]),
        ) as staying,
    ):
        for call in (
            lambda client: client.stat("s"),
            lambda client: client.get("s", count=False),
            lambda client: list(client.get_many(["s"], retry_s=0)),
        ):
            with connect([leaving, staying]) as client:
                _first_asked(client, leaving)
                call(client)
                assert client._rpc._servers.current().address == staying


def test_a_server_that_is_back_is_asked_again_before_a_call_fails() -> None:
    """Servers restart one after the other. gRPC has seen the first one away, and tries it again only now and then."""
    is_up = serving(
        first := nobody(),
        Stat=lambda request, context: info_of(SAMPLE),
        Read=lambda request, context: iter([read_header(SAMPLE), read_rows(SAMPLE, 0, 40)]),
    )
    draining = failing(AWAY, "the server is shutting down", slotstream_code="SERVER_DRAINING")
    with serving(Stat=draining, Read=draining) as second, connect([first, second], connect_timeout_s=0) as client:
        for _ in range(3):  # The pauses between its tries grow.
            with pytest.raises(ServerUnavailable, match="none of 2 servers answers"):
                client.stat("s")
        with is_up:
            assert client.stat("s").sample_id == "s"
            assert client._rpc._servers.current().address == first
            assert client.get("s", count=False).token_ids.tolist() == SAMPLE.token_ids


def test_what_a_server_answers_is_not_asked_of_another() -> None:
    def never(request: Any, context: grpc.ServicerContext) -> Any:
        raise AssertionError("asked")

    denied = failing(grpc.StatusCode.PERMISSION_DENIED, "not for you", slotstream_code="PERMISSION_DENIED")
    with serving(Stat=denied) as one, serving(Stat=never) as two, connect([one, two]) as client:
        _first_asked(client, one)
        with pytest.raises(PermissionDenied):
            client.stat("s")
        assert client._rpc._servers.current().address == one


@pytest.mark.parametrize(
    ("name", "moves"),
    [("Delete", True), ("CountRead", False)],
)
def test_what_may_have_acted_goes_on_where_a_second_time_is_harmless(name: str, *, moves: bool) -> None:
    came = threading.Semaphore(0)
    reply = {"Delete": pb.DeleteReply(), "CountRead": pb.CountReadReply()}[name]

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        came.release()
        return reply

    with serving(**{name: failing(AWAY, "gone")}) as one, serving(**{name: answer}) as two, connect([one, two]) as client:
        _first_asked(client, one)
        if moves:
            client.delete("s")
        else:
            with pytest.raises(ServerUnavailable):
                client._rpc.count_read(pb.CountReadRequest(sample_id="s"))
        assert came.acquire(blocking=False) is moves
        assert client._rpc._servers.current().address == two  # The next call goes there either way.


def test_a_server_that_says_nothing_is_left_by_the_next_call() -> None:
    waits = threading.Event()

    def hang(request: Any, context: grpc.ServicerContext) -> Any:
        waits.wait(60)
        return info_of(SAMPLE)

    with serving(Stat=hang) as one, serving(Stat=lambda request, context: info_of(SAMPLE)) as two:
        with connect([one, two], call_timeout_s=0.2) as client:
            _first_asked(client, one)
            with pytest.raises(SlotStreamError, match="no answer in time"):
                client.stat("s")
            assert client.stat("s").sample_id == "s"
        waits.set()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a:1", "b"], "address 'b' is not host:port; did you mean b:50151?"),
        ("a:1,a:1", "address 'a:1' is named twice"),
        ([], "the list of server addresses is empty"),
    ],
)
def test_a_wrong_list_is_refused_before_anything_is_asked(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(given)
    assert said in str(caught.value)
