"""The client against a real server: what was sent is what is read, and waiting, absence and failure are told apart."""

from __future__ import annotations

import dataclasses
import datetime
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.client import (
    BadLayers,
    BadTokenRange,
    Client,
    Damaged,
    DeadlineExceeded,
    Sample,
    SampleFailed,
    SampleNotFound,
    SampleState,
    ServerUnavailable,
    StillArriving,
    connect,
)
from slotstream.wire.names import layer_names

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.fixture(params=[False, True], ids=["sent", "in place"])
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    with connect(server.address, data_dir=server.data_dir if request.param else None) as connected:
        yield connected


@pytest.fixture
def stored(ingest: IngestClient, namespace: str) -> SyntheticSample:
    sample = SyntheticSample("stored", namespace=namespace, tags={"split": "train"})
    ingest.store(sample)
    return sample


def expected(sample: SyntheticSample, start: int, stop: int, layers: tuple[int, ...]) -> torch.Tensor:
    """By the definition of a synthetic sample, without its byte encoder."""
    values = [[[sample.value(r, i, k) for k in range(sample.hidden_size)] for i in layers] for r in range(start, stop)]
    return torch.tensor(values).to(TORCH_DTYPES[sample.dtype]).reshape(-1, len(layers), sample.hidden_size)


def test_the_last_norms_output_goes_by_its_name(client: Client, ingest: IngestClient, namespace: str) -> None:
    names = {"layer_names": '["1", "2", "final"]'}
    sent = SyntheticSample("f", namespace=namespace, layer_ids=(1, 2, 7), metadata=names)
    ingest.store(sent)
    assert client.stat("f", namespace=namespace).layer_names == ("1", "2", "final")
    got = client.get("f", namespace=namespace, layers=["final", 1])
    assert (got.layer_ids, got.layer_names) == ((7, 1), ("final", "1"))
    assert torch.equal(got.hidden_states, expected(sent, 0, sent.num_tokens, (7, 1)))
    assert client.get("f", namespace=namespace, layers=[7]).layer_names == ("final",)
    with pytest.raises(BadLayers, match="not a sequence of layer ids"):
        client.get("f", namespace=namespace, layers=["last"])


def test_a_sample_without_the_last_norms_output_has_no_final(client: Client, stored: SyntheticSample) -> None:
    assert client.stat("stored", namespace=stored.namespace).layer_names == tuple(map(str, stored.layer_ids))
    with pytest.raises(BadLayers, match="'stored' has no layer 'final': its layers are"):
        client.get("stored", namespace=stored.namespace, layers=["final"])


@pytest.mark.parametrize("said", ["", "[", '["final"]', '["1", "1"]', '["x", "final"]', '{"1": 2}', "[1, 2, 3]"])
def test_layer_names_that_do_not_fit_are_not_heard(said: str) -> None:
    assert layer_names((1, 7), {"layer_names": said}) == ("1", "7")


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_a_sample_comes_back_as_it_was_sent(client: Client, ingest: IngestClient, namespace: str, dtype: str) -> None:
    sent = SyntheticSample("a", namespace=namespace, dtype=dtype, tags={"k": "v"}, metadata={"engine_id": "e"})
    ingest.store(sent)
    got = client.get("a", namespace=namespace)
    assert got.hidden_states.dtype is TORCH_DTYPES[dtype]
    assert torch.equal(got.hidden_states, expected(sent, 0, sent.num_tokens, sent.layer_ids))
    assert got.token_ids.dtype is torch.int64
    assert got.token_ids.tolist() == sent.token_ids
    assert (got.namespace, got.sample_id, got.layer_ids, got.start) == (namespace, "a", (1, 2, 4), 0)
    assert got.tags == {"k": "v"}
    assert got.metadata["engine_id"] == "e"


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (39, 40), (39, None), (7, 23), (0, 40), (16, 32), (9, 9), (40, None)])
def test_a_range_of_rows(client: Client, stored: SyntheticSample, start: int, stop: int | None) -> None:
    got = client.get("stored", namespace=stored.namespace, start=start, stop=stop)
    last = stored.num_tokens if stop is None else stop
    assert torch.equal(got.hidden_states, expected(stored, start, last, stored.layer_ids))
    assert got.token_ids.tolist() == stored.token_ids[start:last]
    assert got.start == start


@pytest.mark.parametrize("layers", [(1,), (4,), (4, 1), (2, 4, 1), (1, 2, 4)])
def test_layers_come_in_the_order_wanted(client: Client, stored: SyntheticSample, layers: tuple[int, ...]) -> None:
    got = client.get("stored", namespace=stored.namespace, start=3, stop=30, layers=layers)
    assert got.layer_ids == layers
    assert torch.equal(got.hidden_states, expected(stored, 3, 30, layers))


def test_a_sample_of_several_frames(client: Client, ingest: IngestClient, namespace: str) -> None:
    sent = SyntheticSample("large", namespace=namespace, dtype="F32", layer_ids=(3, 5), hidden_size=128, num_tokens=4500)
    ingest.store(sent, rows_per_chunk=1000)
    with client.read("large", namespace=namespace) as reader:
        blocks = [bytes(block.data) for block in reader]
    assert len(blocks) > 1
    assert b"".join(blocks) == sent.rows()
    assert client.get("large", namespace=namespace, start=1, stop=4499, layers=[5]).hidden_states.shape == (4498, 1, 128)


