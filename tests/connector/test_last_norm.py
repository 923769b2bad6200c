"""Which norm of a model is the last: what samples say of it is true, or nothing is said."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from slotstream.connector.reading.last_norm import describe_last_norm

LAYERS = 3


class RMSNorm(nn.Module):
    """As vLLM's: it has another name for its epsilon than torch's."""

    def __init__(self, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.variance_epsilon = epsilon


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.mlp = RMSNorm(0.25), nn.Linear(4, 4)


def layers(count: int = LAYERS) -> nn.ModuleList:
    return nn.ModuleList(Layer() for _ in range(count))


def module(**parts: Any) -> nn.Module:
    made = nn.Module()
    for name, part in parts.items():
        made.add_module(name, part)
    return made


def said(model: nn.Module) -> Any:
    text = describe_last_norm(model, LAYERS)
    return None if text is None else json.loads(text)


def test_it_is_the_norm_behind_the_list_of_layers() -> None:
    inner = module(embed=nn.Embedding(2, 4), embed_norm=nn.LayerNorm(4, eps=0.5), layers=layers(), norm=RMSNorm(1e-5))
    assert said(module(model=inner, lm_head=nn.Linear(4, 2))) == {"class": "RMSNorm", "epsilon": 1e-5}
    ln_f = module(transformer=module(h=layers(), ln_f=nn.LayerNorm(4, eps=1e-3)))
    assert said(ln_f) == {"class": "LayerNorm", "epsilon": 1e-3}


def test_that_of_a_tower_beside_the_text_is_not_meant() -> None:
    tower = module(layers=layers(), post_layernorm=nn.LayerNorm(4, eps=0.125))
    text = module(model=module(layers=layers(), norm=RMSNorm()))
    both = module(vision_tower=tower, language_model=text)
    assert said(both) is None  # Two, and nothing says which.
    both.get_language_model = lambda: text  # type: ignore[assignment]
    assert said(both) == {"class": "RMSNorm", "epsilon": 1e-6}

    def unknown() -> nn.Module:
        raise NotImplementedError

    both.get_language_model = unknown  # type: ignore[assignment]
    assert said(both) is None


def test_a_model_that_does_not_show_it_is_not_guessed_at() -> None:
    assert said(module(layers=layers(2), norm=RMSNorm())) is None  # Of another part, with other layers.
    assert said(module(layers=layers(), head=nn.Linear(4, 4))) is None
    assert said(module(norm=RMSNorm(), layers=layers())) is None
    assert said(module(layers=layers(), norm=RMSNorm(), head_norm=RMSNorm(0.5))) is None
