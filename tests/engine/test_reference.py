"""What a layer id means, against transformers; and that text is the same with and without the connector."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import tiny_qwen3
from support.reference import OTHER_LAYER_ERROR_MIN, RELATIVE_ERROR_MAX, residual_streams
from support.stack import stack
from support.threads import same_threads
from support.workload import MODEL_NAME, Answer, Ask, send, text_tokens

from slotstream.client import Sample, connect
from slotstream.demo.processes import SMALL_ENGINE, free_port, start_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RESIDUAL_IDS = [0, 1, 3, tiny_qwen3.LAYERS]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3.make(tmp_path_factory.mktemp("random") / "qwen3")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(21)
    return [text_tokens(rng, n) for n in (1, 5, 64, 65, 200, 411)]


@pytest.fixture(scope="module", params=["direct", "extraction"])
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


@pytest.fixture(scope="module")
def plain(model_path: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """The texts of an engine without a connector."""
    port, log = free_port(), tmp_path_factory.mktemp("plain") / "vllm.log"
    with start_vllm(model_path, log, port, *SMALL_ENGINE, f"--served-model-name={MODEL_NAME}", env=same_threads()):
        # One by one: where a processor multiplies matrices in tiles, what else is in a batch can turn a near-tie.
        return send(port, [Ask(p, max_tokens=40) for p in prompts], at_once=1)


def test_text_is_the_same_without_capture_and_connector(
    captured: tuple[list[Answer], list[Sample]], plain: list[Answer]
) -> None:
    assert [a.tokens for a in plain] == [a.tokens for a in captured[0]]