def test_reading_without_torch_gives_the_facts_then_blocks(client: Client, stored: SyntheticSample) -> None:
    with client.read("stored", namespace=stored.namespace, start=5, layers=[4, 2]) as reader:
        assert (reader.start, reader.stop, reader.num_rows, reader.layer_ids) == (5, 40, 35, (4, 2))
        assert reader.info.num_tokens == 40
        assert list(reader.token_ids) == stored.token_ids[5:]
        blocks = list(reader)
    assert b"".join(block.data for block in blocks) == stored.rows(5, layers=(4, 2))
    assert blocks[0].first_row == 5
    assert sum(block.rows for block in blocks) == 35


def test_what_the_stored_sample_does_not_have(client: Client, stored: SyntheticSample) -> None:
    with pytest.raises(BadTokenRange, match="40"):
        client.get("stored", namespace=stored.namespace, stop=41)
    with pytest.raises(BadTokenRange):
        client.get("stored", namespace=stored.namespace, start=41)
    with pytest.raises(BadLayers):
        client.get("stored", namespace=stored.namespace, layers=[1, 3])


def _in_background(client: Client, namespace: str) -> Future[Sample]:
    started = threading.Event()

    def get() -> Sample:
        started.set()
        return client.get("late", namespace=namespace, wait_s=120)

    executor = ThreadPoolExecutor(1)
    result = executor.submit(get)
    executor.shutdown(wait=False)
    assert started.wait(30)
    return result


@pytest.mark.parametrize("opened_before", [False, True])
def test_get_waits_for_a_sample_until_it_is_committed(
    client: Client, ingest: IngestClient, namespace: str, opened_before: bool
) -> None:
    sent = SyntheticSample("late", namespace=namespace)
    if opened_before:
        number = ingest.open(sent)
        ingest.send_rows(number, sent)
        waiting = _in_background(client, namespace)
    else:
        waiting = _in_background(client, namespace)
        number = ingest.open(sent)
        ingest.send_rows(number, sent)
    assert client.stat("late", namespace=namespace).state is SampleState.ARRIVING
    assert not waiting.done()
    ingest.commit(number, sent)
    assert torch.equal(waiting.result(60).hidden_states, expected(sent, 0, 40, sent.layer_ids))


def test_get_ends_waiting_when_the_sample_fails(client: Client, ingest: IngestClient, namespace: str) -> None:
    waiting = _in_background(client, namespace)
    ingest.fail(SyntheticSample("late", namespace=namespace), code="ROWS_NOT_COMPUTED", message="another connector loaded them")
    with pytest.raises(SampleFailed, match="another connector loaded them") as caught:
        waiting.result(60)
    assert caught.value.reason == "ROWS_NOT_COMPUTED"


def test_a_sample_that_never_comes(client: Client, namespace: str) -> None:
    with pytest.raises(SampleNotFound):
        client.get("never", namespace=namespace, wait_s=0.05)
    with pytest.raises(SampleNotFound):
        client.stat("never", namespace=namespace)


def test_a_sample_that_does_not_come_in_time(client: Client, ingest: IngestClient, namespace: str) -> None:
    sent = SyntheticSample("slow", namespace=namespace)
    number = ingest.open(sent)
    ingest.send_rows(number, sent, 0, 1)
    with pytest.raises(DeadlineExceeded) as caught:
        client.get("slow", namespace=namespace, wait_s=0.05)
    assert caught.value.retryable


def test_a_failed_sample_says_why(client: Client, ingest: IngestClient, namespace: str) -> None:
    ingest.fail(SyntheticSample("bad", namespace=namespace), code="SLOT_MISMATCH", message="slot 7 is not in the table")
    with pytest.raises(SampleFailed) as caught:
        client.get("bad", namespace=namespace, wait_s=0)
    assert caught.value.reason == "SLOT_MISMATCH"
    info = client.stat("bad", namespace=namespace)
    assert (info.state, info.error_code, info.error_message) == ("FAILED", "SLOT_MISMATCH", "slot 7 is not in the table")


def test_stat_says_all_that_is_known(client: Client, stored: SyntheticSample, server: ServerProcess) -> None:
    info = client.stat("stored", namespace=stored.namespace)
    assert info.state is SampleState.COMMITTED
    assert (info.model, info.dtype, info.layer_ids, info.hidden_size, info.num_tokens) == (
        "test/model",
        "BF16",
        (1, 2, 4),
        16,
        40,
    )
    assert info.tags == {"split": "train"}
    assert (info.error_code, info.error_message) == (None, None)
    assert info.committed_unix_ns is not None
    assert info.created_unix_ns <= info.committed_unix_ns
    assert info.created.timestamp() == pytest.approx(info.created_unix_ns / 1e9, abs=1e-5)
    assert info.file_bytes == _file_of(server, stored).stat().st_size
    assert all(isinstance(value, str | int | tuple | dict | None) for value in dataclasses.asdict(info).values())


