"""LoRA adapters of the truth model whose effect its rows show: each changes one column of its own, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from slotstream.client import Sample
from slotstream.truth.model import HIDDEN, LAYER_COLUMN, LAYERS, expected

INTERMEDIATE = 64  # Of the truth model's MLP.
TUNED, OTHER = LAYER_COLUMN + 1, LAYER_COLUMN + 2


def adapter(path: Path, column: int) -> Path:
    """An adapter of the MLP's output projection, which is what the rows of a truth model are made of."""
    path.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["down_proj"], "base_model_name_or_path": "truth"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(column)
    weights = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, INTERMEDIATE, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.zeros(HIDDEN, 8)
        weights[f"{name}.lora_B.weight"][column] = 4.0
    save_file(weights, path / "adapter_model.safetensors")
    return path


def assert_rows_are_adapted(sample: Sample, column: int, layer_ids: list[int]) -> None:
    """Every row is that of its token, but for one column, which nearly every row has otherwise than the base model."""
    wrong = sample.hidden_states != expected(sample.token_ids, layer_ids)
    changed = wrong[:, :, column].clone()
    wrong[:, :, column] = False
    assert not bool(wrong.any()), f"columns {wrong.flatten(0, 1).any(0).nonzero().flatten().tolist()} are not the model's"
    assert float(changed.float().mean()) > 0.9, "the rows are the base model's"
