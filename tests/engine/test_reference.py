"""What a layer id means, against transformers; and that text is the same with and without the connector."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import tiny_qwen3
from support.reference import OTHER_LAYER_ERROR_MIN, RELATIVE_ERROR_MAX, residual_streams
from support.stack import stack, support_importable
from support.threads import same_threads, threads
from support.workload import MODEL_NAME, Answer, Ask, send, text_tokens

from slotstream.client import Sample, connect
from slotstream.demo.processes import SMALL_ENGINE, connector_options, extraction_options, free_port, start_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RESIDUAL_IDS = [0, 1, 3, tiny_qwen3.LAYERS]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3.make(tmp_path_factory.mktemp("random") / "qwen3")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(21)
    return [text_tokens(rng, n) for n in (1, 5, 64, 65, 200, 411)]


@pytest.fixture(scope="module", params=["direct", pytest.param("extraction", marks=pytest.mark.extended)])
def captured(
    request: pytest.FixtureRequest, model_path: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[Answer], list[Sample]]]:
    extract = request.param == "extraction"
    layers: list[int | str] = [*RESIDUAL_IDS] if extract else [*RESIDUAL_IDS, "final"]
    work = tmp_path_factory.mktemp("reference")
    with stack(work, model_path, layers, extract=extract, env=same_threads()) as running:
        answers = send(running.vllm_port, [Ask(p, max_tokens=40) for p in prompts], at_once=1)  # As `plain` does.
        send(running.vllm_port, [Ask(p, {"sample_id": f"p{i}"}, max_tokens=40) for i, p in enumerate(prompts)])
        with connect(running.address) as client:
            yield answers, [client.get(f"p{i}") for i in range(len(prompts))]


def test_rows_are_the_residual_streams_of_transformers(
    captured: tuple[list[Answer], list[Sample]], prompts: list[list[int]], model_path: Path
) -> None:
    for prompt, sample in zip(prompts, captured[1], strict=True):
        ids = list(sample.layer_ids)
        assert ids[: len(RESIDUAL_IDS)] == RESIDUAL_IDS
        truth = residual_streams(model_path, prompt, ids)
        rows = sample.hidden_states.float()
        assert rows.shape == truth.shape
        # error[token, i, j]: how far the row captured as layer i is from transformers' row after layer j.
        error = (rows[:, :, None] - truth[:, None]).norm(dim=-1) / truth[:, None].norm(dim=-1)
        same = torch.eye(len(ids), dtype=torch.bool)
        assert float(error[:, same].max()) < RELATIVE_ERROR_MAX
        assert float(error[:, ~same].min()) > OTHER_LAYER_ERROR_MIN


def _texts(work: Path, model_path: Path, prompts: list[list[int]], *options: str) -> list[Answer]:
    port = free_port()
    chosen = (*SMALL_ENGINE, f"--served-model-name={MODEL_NAME}", *options)
    with start_vllm(model_path, work / "vllm.log", port, *chosen, env=same_threads() | support_importable()):
        # One by one: where a processor multiplies matrices in tiles, what else is in a batch can turn a near-tie.
        return send(port, [Ask(p, max_tokens=40) for p in prompts], at_once=1)


@pytest.fixture(scope="module")
def plain(model_path: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """The texts of an engine without a connector."""
    return _texts(tmp_path_factory.mktemp("plain"), model_path, prompts)


@pytest.fixture(scope="module")
def theirs(model_path: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """The texts of an engine that extracts the same layers for vLLM's own example connector."""
    work = tmp_path_factory.mktemp("theirs")
    stored = {"shared_storage_path": str(work / "stored")}
    connector = connector_options("HiddenStatesOnCpu", "support.siblings", **stored)
    return _texts(work, model_path, prompts, *extraction_options(RESIDUAL_IDS), *connector)


def test_text_is_the_same_without_capture_and_connector(
    captured: tuple[list[Answer], list[Sample]], request: pytest.FixtureRequest
) -> None:
    # Extraction computes two positions a decode step. Where threads share a sum, vLLM then splits it otherwise than for one.
    extracts = request.node.callspec.params["captured"] == "extraction"
    other = request.getfixturevalue("theirs" if extracts and threads() > 1 else "plain")
    assert [a.tokens for a in other] == [a.tokens for a in captured[0]]