def test_delete_removes_file_and_row(
    client: Client, stored: SyntheticSample, ingest: IngestClient, server: ServerProcess
) -> None:
    path = _file_of(server, stored)
    client.delete("stored", namespace=stored.namespace)
    assert not path.exists()
    with pytest.raises(SampleNotFound):
        client.stat("stored", namespace=stored.namespace)
    with pytest.raises(SampleNotFound):
        client.delete("stored", namespace=stored.namespace)
    arriving = dataclasses.replace(stored, sample_id="arriving")
    ingest.send_rows(ingest.open(arriving), arriving, 0, 1)
    with pytest.raises(StillArriving):
        client.delete("arriving", namespace=stored.namespace)


def test_list_filters_and_pages(client: Client, ingest: IngestClient, namespace: str) -> None:
    for number in range(7):
        tags = {"parity": "odd" if number % 2 else "even", "n": str(number)}
        sample = SyntheticSample(f"s{number}", namespace=namespace, model=f"m{number // 4}", tags=tags, num_tokens=2)
        ingest.store(sample)
    ingest.fail(SyntheticSample("failed", namespace=namespace, model="m0"))

    def ids(**filters: Any) -> list[str]:
        return [info.sample_id for info in client.list(namespace=namespace, **filters)]

    newest_first = ["failed", "s6", "s5", "s4", "s3", "s2", "s1", "s0"]
    assert ids() == newest_first
    assert ids(page_size=3) == newest_first
    assert ids(page_size=1) == newest_first
    assert ids(limit=5, page_size=2) == newest_first[:5]
    assert ids(limit=0) == []
    assert ids(state="committed") == newest_first[1:]
    assert ids(state=SampleState.FAILED) == ["failed"]
    assert ids(state="arriving") == []
    assert ids(model="m1") == ["s6", "s5", "s4"]
    assert ids(tags={"parity": "odd"}, page_size=2) == ["s5", "s3", "s1"]
    assert ids(tags={"parity": "odd", "n": "3"}) == ["s3"]
    assert ids(tags={"parity": "neither"}) == []
    created = {info.sample_id: info.created_unix_ns for info in client.list(namespace=namespace)}
    assert ids(created_from=created["s5"]) == ["failed", "s6", "s5"]
    assert ids(created_until=created["s2"]) == ["s1", "s0"]
    assert ids(created_from=created["s2"], created_until=created["s4"]) == ["s3", "s2"]
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    assert ids(created_from=later) == []
    assert len(ids(created_until=later)) == 8
    assert "s6" in {info.sample_id for info in client.list(model="m1")}  # Of every namespace.


def test_a_damaged_file_is_never_handed_out(client: Client, stored: SyntheticSample, server: ServerProcess) -> None:
    assert [verdict.sound for verdict in client.verify("stored", namespace=stored.namespace)] == [True]
    path = _file_of(server, stored)
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1  # In the rows: before them is the header, behind them 320 bytes of token ids.
    path.write_bytes(content)
    with pytest.raises(Damaged):
        client.get("stored", namespace=stored.namespace)
    (verdict,) = client.verify(namespace=stored.namespace)
    assert (verdict.sample_id, verdict.damage, verdict.sound) == ("stored", "HASH_MISMATCH", False)
    assert verdict.message
    path.unlink()
    assert [verdict.damage for verdict in client.verify("stored", namespace=stored.namespace)] == ["MISSING"]


def test_verify_of_an_unknown_sample(client: Client, namespace: str) -> None:
    with pytest.raises(SampleNotFound):
        list(client.verify("never", namespace=namespace))


def test_a_client_is_shared_between_threads(client: Client, ingest: IngestClient, namespace: str) -> None:
    samples = [SyntheticSample(f"s{seed}", namespace=namespace, seed=seed, num_tokens=5) for seed in range(8)]
    ingest.store(*samples)
    with ThreadPoolExecutor(4) as executor:
        got = list(executor.map(lambda sample: client.get(sample.sample_id, namespace=namespace), samples))
    assert all(torch.equal(g.hidden_states, expected(s, 0, 5, s.layer_ids)) for g, s in zip(got, samples, strict=True))


def test_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    sample = SyntheticSample("kept")
    with ServerProcess(tmp_path) as first, connect(first.address) as client:
        with IngestClient(first.address) as ingest:
            ingest.store(sample)
        client.stat("kept")
        first.stop()
        with pytest.raises(ServerUnavailable):
            client.stat("kept")
        with ServerProcess(tmp_path, address=first.address):
            assert _as_soon_as_there(client, "kept").sample_id == "kept"


def _as_soon_as_there(client: Client, sample_id: str) -> Sample:
    """Tries again until the server is back. Ends, if only by the test's time-out."""
    while True:
        try:
            return client.get(sample_id, wait_s=0)
        except ServerUnavailable:
            continue


def _file_of(server: ServerProcess, sample: SyntheticSample) -> Path:
    (path,) = (server.data_dir / sample.namespace).glob(f"*/{sample.sample_id}.safetensors")
    return path
