"""An EAGLE-3 drafter for `tiny_qwen3` with random weights, which asks the target for layers that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from support import tiny_qwen3

VOCAB = 512


def make(path: Path, target: Path, layer_ids: Sequence[int]) -> Path:
    """Write the checkpoint of a drafter that asks for `layer_ids` of the target, in this order, to `path`; returns it.

    It mostly drafts what the target said last, by the highest of the layers: right where the target `repeats`.
    """
    import torch
    from safetensors.torch import load_file, save_file

    hidden, heads, kv_heads, head_dim, inner = tiny_qwen3.HIDDEN, 4, 2, 64, 512
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    shapes = {
        "midlayer.self_attn.q_proj": (heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "fc": (hidden, len(layer_ids) * hidden),
    }
    weights = {f"{name}.weight": random(*shape) for name, shape in shapes.items()}
    weights["fc.weight"][:, -hidden:] += torch.eye(hidden, dtype=torch.bfloat16)  # vLLM gives the layers ascending.
    weights["lm_head.weight"] = load_file(target / "model.safetensors")["lm_head.weight"].clone()
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "num_aux_hidden_states": len(layer_ids),
        "eagle_aux_hidden_state_layer_ids": list(layer_ids),
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
