"""Random-weight checkpoints of the other kinds of attention: multi-head latent attention, and gated delta nets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LAYERS = 4
HIDDEN = 256


def make(path: Path, kind: str) -> Path:
    """Write a checkpoint of `kind` ("mla" or "gdn") and a byte-level tokenizer to `path`; returns it. Needs transformers."""
    import torch

    from slotstream.truth.model import write_tokenizer

    torch.manual_seed(0)
    config, model_class = _mla() if kind == "mla" else _gdn()
    model = model_class(config).to(torch.bfloat16)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "eos_token_id": 0,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "dtype": "bfloat16",
}


def _mla() -> tuple[Any, Any]:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **_COMMON,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=LAYERS,  # No mixture of experts: a close choice between two would differ by a rounding.
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
        topk_method="greedy",
    )
    return config, DeepseekV2ForCausalLM


def _gdn() -> tuple[Any, Any]:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_COMMON,
        num_key_value_heads=2,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=4,  # All of them: see above.
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=list(range(LAYERS - 1)),  # vLLM wants at least one mixture-of-experts layer.
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    )
    return config, Qwen3NextForCausalLM
