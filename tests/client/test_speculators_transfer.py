"""Rows as speculators takes them, read out of a real server through its own interface."""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hs_connectors import HiddenStatesBackend
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.client import BadLayers, Client, SampleFailed, SampleNotFound, StillArriving, connect
from slotstream.client.exports.run import Options, export
from slotstream.client.members import Filters
from slotstream.connector.options import ConnectorOptions
from slotstream.integrations.speculators.__main__ import launch_command, main
from slotstream.integrations.speculators.backend import NAME, SlotStreamBackend
from slotstream.wire.errors import BadParams, ConfigError

LAST = 8


def sample(name: str, namespace: str, layer_ids: tuple[int, ...] = (2, 4, 5, LAST, LAST + 1), **more: Any) -> SyntheticSample:
    metadata = {"num_hidden_layers": str(LAST), "prompt_tokens": "5"}
    if layer_ids[-1] > LAST:
        metadata["layer_names"] = json.dumps([*map(str, layer_ids[:-1]), "final"])
    return SyntheticSample(name, namespace=namespace, layer_ids=layer_ids, metadata=metadata, num_tokens=12, **more)


def rows(one: SyntheticSample, *layers: int) -> torch.Tensor:
    values = [[[one.value(r, i, k) for k in range(one.hidden_size)] for i in layers] for r in range(one.num_tokens)]
    return torch.tensor(values, dtype=torch.bfloat16)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with connect(server.address) as connected:
        yield connected


def transfer(server: ServerProcess, data_path: Path, namespace: str, *more: str) -> Any:
    """As speculators makes it, of its own arguments; and pickled, as its loader does."""
    parser = argparse.ArgumentParser()
    backend = HiddenStatesBackend.registry[NAME]
    backend.add_train_args(parser)
    words = ["--slotstream-server", server.address, "--slotstream-namespace", namespace, "--slotstream-wait-s", "5", *more]
    made = backend.from_train_args(parser.parse_args(words), str(data_path))
    made.setup()
    return pickle.loads(pickle.dumps(made))


def same(held: dict[str, torch.Tensor] | None, one: SyntheticSample, *layers: int) -> bool:
    assert held is not None
    return held["token_ids"].tolist() == one.token_ids and torch.equal(held["hidden_states"], rows(one, *layers))


def test_the_ith_sample_is_the_ith_of_the_manifest(
    client: Client, ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    made = [sample(f"z{9 - i}", namespace, seed=i) for i in range(3)]
    ingest.store(*made)
    export(client, tmp_path, Options("speculators", (5, 2), Filters(namespace), loss_mask="all", index_only=True))
    reads = transfer(server, tmp_path, namespace)
    assert all(same(reads.get_cached(i), one, 5, 2, LAST) for i, one in enumerate(made))
    with pytest.raises(BadParams, match="has 3 samples, and none of index 3"):
        reads.get_cached(3)
    client.delete("z8", namespace=namespace)
    client.delete("z7", namespace=namespace)
    ingest.store(sample("z7", namespace, seed=40))  # Another sample of that name.
    assert (reads.get_cached(1), reads.get_cached(2)) == (None, None)


def test_without_a_manifest_samples_are_named_by_their_index(
    ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    made = [sample(f"hs_{i}", namespace, seed=i) for i in range(2)]
    ingest.store(*made)
    ingest.fail(sample("hs_2", namespace))
    reads = transfer(server, tmp_path, namespace)
    assert all(same(reads.get_cached(i), one, 2, 4, 5, LAST) for i, one in enumerate(made))
    assert reads.get_cached(2) is None
    assert reads.get_cached(3) is None
    chosen = transfer(server, tmp_path, namespace, "--slotstream-layers", "5,4")
    assert same(chosen.get_cached(0), made[0], 5, 4, LAST)
    ingest.store(sample("hs_4", namespace, (2, 4, 5, LAST + 1)))
    with pytest.raises(BadLayers, match=r"no layer 8 \(the row before the last norm\), which speculators takes"):
        reads.get_cached(4)


def test_what_an_answer_names_is_waited_for_and_deleted_once_it_was_asked_for(
    client: Client, ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    one, other = sample("cmpl-1", namespace), sample("other", namespace)
    ingest.store(one, other)
    reads = transfer(server, tmp_path, namespace)
    said = {"handle": f"{namespace}/cmpl-1", "slotstream": {}}
    assert same(reads.get_generated(said), one, 2, 4, 5, LAST)
    reads.delete(said["handle"])
    reads.delete(said["handle"])  # Gone already: that is what was wanted.
    assert [info.sample_id for info in client.list(namespace=namespace)] == ["other"]
    with pytest.raises(SampleNotFound):
        client.stat("cmpl-1", namespace=namespace)
    ingest.fail(sample("bad", namespace))
    with pytest.raises(SampleFailed):
        reads.get_generated({"handle": f"{namespace}/bad"})
    reads.delete(f"{namespace}/bad")
    for handle in (None, "nothing"):
        with pytest.raises(BadParams, match="response_handle"):
            reads.get_generated({"handle": handle})


def test_a_sample_that_is_still_arriving_is_deleted_once_it_is_there(
    client: Client, ingest: IngestClient, server: ServerProcess, namespace: str, tmp_path: Path
) -> None:
    one = sample("slow", namespace)
    number = ingest.open(one)
    ingest.send_rows(number, one, 0, 4)
    reads = transfer(server, tmp_path, namespace, "--slotstream-wait-s", "0.2")
    with pytest.raises(StillArriving):
        reads.delete(f"{namespace}/slow")
    ingest.send_rows(number, one, 4)
    ingest.commit(number, one)
    reads.delete(f"{namespace}/slow")
    assert list(client.list(namespace=namespace)) == []


def test_the_engine_is_started_with_what_training_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLOTSTREAM_SERVER", raising=False)
    command = launch_command(["org/model", "--slotstream-layers", "2,4,8", "--slotstream-namespace", "n", "--", "--port", "9"])
    assert command[command.index("--model") + 1] == command[command.index("--served-model-name") + 1] == "org/model"
    assert command[-2:] == ["--port", "9"]
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    options = ConnectorOptions.from_extra(config["kv_connector_extra_config"])
    assert (options.layers, options.namespace, options.response_handle) == ((2, 4, 8), "n", True)
    assert options.server == "127.0.0.1:50151"
    monkeypatch.setenv("SLOTSTREAM_SERVER", "store:1")
    config = json.loads(launch_command(["m"])[-1])
    assert config["kv_connector_extra_config"]["layers"] == "eagle3"
    assert config["kv_connector_extra_config"]["server"] == "store:1"
    with pytest.raises(ConfigError, match="are not like 2,18,33"):
        launch_command(["m", "--slotstream-layers", "2,last"])


def test_help_says_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(["--help"]), main([])) == (0, 2)
    for add in (SlotStreamBackend.add_train_args, SlotStreamBackend.add_launch_args):
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
        add(parser)
        for action in parser._actions[1:]:
            assert "%(" not in str(action.help)  # speculators takes the defaults out of the parser.
            assert "default: " in str(action.help)
    assert "train" in capsys.readouterr().out
