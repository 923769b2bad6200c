"""Every export is loaded by its tool's own loader, has the rows that vLLM computed, and gives transformers' logits."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import load_exports, tiny_qwen3
from support.stack import stack
from support.workload import Ask, send, text_tokens

from slotstream.client import Sample, connect
from slotstream.client.exports.run import Options, export
from slotstream.client.members import Filters

pytestmark = [pytest.mark.vllm, pytest.mark.extended, pytest.mark.timeout(900)]

OTHERS, LAST = (1, 2, 3), tiny_qwen3.LAYERS
LOGITS_OFF_MAX = 0.1
TOOLS = Path(sys.prefix) / "trainers"  # `make extended` puts them there.


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_qwen3.make(tmp_path_factory.mktemp("random") / "qwen3")
    weights = load_file(path / "model.safetensors")
    # Its weights are ones: then a row that is normed twice is the same as one that is normed once.
    norm = weights["model.norm.weight"]
    norm.copy_(torch.rand(norm.shape, generator=torch.Generator().manual_seed(7)) * 2 + 0.1)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def stored(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sample], Path]:
    """Samples of prompts and their output, the output masked, and the folder of their exports."""
    folder, rng = tmp_path_factory.mktemp("exports"), random.Random(5)
    params = {"include_output_tokens": True, "loss_mask": "output"}
    asks = [Ask(text_tokens(rng, n), {**params, "sample_id": f"p{i}"}, max_tokens=30) for i, n in enumerate((1, 40, 200))]
    with stack(tmp_path_factory.mktemp("loaders"), model_path, [*OTHERS, LAST, "final"]) as running:
        send(running.vllm_port, asks, at_once=1)
        with connect(running.address) as client:
            samples = [client.get(f"p{i}") for i in range(len(asks))]
            for kind in ("speculators", "specforge", "modelopt"):
                export(client, folder / kind, Options(kind, None, Filters()))
    return samples, folder


@pytest.fixture(scope="module")
def loaded(stored: tuple[list[Sample], Path]) -> Mapping[str, list[dict[str, Any]]]:
    """What came out of the tools' loaders, in a process of its own."""
    script, out = Path(load_exports.__file__), stored[1] / "loaded.pt"
    environment = {**os.environ, "PYTHONPATH": str(TOOLS)}
    subprocess.run([sys.executable, script, stored[1], out], check=True, env=environment, timeout=600)
    found: Mapping[str, list[dict[str, Any]]] = torch.load(out)
    return found


def plane(sample: Sample, *names: str) -> torch.Tensor:
    """[rows, layers * hidden], by the layers' names."""
    return torch.cat([sample.hidden_states[:, sample.layer_names.index(name)] for name in names], dim=1)


@pytest.mark.parametrize("tool", ["speculators", "specforge", "modelopt"])
def test_its_loader_gives_the_rows_that_were_stored(
    stored: tuple[list[Sample], Path], loaded: Mapping[str, list[dict[str, Any]]], tool: str
) -> None:
    assert len(loaded[tool]) == len(stored[0])
    for sample, held in zip(stored[0], loaded[tool], strict=True):
        assert sample.loss_mask is not None
        mask = sample.loss_mask.clone()
        if tool == "specforge":
            mask[-1] = False  # It takes the last token out itself.
        assert torch.equal(held["ids"], sample.token_ids)
        assert torch.equal(held["mask"].bool(), mask)
        assert torch.equal(held["others"], plane(sample, *map(str, OTHERS)))
        assert torch.equal(held["base"], plane(sample, str(LAST) if tool == "speculators" else "final"))


def logits_of(base: torch.Tensor, before_norm: bool, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """As a trainer makes them of the row that stands for the last one."""
    rows = base.float()
    if before_norm:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * weights["model.norm.weight"].float()
    return rows @ weights["lm_head.weight"].float().T


@pytest.mark.parametrize("tool", ["speculators", "specforge", "modelopt"])
def test_its_rows_give_transformers_logits_and_the_other_rows_do_not(
    stored: tuple[list[Sample], Path], loaded: Mapping[str, list[dict[str, Any]]], model_path: Path, tool: str
) -> None:
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(model_path, dtype=torch.float32).eval()
    weights = load_file(model_path / "model.safetensors")
    for sample, held in zip(stored[0], loaded[tool], strict=True):
        with torch.no_grad():
            truth = model(sample.token_ids[None]).logits[0]

        def off(base: torch.Tensor, held: Any = held, truth: torch.Tensor = truth) -> float:
            logits = logits_of(base, held["before_norm"], weights)
            return float((logits - truth).abs().mean())

        assert off(held["base"]) < LOGITS_OFF_MAX
        assert off(plane(sample, "final" if tool == "speculators" else str(LAST))) > 3 * LOGITS_OFF_MAX
