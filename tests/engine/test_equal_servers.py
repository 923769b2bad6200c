"""A real vLLM beside two equal servers over one bucket: every row is its token's, and a restart of each costs nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from store.cluster_kit import World
from support.ports import free_port
from support.server import ServerProcess
from support.stack import Stack, stack
from support.waiting import wait_until
from support.workload import LAYER_IDS, Ask, assert_rows_are_true, check_exact, random_prompts, send, text_tokens

from slotstream.client import Client, connect

_ENGINES = [pytest.mark.postgres, pytest.mark.objects]
pytestmark = [pytest.mark.vllm, *_ENGINES, pytest.mark.extended, pytest.mark.timeout(1200)]

_AT_ONCE = 4
_BETWEEN = 12  # Samples and reads, from one restart to the next.
_ROUNDS = 3


class Servers:
    """Two over one bucket and one catalogue, each at an address of its own through all its lives."""

    def __init__(self, place: Path, ends: ExitStack) -> None:
        self._place = place
        self._world = World(place)
        ends.callback(self._world.close)
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self._running = [self._started(number) for number in range(2)]
        ends.callback(self._end)

    def _started(self, number: int) -> ServerProcess:
        environment = {**self._world.environment, "SLOTSTREAM_SERVE_CATALOGUE": self._world.catalogue_url}
        options = ("--store", self._world.store_url, "--scratch", str(self._place / f"server-{number}"))
        return ServerProcess(None, *options, environment=environment, address=self.addresses[number])

    def _end(self) -> None:
        for server in self._running:
            server.__exit__(None, None, None)

    def restart(self, number: int) -> None:
        """SIGTERM, and again until it is ready."""
        stopped = self._running[number]
        assert stopped.stop() == 0, stopped.log()
        self._running[number] = self._started(number)
        stopped.__exit__(None, None, None)


class Load:
    """Requests, and a reader of all that was stored by them, until `stop`."""

    def __init__(self, port: int, client: Client) -> None:
        self._port, self._client = port, client
        self._rng = random.Random(7)
        self.prompts: dict[str, list[int]] = {}
        self.answered: list[str] = []
        self.reads = 0
        self.wrong: list[str] = []
        self._over = threading.Event()

    def send(self) -> None:
        while not self._over.is_set():
            count = len(self.prompts)
            asks = []
            for number in range(count, count + _AT_ONCE):
                name, prompt = f"s{number}", text_tokens(self._rng, self._rng.choice((1, 40, 300, 900)))
                self.prompts[name] = prompt
                asks.append(Ask(prompt, {"namespace": "load", "sample_id": name}))
            for ask, answer in zip(asks, send(self._port, asks, _AT_ONCE), strict=True):
                if answer.said is None or "error" in answer.said:
                    self.wrong.append(f"{ask.params['sample_id']} was answered with {answer.said}")
                self.answered.append(ask.params["sample_id"])

    def read(self) -> None:
        rng = random.Random(8)
        while not self._over.is_set():
            if not self.answered:
                self._over.wait(0.1)
                continue
            name = rng.choice(self.answered[-20:])
            try:
                check_one(self._client, name, self.prompts[name])
            except Exception as error:
                self.wrong.append(f"a read of {name}: {type(error).__name__}: {error}")
            self.reads += 1

    def go_on(self) -> None:
        """Returns once so many more samples were answered, and as many were read."""
        answered, reads = len(self.answered) + _BETWEEN, self.reads + _BETWEEN
        wait_until(lambda: len(self.answered) >= answered and self.reads >= reads, "more samples and reads")

    def stop(self) -> None:
        self._over.set()


def check_one(client: Client, name: str, prompt: list[int]) -> None:
    sample = client.get(name, namespace="load", wait_s=60.0)
    assert sample.token_ids.tolist() == prompt
    assert_rows_are_true(sample)


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def servers(tmp_path: Path, ends: ExitStack) -> Servers:
    return Servers(tmp_path, ends)


@pytest.fixture
def running(servers: Servers, truth_models: dict[str, Path], tmp_path: Path, ends: ExitStack) -> Stack:
    work = tmp_path / "engine"
    work.mkdir()
    return ends.enter_context(stack(work, truth_models["dense"], LAYER_IDS, serve=False, server=servers.addresses, streams=2))


def test_every_row_is_right_and_a_restart_of_each_server_costs_nothing(servers: Servers, running: Stack) -> None:
    with connect(servers.addresses) as client, ThreadPoolExecutor(2) as threads:
        prompts = random_prompts(random.Random(6), 20)
        check_exact(client, running.vllm_port, "truth", prompts)
        load = Load(running.vllm_port, client)
        under_way = [threads.submit(load.send), threads.submit(load.read)]
        try:
            for number in [0, 1] * _ROUNDS:
                load.go_on()
                servers.restart(number)
            load.go_on()
        finally:
            load.stop()
        for one in under_way:
            one.result()
        assert not load.wrong
    for address in servers.addresses:
        with connect(address) as client:
            for name, prompt in load.prompts.items():
                check_one(client, name, prompt)
            states = {info.sample_id: info.state for info in client.list(namespace="load")}
            assert states == dict.fromkeys(load.prompts, "COMMITTED")
            assert len(list(client.list(namespace="truth"))) == len(prompts)
