"""A random-weight Qwen3, its logits far enough apart for greedy text to be well defined."""

from __future__ import annotations

from pathlib import Path

LAYERS = 4
HIDDEN = 256


def make(path: Path, *, repeats: bool = False) -> Path:
    """Write the checkpoint and a byte-level tokenizer to `path`; returns it. Needs transformers.

    `repeats`: its text says the last token again half of the time, so that a drafter can guess right.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from slotstream.truth.model import write_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=80,  # At multiples of 32, attention of vLLM 0.32 dies of an illegal instruction on some CPUs with AMX.
        max_position_embeddings=4096,
        eos_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.1,
        dtype="bfloat16",
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    if repeats:
        with torch.no_grad():
            embedding = model.get_input_embeddings().weight
            model.lm_head.weight.copy_(embedding)
            embedding.mul_(8)  # Tried: with 16 it says nothing else.
    model.save_pretrained(path)
    write_tokenizer(path)
    return path
