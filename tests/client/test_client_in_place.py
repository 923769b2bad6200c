"""Samples taken whole out of their files: the server, if it is asked at all, answers out of its catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.waiting import wait_until

from slotstream.client import Answer, Client, Damaged, SampleInfo, connect
from slotstream.wire.layout import file_path

_TOKENS = 50
_COLUMNS = {
    "loss_mask": bytes(row % 3 == 0 for row in range(_TOKENS)),
    "positions": b"".join((2 * row).to_bytes(8, "little") for row in range(_TOKENS)),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose files may be spoiled, and whose counters count these tests alone."""
    with ServerProcess(tmp_path_factory.mktemp("in_place"), "--metrics", "127.0.0.1:0") as server:
        yield server


@pytest.fixture
def client(own: ServerProcess) -> Iterator[Client]:
    with connect(own.address, data_dir=own.data_dir) as connected:
        yield connected


@pytest.fixture
def fill(own: ServerProcess) -> Iterator[IngestClient]:
    with IngestClient(own.address) as sender:
        yield sender


def _reads(server: ServerProcess) -> float:
    """Calls that asked for rows, so far."""
    return sum(server.metric("slotstream_requests_total", method=name) for name in ("Read", "ReadMany"))


def _assert_is(answer: Answer, sample: SyntheticSample, layers: tuple[int, ...] | None = None) -> None:
    assert answer.error is None
    assert answer.sample is not None
    assert answer.sample.hidden_states.contiguous().view(torch.uint8).numpy().tobytes() == sample.rows(layers=layers)
    assert answer.sample.token_ids.tolist() == list(sample.token_ids)


def _file(server: ServerProcess, sample: SyntheticSample) -> Path:
    return server.data_dir / file_path(sample.namespace, sample.sample_id)


def _flipped(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("layers", [None, (4, 1)])
def test_what_was_listed_is_read_without_a_question(
    own: ServerProcess, client: Client, fill: IngestClient, namespace: str, layers: tuple[int, ...] | None
) -> None:
    samples = [SyntheticSample(f"s{n}", namespace=namespace, layer_ids=(1, 2, 4), num_tokens=3 + n, seed=n) for n in range(40)]
    fill.store(*samples)
    before = _reads(own)
    for answer, sample in zip(client.get_many(namespace=namespace, layers=layers), reversed(samples), strict=True):
        _assert_is(answer, sample, layers)
    listed = list(client.list(namespace=namespace))
    assert [answer.sample_id for answer in client.get_many(listed)] == [info.sample_id for info in listed]
    assert _reads(own) == before
    wait_until(lambda: {client.stat(info.sample_id, namespace=namespace).reads for info in listed} == {2})


def test_what_is_gone_or_another_since_it_was_listed_is_found(
    client: Client, fill: IngestClient, own: ServerProcess, namespace: str
) -> None:
    """Also among ids, which are read in calls: each answer stays in its place."""
    kept, gone, replaced = (SyntheticSample(name, namespace=namespace, seed=n) for n, name in enumerate("abc"))
    fill.store(kept, gone, replaced)
    infos = {info.sample_id: info for info in client.list(namespace=namespace)}
    client.delete("b", namespace=namespace)
    client.delete("c", namespace=namespace)
    another = SyntheticSample("c", namespace=namespace, seed=7)
    fill.store(another)
    asked: list[str | SampleInfo] = ["a", infos["b"], "c", infos["c"], infos["a"], "b", "a"]
    found = list(client.get_many(asked, namespace=namespace))
    for at, sample in {0: kept, 2: another, 3: another, 4: kept, 6: kept}.items():
        _assert_is(found[at], sample)
    assert [answer.error and answer.error.code for answer in (found[1], found[5])] == ["NOT_FOUND", "NOT_FOUND"]


def test_layers_that_a_listed_sample_lacks_are_refused(client: Client, fill: IngestClient, namespace: str) -> None:
    fill.store(SyntheticSample("s", namespace=namespace))
    (answer,) = client.get_many(namespace=namespace, layers=[77])
    assert answer.error is not None
    assert answer.error.code == "BAD_LAYERS"


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: _flipped(path, 20), id="header"),
        pytest.param(lambda path: _flipped(path, -1), id="token ids"),
        pytest.param(lambda path: _flipped(path, -1000), id="rows"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), id="a byte short"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes() + b"."), id="a byte long"),
        pytest.param(Path.unlink, id="missing"),
    ],
)
def test_damage_is_told_as_the_server_tells_it(
    own: ServerProcess, client: Client, fill: IngestClient, namespace: str, spoil: Callable[[Path], None]
) -> None:
    """Read by its id, by a call for many, and after a listing."""
    sample = SyntheticSample("s", namespace=namespace)
    fill.store(sample)
    spoil(_file(own, sample))
    with pytest.raises(Damaged):
        client.get("s", namespace=namespace)
    for asked in (["s"], None):
        (answer,) = client.get_many(asked, namespace=namespace)
        assert isinstance(answer.error, Damaged)


def test_further_columns_come_out_of_the_file(own: ServerProcess, client: Client, fill: IngestClient, namespace: str) -> None:
    sample = SyntheticSample("s", namespace=namespace, num_tokens=_TOKENS)
    number = fill.open(sample, _COLUMNS)
    fill.send_rows(number, sample)
    fill.commit(number, sample, _COLUMNS)
    before = own.metric("slotstream_sent_bytes_total")
    for got in (client.get("s", namespace=namespace), *(a.sample for a in client.get_many(namespace=namespace))):
        assert got is not None
        assert {name: column.numpy().tobytes() for name, column in got.columns.items()} == _COLUMNS
    part = client.get("s", namespace=namespace, start=7, stop=12, layers=[2])
    assert part.token_ids.tolist() == list(sample.token_ids[7:12])
    assert part.columns["positions"].tolist() == [14, 16, 18, 20, 22]
    assert own.metric("slotstream_sent_bytes_total") - before < 2048  # Two headers, without a column.
    _flipped(_file(own, sample), -1)
    with pytest.raises(Damaged, match="loss_mask"):
        client.get("s", namespace=namespace)
