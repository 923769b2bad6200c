"""Which truth model stands for a model: told by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slotstream.truth.model import LAYERS_MAX, Kind
from slotstream.wire.errors import ConfigError

_LINEAR = ("linear_attention", "mamba", "recurrent", "gated_delta", "conv", "kda")
_LOCAL = ("sliding_attention", "chunked_attention", "local_attention")
# Models whose linear or state-space layers are told by a key of their own, and not by `layer_types`.
_LINEAR_KEYS = (
    "linear_num_key_heads",
    "linear_attn_config",
    "mamba_d_state",
    "mamba_state_dim",
    "ssm_state_size",
    "ssm_cfg",
    "attn_layer_period",
    "hybrid_override_pattern",
)


@dataclass(frozen=True, slots=True)
class Stood:
    """The model that is stood for. `close`: what of it the truth model lacks, in words; "" where it is of the same kind."""

    kind: Kind
    layers: int
    close: str = ""


def kind_of(config: Mapping[str, Any]) -> Stood:
    """Raises ConfigError for a config that says no number of layers, or more than the truth model can count."""
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    layers = text.get("num_hidden_layers")
    if type(layers) is not int or layers < 1:
        raise ConfigError("the model's config.json does not say num_hidden_layers")
    if layers > LAYERS_MAX:
        raise ConfigError(f"the model has {layers} layers, and the truth model counts up to {LAYERS_MAX}")
    kinds = _layer_kinds(text)
    latent = bool(text.get("kv_lora_rank"))
    if any(text.get(key) for key in _LINEAR_KEYS) or any(name in kind for kind in kinds for name in _LINEAR):
        same = bool(text.get("linear_num_key_heads")) and not latent
        return Stood("gdn", layers, "" if same else "its own linear attention or state: gated delta nets stand for it")
    if latent:
        return Stood("mla", layers)
    if _is_local(text, kinds):
        chunked = any("chunked" in kind for kind in kinds)
        return Stood("swa", layers, "chunked attention: sliding windows stand for it" if chunked else "")
    return Stood("dense", layers)


def _layer_kinds(text: Mapping[str, Any]) -> set[str]:
    """What the config calls its layers, where it names them one by one."""
    found: set[str] = set()
    for key in ("layer_types", "layers_block_type", "block_types"):
        named = text.get(key)
        if isinstance(named, list):
            found |= {kind for kind in named if isinstance(kind, str)}
    return found


def _is_local(text: Mapping[str, Any], kinds: set[str]) -> bool:
    """Whether some layer attends to a window alone."""
    if kinds:
        return bool(kinds & set(_LOCAL))
    if text.get("attention_chunk_size"):
        return True
    window = text.get("sliding_window")
    return type(window) is int and window > 0 and text.get("use_sliding_window", True) is not False
