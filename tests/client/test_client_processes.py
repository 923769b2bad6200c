"""A client and other processes and threads: forked, closed while somebody waits, and pickled."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.ingest_client import IngestClient
from support.ports import free_port
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.waiting import WAIT_S

from slotstream.client import Client, SampleNotFound, connect
from slotstream.client.dataset import SampleDataset
from slotstream.wire.errors import Interrupted


def _in_a_fork(ask: Callable[[], str]) -> str:
    """What `ask` says in a process that was forked from this one."""
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                said = ask()
            except BaseException as error:
                said = repr(error)
            os.write(ours, said.encode()[:4000])
        finally:
            os._exit(0)
    os.close(ours)
    with os.fdopen(theirs, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said


@pytest.fixture
def own(tmp_path: Path) -> Any:
    """A server of its own: a fork takes along what this process has open."""
    with ServerProcess(tmp_path / "data", "--appear-grace-s", "60") as process:
        yield process


def test_a_client_that_was_inherited_over_fork_connects_anew(own: ServerProcess) -> None:
    with IngestClient(own.address) as ingest:  # Ended before: a child that is forked amid a gRPC call may crash in gRPC itself.
        ingest.store(SyntheticSample("s", num_tokens=3))
    with connect(own.address) as client:

        def read() -> str:
            return f"{client.stat('s').num_tokens} {client.get('s').token_ids.tolist()} {[i.sample_id for i in client.list()]}"

        here = read()
        for _ in range(12):  # A third of the first calls failed.
            assert _in_a_fork(read) == here
            assert read() == here


def test_what_was_under_way_is_the_parents(own: ServerProcess) -> None:
    with connect(own.address) as client, IngestClient(own.address) as ingest:
        ingest.store(SyntheticSample("s", num_tokens=4000))
        reader = client.read("s")

        def go_on() -> str:
            try:
                list(reader)
            except Interrupted as error:
                return f"Interrupted: {error}"
            finally:
                reader.close()
            return "read"

        assert "of the process that this one was forked from" in _in_a_fork(go_on)
        assert go_on() == "read"
        client.lease("s", seconds=60)
        assert _in_a_fork(lambda: str(client.lease("s", seconds=0))) == "0"  # Its own, of which there is none.
        assert client.stat("s").leased_until_unix_ns

        def close() -> str:
            client.close()
            return "closed"

        assert _in_a_fork(close) == "closed"
        assert client.stat("s").num_tokens == 4000


def test_a_read_is_counted_once_though_its_client_was_inherited_meanwhile(own: ServerProcess) -> None:
    """A client tells the server of its reads a moment later: what waits to be told at the fork is the parent's."""
    with IngestClient(own.address) as ingest:
        ingest.store(SyntheticSample("s", num_tokens=3), SyntheticSample("t", num_tokens=3))
    client = connect(own.address)

    def read() -> str:
        client.get("t")
        client.close()
        return "read"

    client.get("s")
    assert _in_a_fork(read) == "read"
    client.close()
    with connect(own.address) as other:
        assert [other.stat(sample_id).reads for sample_id in ("s", "t")] == [1, 1]


def test_a_closed_client_stays_closed_in_a_fork(own: ServerProcess) -> None:
    client = connect(own.address)
    client.close()
    assert _in_a_fork(lambda: str(client.stat("s"))) == "ValueError('this client is closed')"


def _many(client: Client) -> None:
    for answer in client.get_many(["none"], wait_s=3000.0):
        if answer.error is not None:
            raise answer.error


WAITS = [
    pytest.param(lambda client: client.get("none", wait_s=3000.0), id="get"),
    pytest.param(lambda client: client.read("none", wait_s=3000.0), id="read"),
    pytest.param(_many, id="get_many"),
    pytest.param(lambda client: list(SampleDataset(client, namespace="none", wait_s=3000.0)), id="dataset"),
    pytest.param(lambda client: SampleDataset(client, namespace="none", shuffle=True, wait_s=3000.0), id="planned"),
]


@pytest.mark.parametrize("wait", WAITS)
def test_close_ends_the_waits_of_other_threads(server: ServerProcess, wait: Callable[[Client], object]) -> None:
    _closed_while(connect(server.address), wait)


@pytest.mark.parametrize("wait", WAITS[2:3])
def test_close_ends_what_waits_for_a_server_that_is_away(wait: Callable[[Client], object], tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    _closed_while(connect(address, connect_timeout_s=0), wait)


def _closed_while(client: Client, wait: Callable[[Client], object]) -> None:
    """A thread waits; it ends when the client is closed, and says so."""
    said: list[BaseException] = []
    begun = threading.Event()

    def run() -> None:
        begun.set()
        try:
            wait(client)
        except BaseException as error:
            said.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    thread.join(0.5)
    client.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    (error,) = said
    assert isinstance(error, Interrupted | ValueError), error


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_a_client_that_is_pickled_says_what_to_do(how: Callable[[Client], object]) -> None:
    with (
        connect("127.0.0.1:1", connect_timeout_s=0) as client,
        pytest.raises(TypeError, match="pass the address, and connect there"),
    ):
        how(client)


def test_what_a_server_says_is_not_hidden_by_the_closing(server: ServerProcess) -> None:
    with connect(server.address) as client, pytest.raises(SampleNotFound):
        client.get("none", wait_s=0)
