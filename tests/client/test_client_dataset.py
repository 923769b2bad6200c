"""The torch dataset: every sample once, sharded without talk, and resumed where the trainer was."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample
from support.trainer import in_a_trainer, read_and_resume, read_with_workers
from torch.utils.data import DataLoader

from slotstream.client import Client, ConfigError, SampleNotFound, connect
from slotstream.client.dataset import SampleDataset


@pytest.fixture
def stored(ingest: IngestClient, namespace: str) -> list[str]:
    """Ids of 12 samples, newest first."""
    ids = [f"s{number:02}" for number in range(12)]
    ingest.store(*(SyntheticSample(i, namespace=namespace, num_tokens=3, tags={"last": i[-1]}) for i in ids))
    return ids[::-1]


def ids(samples: Any) -> list[str]:
    return [sample.sample_id for sample in samples]


def test_each_pass_yields_what_is_stored_then(
    server: ServerProcess, ingest: IngestClient, namespace: str, stored: list[str]
) -> None:
    ingest.fail(SyntheticSample("failed", namespace=namespace))
    ingest.store(SyntheticSample("elsewhere", namespace=f"{namespace}-other", num_tokens=3))
    dataset = SampleDataset(server.address, namespace=namespace, layers=[4, 1])
    samples = list(dataset)
    assert ids(samples) == stored
    assert samples[0].layer_ids == (4, 1)
    assert samples[0].hidden_states.shape == (3, 2, 16)
    assert ids(SampleDataset(server.address, namespace=namespace, tags={"last": "1"})) == ["s11", "s01"]
    ingest.store(SyntheticSample("new", namespace=namespace, num_tokens=3))
    assert ids(dataset) == ["new", *stored]


def test_a_sample_is_acked_once_the_next_one_is_asked_for(server: ServerProcess, namespace: str, stored: list[str]) -> None:
    with connect(server.address) as client:

        def acked() -> list[str]:
            return [name for name in stored if client.stat(name, namespace=namespace).acked_unix_ns]

        received = iter(SampleDataset(client, namespace=namespace, ack=True))
        next(received)
        assert acked() == []
        next(received)
        assert acked() == stored[:1]
        assert len(list(received)) == 10
        assert acked() == stored


def test_it_goes_on_where_the_trainer_was(
    server: ServerProcess, ingest: IngestClient, namespace: str, stored: list[str]
) -> None:
    with connect(server.address) as client:
        dataset = SampleDataset(client, namespace=namespace)
        received = iter(dataset)
        first = [next(received).sample_id for _ in range(5)]
        state = json.loads(json.dumps(dataset.state_dict()))
        assert state["received"] == 5
        # The list shifts under the cursor: one more on top, the last one received and the next one gone.
        ingest.store(SyntheticSample("new", namespace=namespace, num_tokens=3))
        client.delete(stored[4], namespace=namespace)
        client.delete(stored[5], namespace=namespace)
        resumed = SampleDataset(client, namespace=namespace)
        resumed.load_state_dict(state)
        rest = ids(resumed)
        assert first + rest == [*stored[:5], *stored[6:]]
        assert resumed.state_dict()["received"] == 5 + len(rest)
        # The pass that was resumed is over; the next one is a whole one.
        assert ids(resumed) == ["new", *stored[:4], *stored[6:]]


def test_a_pass_that_was_over_stays_over_once(server: ServerProcess, namespace: str, stored: list[str]) -> None:
    dataset = SampleDataset(server.address, namespace=namespace)
    assert len(list(dataset)) == 12
    resumed = SampleDataset(server.address, namespace=namespace)
    resumed.load_state_dict(dataset.state_dict())
    assert ids(resumed) == []
    assert ids(resumed) == stored


def test_a_sample_deleted_during_the_pass_is_left_out(server: ServerProcess, namespace: str, stored: list[str]) -> None:
    with connect(server.address) as client:
        received = iter(SampleDataset(client, namespace=namespace))
        first = next(received)
        client.delete(stored[3], namespace=namespace)
        assert ids([first, *received]) == [i for i in stored if i != stored[3]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_samples(server: ServerProcess, namespace: str, stored: list[str], world_size: int) -> None:
    shares = [ids(SampleDataset(server.address, namespace=namespace, rank=r, world_size=world_size)) for r in range(world_size)]
    assert sorted(i for share in shares for i in share) == sorted(stored)
    assert all(shares)


def test_workers_share_the_samples_and_keep_their_state(server: ServerProcess, namespace: str, stored: list[str]) -> None:
    alone, samples, state = in_a_trainer(read_with_workers, server.address, namespace)
    assert alone == 12
    assert sorted(ids(samples)) == sorted(stored)
    for sample in samples:
        assert torch.equal(sample.token_ids, torch.tensor([1000, 1001, 1002]))
    assert state.startswith("refused: ")
    assert "StatefulDataLoader" in state


def test_a_loader_that_collects_the_workers_state_resumes(server: ServerProcess, namespace: str, stored: list[str]) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    before, after = in_a_trainer(read_and_resume, server.address, namespace)
    assert len(before) == 5
    assert sorted(before + after) == sorted(stored)


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"version": None}, {"shards": 2}, {"received": "x"}, {"cursor": []}, {"cursor": 7}],
    ids=str,
)
def test_a_state_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    dataset = SampleDataset("127.0.0.1:1")
    good = dataset.state_dict()
    dataset.load_state_dict(good)
    with pytest.raises(ValueError, match="state"):
        dataset.load_state_dict({**good, **change})
    with pytest.raises(ValueError, match="state"):
        dataset.load_state_dict({})


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2"):
        SampleDataset("127.0.0.1:1", rank=2, world_size=2)


def test_a_client_passed_in_stays_open(server: ServerProcess, namespace: str, stored: list[str]) -> None:
    client: Client
    with connect(server.address) as client:
        assert len(list(SampleDataset(client, namespace=namespace))) == 12
        assert client.stat(stored[0], namespace=namespace).num_tokens == 3


def planned(server: ServerProcess, namespace: str, **options: Any) -> SampleDataset:
    return SampleDataset(server.address, namespace=namespace, shuffle=True, **options)


def test_a_shuffled_epoch_has_the_order_of_its_seed_and_number(
    server: ServerProcess, namespace: str, stored: list[str]
) -> None:
    dataset = planned(server, namespace, seed=3, layers=[4, 1])
    first = list(dataset)
    order = ids(first)
    assert sorted(order) == sorted(stored)
    assert order not in (stored, stored[::-1])
    assert first[0].layer_ids == (4, 1)
    assert ids(dataset) == order
    dataset.set_epoch(1)
    assert ids(dataset) != order
    assert ids(planned(server, namespace, seed=3)) == order
    assert ids(planned(server, namespace, seed=4)) != order
    plain = SampleDataset(server.address, namespace=namespace, as_of=dataset.as_of)
    assert ids(plain) == stored


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_planned_shards_are_even(
    server: ServerProcess, namespace: str, stored: list[str], world_size: int, shuffle: bool
) -> None:
    with connect(server.address) as client:
        as_of = client.moment()
    options: dict[str, Any] = {"namespace": namespace, "shuffle": shuffle, "as_of": as_of, "world_size": world_size}
    shares = [ids(SampleDataset(server.address, rank=rank, **options)) for rank in range(world_size)]
    assert sorted(i for share in shares for i in share) == sorted(stored)
    assert {len(share) for share in shares} <= {12 // world_size, -(-12 // world_size)}


def test_a_shuffled_epoch_goes_on_when_samples_came_and_went(
    server: ServerProcess, ingest: IngestClient, namespace: str, stored: list[str]
) -> None:
    with connect(server.address) as client:
        whole = ids(planned(server, namespace))
        dataset = SampleDataset(client, namespace=namespace, shuffle=True)
        received = iter(dataset)
        first = [next(received).sample_id for _ in range(5)]
        state = json.loads(json.dumps(dataset.state_dict()))
        ingest.store(*(SyntheticSample(f"new{n}", namespace=namespace, num_tokens=3) for n in range(5)))
        client.delete(whole[2], namespace=namespace)
        client.delete(whole[8], namespace=namespace)
        resumed = SampleDataset(client, namespace=namespace, shuffle=True)
        resumed.load_state_dict(state)
        assert first + ids(resumed) == [*whole[:8], *whole[9:]]
        assert (resumed.deleted_samples, resumed.state_dict()["received"]) == (1, 11)
        # The one that goes on meanwhile sees the same, and a sample of the old name is not the one that was committed then.
        ingest.store(SyntheticSample(whole[8], namespace=namespace, num_tokens=5))
        assert first + ids(received) == [*whole[:8], *whole[9:]]
        assert dataset.deleted_samples == 1
        assert len(ids(resumed)) == 15


def test_a_planned_state_of_another_order_is_refused(server: ServerProcess, namespace: str, stored: list[str]) -> None:
    state = planned(server, namespace).state_dict()
    planned(server, namespace).load_state_dict(state)
    with pytest.raises(ValueError, match="seed"):
        planned(server, namespace, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="keep ranks"):
        planned(server, namespace, rank=0, world_size=2, as_of=state["as_of"]).load_state_dict(state)
    with pytest.raises(ValueError, match="later moment"):
        planned(server, namespace, as_of=state["as_of"] - 1).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle"):
        SampleDataset(server.address, namespace=namespace).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle"):
        planned(server, namespace).load_state_dict(SampleDataset(server.address).state_dict())
    with pytest.raises(ConfigError, match="as_of"):
        planned(server, namespace, rank=0, world_size=2)


def test_a_namespace_without_samples_is_an_error(server: ServerProcess, ingest: IngestClient, namespace: str) -> None:
    for options in (dict[str, Any](), dict[str, Any](shuffle=True)):
        with pytest.raises(SampleNotFound, match=f"no committed sample in namespace '{namespace}'"):
            list(SampleDataset(server.address, namespace=namespace, **options))
    assert list(SampleDataset(server.address, namespace=namespace, ack=True)) == []  # An ack may have deleted the last one.
    later = threading.Timer(0.5, ingest.store, (SyntheticSample("s", namespace=namespace, num_tokens=3),))
    later.start()
    assert ids(SampleDataset(server.address, namespace=namespace, wait_s=60)) == ["s"]
    later.join()


def test_samples_of_different_lengths_make_a_padded_batch(server: ServerProcess, ingest: IngestClient, namespace: str) -> None:
    samples = {f"s{rows}": SyntheticSample(f"s{rows}", namespace=namespace, num_tokens=rows) for rows in (3, 1, 4)}
    ingest.store(*samples.values())
    dataset = SampleDataset(server.address, namespace=namespace)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=3, collate_fn=SampleDataset.collate)
    (batch,) = loader
    assert batch["hidden_states"].shape == (3, 4, 3, 16)
    assert batch["lengths"].tolist() == [4, 1, 3]
    assert batch["mask"].sum(dim=1).tolist() == [4, 1, 3]
    assert batch["layer_names"] == ("1", "2", "4")
    for at, name in enumerate(batch["sample_ids"]):
        sample = samples[name.removeprefix(f"{namespace}/")]
        assert batch["token_ids"][at, : sample.num_tokens].tolist() == sample.token_ids
        assert batch["hidden_states"][at, 0, 1, 2] == sample.value(0, 2, 2)
        assert not batch["hidden_states"][at][~batch["mask"][at]].any()
    with connect(server.address) as client:
        two = client.get("s3", namespace=namespace, layers=[1]), client.get("s3", namespace=namespace, layers=[2])
    with pytest.raises(ValueError, match="one kind"):
        SampleDataset.collate(two)
