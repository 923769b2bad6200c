"""What the rows of a random-weight checkpoint should be: transformers' own residual streams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slotstream.client import Sample

# bf16 keeps 8 bits of mantissa: four layers in another order of operations stay below this; another layer's rows do not.
RELATIVE_ERROR_MAX = 0.06
OTHER_LAYER_ERROR_MIN = 0.3


def residual_streams(model_path: Path, tokens: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
    """transformers' residual stream after each of `layer_ids` layers, float32 [tokens, layers, hidden].

    The id behind the last layer's is the last norm's output.
    """
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(model_path, dtype=torch.bfloat16).eval()
    streams: dict[int, torch.Tensor] = {}

    def keep(layer_id: int, output: object) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        assert isinstance(tensor, torch.Tensor)
        streams[layer_id] = tensor.reshape(-1, tensor.shape[-1]).float()

    model.model.embed_tokens.register_forward_hook(lambda module, args, output: keep(0, output))
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda module, args, output, i=i: keep(i + 1, output))
    last = len(model.model.layers) + 1
    model.model.norm.register_forward_hook(lambda module, args, output: keep(last, output))
    with torch.no_grad():
        model(torch.tensor([list(tokens)]))
    return torch.stack([streams[i] for i in layer_ids], dim=1)


def assert_final_says_the_text(sample: Sample, model_path: Path, prompt_tokens: int) -> None:
    """`final`, the last layer of a sample with output rows, is the norm of the one before it, and gives the text."""
    from safetensors.torch import load_file

    weights = load_file(model_path / "model.safetensors")
    last, final = sample.hidden_states[:, -2].float(), sample.hidden_states[:, -1].float()
    normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-6) * weights["model.norm.weight"].float()
    assert float(((final - normed).norm(dim=-1) / normed.norm(dim=-1)).max()) < 0.01
    logits = final @ weights["lm_head.weight"].float().T
    written = sample.token_ids[prompt_tokens:]
    of_text = logits[prompt_tokens - 1 : -1]
    # A sum in another order may turn two that are next to each other around, and no more.
    assert float((of_text.amax(-1) - of_text.gather(-1, written[:, None])[:, 0]).max()) < 0.05 * float(of_text.std())


def row_errors(sample: Sample, model_path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """How far each row is from transformers', relative: from its own layer's, and from each other's, both [tokens, ...]."""
    ids = list(sample.layer_ids)
    truth = residual_streams(model_path, sample.token_ids.tolist(), ids)
    rows = sample.hidden_states.float()
    assert rows.shape == truth.shape
    # error[token, i, j]: how far the row captured as layer i is from transformers' row after layer j.
    error = (rows[:, :, None] - truth[:, None]).norm(dim=-1) / truth[:, None].norm(dim=-1)
    same = torch.eye(len(ids), dtype=torch.bool)
    return error[:, same], error[:, ~same]


def assert_rows_are_those_of_transformers(
    sample: Sample, model_path: Path, error_max: float = RELATIVE_ERROR_MAX, other_error_min: float = OTHER_LAYER_ERROR_MIN
) -> None:
    """Each row is transformers' of its own layer, but for a relative error, and half of the rows are far from any other's."""
    own, other = row_errors(sample, model_path)
    assert float(own.max()) < error_max
    assert len(sample.layer_ids) == 1 or float(other.median(0).values.min()) > other_error_min
