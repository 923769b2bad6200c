"""A SampleDataset over samples that nobody can use: it ends there, or goes on behind them, and says so."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.client import ConfigError, connect
from slotstream.client.bad_samples import BadSamples
from slotstream.client.dataset import SampleDataset
from slotstream.wire import errors

KINDS: list[dict[str, Any]] = [{}, {"shuffle": True}]


def _store(ingest: IngestClient, namespace: str, *ids: str, layer_ids: tuple[int, ...] = (1, 2, 4)) -> None:
    ingest.store(*(SyntheticSample(i, namespace=namespace, num_tokens=3, layer_ids=layer_ids) for i in ids))


def _damage(server: ServerProcess, namespace: str, sample_id: str) -> None:
    """Another bit in the rows."""
    (path,) = Path(server.data_dir / namespace).glob(f"*/{sample_id}.safetensors")
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)


@pytest.fixture
def mixed(server: ServerProcess, ingest: IngestClient, namespace: str) -> list[str]:
    """Good ones, with a damaged one and one of other layers among them; the ids of the good ones."""
    _store(ingest, namespace, "a", "b", "rotten", "c")
    _store(ingest, namespace, "other", layer_ids=(1, 3))
    _store(ingest, namespace, "d", "e")
    _damage(server, namespace, "rotten")
    return ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bad_ones_are_left_out_counted_and_named_once(
    server: ServerProcess, namespace: str, mixed: list[str], kind: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = SampleDataset(server.address, namespace=namespace, layers=[2, 4], on_bad="skip", **kind)
    for _ in range(2):
        assert sorted(sample.sample_id for sample in dataset) == mixed
        # Once its damage was met the damaged one is taken out of service: it is in no listing of a later pass.
        assert dataset.state_dict()["skipped"] in (1, 2)
        assert dataset.state_dict()["received"] == 5
        assert dataset.skipped_samples == dataset.state_dict()["skipped"]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(line.split(" is left out: ")[0] for line in said) == [
        f"slotstream: sample {namespace}/other",
        f"slotstream: sample {namespace}/rotten",
    ]
    assert any("DAMAGED" in line for line in said)
    assert any("BAD_LAYERS" in line for line in said)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_by_default_the_first_bad_one_ends_the_pass(
    server: ServerProcess, namespace: str, mixed: list[str], kind: dict[str, Any]
) -> None:
    with pytest.raises((errors.BadLayers, errors.Damaged)):
        list(SampleDataset(server.address, namespace=namespace, layers=[2, 4], **kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_pass_goes_on_behind_what_it_left_out(
    server: ServerProcess, ingest: IngestClient, namespace: str, kind: dict[str, Any]
) -> None:
    _store(ingest, namespace, *(f"s{number:02}" for number in range(6)))
    _store(ingest, namespace, *(f"t{number:02}" for number in range(6)), layer_ids=(1, 3))
    _store(ingest, namespace, *(f"u{number:02}" for number in range(6)))
    options: dict[str, Any] = {"namespace": namespace, "layers": [2], "on_bad": "skip", **kind}
    with connect(server.address) as client:
        if kind:
            options["as_of"] = client.moment()
        for taken in range(12):
            dataset = SampleDataset(client, **options)
            received = iter(dataset)
            first = [next(received).sample_id for _ in range(taken)]
            state = json.loads(json.dumps(dataset.state_dict()))
            rest = SampleDataset(client, **options)
            rest.load_state_dict(state)
            again = [sample.sample_id for sample in rest]
            assert sorted(first + again) == [f"{kind}{n:02}" for kind in "su" for n in range(6)]
            assert rest.state_dict()["skipped"] == 6
            assert rest.state_dict()["received"] == 12


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_too_many_in_a_row_are_an_error(
    server: ServerProcess, ingest: IngestClient, namespace: str, kind: dict[str, Any]
) -> None:
    _store(ingest, namespace, "first")
    _store(ingest, namespace, *(f"bad{number}" for number in range(5)), layer_ids=(1, 3))
    if kind:
        kind = {"as_of": connect(server.address).moment()}  # In the order in which they came.
    options: dict[str, Any] = {"namespace": namespace, "layers": [2], "on_bad": "skip", **kind}
    assert [sample.sample_id for sample in SampleDataset(server.address, bad_max=6, **options)] == ["first"]
    with pytest.raises(
        errors.BadLayers, match=f"5 bad samples in a row, as many as bad_max allows: the last is {namespace}/bad0"
    ):
        list(SampleDataset(server.address, bad_max=5, **options))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_pass_of_bad_ones_only_is_an_error(
    server: ServerProcess, ingest: IngestClient, namespace: str, kind: dict[str, Any]
) -> None:
    _store(ingest, namespace, "a", "b", layer_ids=(1, 3))
    with pytest.raises(errors.BadLayers, match="every sample of this pass is bad"):
        list(SampleDataset(server.address, namespace=namespace, layers=[2], on_bad="skip", **kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_of_another_size_are_a_choice_of_samples_and_not_bad(
    server: ServerProcess, ingest: IngestClient, namespace: str, kind: dict[str, Any]
) -> None:
    _store(ingest, namespace, "a")
    ingest.store(SyntheticSample("b", namespace=namespace, num_tokens=3, hidden_size=8))
    dataset = SampleDataset(server.address, namespace=namespace, layers=[2], on_bad="skip") if not kind else None
    if dataset is not None:
        assert len(list(dataset)) == 2
        return
    with pytest.raises(errors.BadLayers, match="choose the samples of one model"):
        SampleDataset(server.address, namespace=namespace, layers=[2], on_bad="skip", **kind)


SKIPPED = (errors.Damaged("x"), errors.UnsupportedFormat("x"), errors.BadLayers("x"), errors.SampleFailed("x", "DAMAGED"))


def test_only_what_will_never_be_read_is_skipped() -> None:
    """Every other code of all that there are ends the pass."""
    kinds = [getattr(errors, name) for name in errors.__all__]
    others = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, errors.SlotStreamError)]
    for kind in others:
        bad = BadSamples("skip", 100)
        bad.begin()
        assert bad.skip("s", kind("x")) == (kind.code in {"DAMAGED", "UNSUPPORTED_FORMAT", "BAD_LAYERS"}), kind
    for error in SKIPPED:
        bad = BadSamples("skip", 2)
        bad.begin()
        assert bad.skip("s", error)
        bad.good()
        assert bad.skip("t", error)
        with pytest.raises(errors.SlotStreamError, match="2 bad samples in a row") as caught:
            bad.skip("u", error)
        assert caught.value.code == ("DAMAGED" if error.code == "SAMPLE_FAILED" else error.code)
        assert not BadSamples("raise", 2).skip("s", error)
    assert isinstance(pickle.loads(pickle.dumps(BadSamples("skip", 3))), BadSamples)


@pytest.mark.parametrize("options", [{"on_bad": "ignore"}, {"bad_max": 0}, {"bad_max": True}, {"bad_max": 1.5}], ids=str)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SampleDataset("127.0.0.1:1", **options)
