"""A small checkpoint whose hidden states state their own truth, so that every row can be checked for equality.

Every attention and MLP output projection is zero, so the residual stream stays equal to the token embedding. The
embedding spells the token id in +1/-1 bits, and an MLP bias adds 1 to one column per layer passed. So each row says which
token and which layer it came from, exactly in bf16, on any device, under any batching, chunking, prefix hit or preemption:

    row[token t, layer k]  =  bits(t) in columns 0..15,  k in column 16,  a fixed +-1 code elsewhere

Kinds: "dense", a Llama with one KV-cache group; "swa", a Llama with alternating sliding-window and full attention, a
hybrid with several KV-cache groups; "mla", a DeepSeek-V2 shape with multi-head latent attention; "gdn", a Qwen3-Next with
gated delta nets (prefix caching in "align" mode needs a GPU). The last two have no bias: column 16 stays 0.

What the last norm gives ("final") is the row over its root mean square: exact but for the last digit of the root.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["dense", "swa", "mla", "gdn"]

ID_BITS = 16
LAYER_COLUMN = 16
VOCAB = 4096
HIDDEN = 256
LAYERS = 6
FIRST_TEXT_TOKEN = 2  # 0 ends the text and 1 begins it; the 256 byte tokens follow.
TEXT_TOKENS = 256
NORM_EPSILON = 1e-6  # Of every kind's last norm; see _config.
LAYERS_MAX = 256  # From here on bf16 does not hold every whole number.
_ROOT_TOLERANCE = 2**-14  # Kernels take the root of the last norm in float32, in their own ways, and round once.


@functools.cache
def embedding(vocab: int = VOCAB, hidden: int = HIDDEN) -> torch.Tensor:
    """Token codes, float32 [vocab, hidden], every entry -1, 0 or +1 (exact in bf16). Made once: do not write to it."""
    generator = torch.Generator().manual_seed(0)
    code = torch.where(torch.rand(vocab, hidden, generator=generator) < 0.5, -1.0, 1.0)
    ids = torch.arange(vocab)
    for bit in range(ID_BITS):
        code[:, bit] = ((ids >> bit) & 1).float() * 2 - 1
    code[:, LAYER_COLUMN] = 0
    return code


def decode(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read rows [..., hidden] back as (token ids [...], layer numbers [...]); for saying what a wrong row is."""
    weights = 2 ** torch.arange(ID_BITS)
    token_ids = ((rows[..., :ID_BITS].float() > 0).long() * weights).sum(-1)
    return token_ids, rows[..., LAYER_COLUMN].float().round().long()


def expected(
    token_ids: torch.Tensor,
    layer_ids: Sequence[int],
    vocab: int = VOCAB,
    hidden: int = HIDDEN,
    *,
    kind: Kind = "dense",
    layers: int = LAYERS,
) -> torch.Tensor:
    """The rows that must be captured for `token_ids` [tokens]: bf16 [tokens, len(layer_ids), hidden].

    The id layers + 1 is the last norm's output, which is exact within `_ROOT_TOLERANCE`: see `wrong_elements`.
    """
    return _exact(token_ids, layer_ids, vocab, hidden, kind, layers).to(torch.bfloat16)


def _exact(token_ids: torch.Tensor, layer_ids: Sequence[int], vocab: int, hidden: int, kind: Kind, layers: int) -> torch.Tensor:
    rows = embedding(vocab, hidden)[token_ids].unsqueeze(1).repeat(1, len(layer_ids), 1)
    if _counts_layers(kind):
        rows[:, :, LAYER_COLUMN] = torch.tensor([min(layer_id, layers) for layer_id in layer_ids], dtype=torch.float32)
    for at, layer_id in enumerate(layer_ids):
        if layer_id > layers:
            rows[:, at] *= torch.rsqrt(rows[:, at].square().mean(-1, keepdim=True) + NORM_EPSILON)
    return rows


def wrong_elements(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    layer_ids: Sequence[int],
    *,
    vocab: int = VOCAB,
    kind: Kind = "dense",
    layers: int = LAYERS,
) -> torch.Tensor:
    """Which elements of `rows`, [tokens, len(layer_ids), hidden], are not those of `token_ids`: bool, of that shape.

    Equal means equal bits. Of the last norm's output an element may be what rounding makes of a root that is wrong in its last
    digits.
    """
    truth = _exact(token_ids, layer_ids, vocab, rows.shape[-1], kind, layers)
    wrong = rows != truth.to(rows.dtype)
    for at, layer_id in enumerate(layer_ids):
        if layer_id > layers:
            bounds = [(truth[:, at] * (1 + sign * _ROOT_TOLERANCE)).to(rows.dtype) for sign in (-1, 1)]
            low, high = torch.minimum(*bounds), torch.maximum(*bounds)
            wrong[:, at] = ~((rows[:, at] >= low) & (rows[:, at] <= high))
    return wrong | (torch.signbit(rows) != torch.signbit(truth))  # A zero has a sign, too.


def wrong_rows(
    rows: torch.Tensor, token_ids: torch.Tensor, layer_ids: Sequence[int], *, kind: Kind = "dense", layers: int = LAYERS
) -> torch.Tensor:
    """Which of `rows`, [tokens, len(layer_ids), hidden], are not those of `token_ids`: int64 [wrong]."""
    wrong = wrong_elements(rows, token_ids, layer_ids, kind=kind, layers=layers)
    return wrong.flatten(1).any(1).nonzero().flatten()


def _counts_layers(kind: Kind) -> bool:
    return kind in ("dense", "swa")


def make(
    out: Path,
    kind: Kind = "dense",
    hidden: int = HIDDEN,
    layers: int = LAYERS,
    vocab: int = VOCAB,
    *,
    heads: int = 4,
    positions: int = 32768,
    experts_in_each_layer: bool = False,
) -> Path:
    """Write the checkpoint and a byte-level tokenizer to `out`; returns `out`. Needs transformers.

    heads: attention heads, which tensor parallel ranks share; half as many KV heads. positions: tokens that a text may have.
    experts_in_each_layer: a mixture of experts in each layer, and not only in two; of "gdn" only.
    """
    if vocab > 2**ID_BITS:
        raise ValueError(f"a vocabulary of {vocab} does not fit {ID_BITS} bits")
    from transformers.utils import logging

    logging.disable_progress_bar()
    if experts_in_each_layer and kind != "gdn":
        raise ValueError(f"a model of kind {kind!r} has no experts")
    config, model_class = _config(kind, hidden, layers, vocab, heads, positions)
    if experts_in_each_layer:
        config.mlp_only_layers = []
    torch.manual_seed(0)
    model = model_class(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(key in name for key in ("o_proj", "out_proj", "down_proj", "experts")):
                parameter.zero_()
        model.get_input_embeddings().weight.copy_(embedding(vocab, hidden))
        if _counts_layers(kind):
            for layer in model.model.layers:
                layer.mlp.down_proj.bias[LAYER_COLUMN] = 1
    model.save_pretrained(out)
    write_tokenizer(out)
    if kind == "swa":  # vLLM reads the pattern from the config; transformers' Llama ignores it.
        path = out / "config.json"
        saved = json.loads(path.read_text())
        saved["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        saved["sliding_window"] = 64
        path.write_text(json.dumps(saved, indent=1))
    return out


def write_tokenizer(out: Path) -> None:
    """A tokenizer of 256 byte tokens behind <eos> (0) and <bos> (1), in `out`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<eos>": 0, "<bos>": 1}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>").save_pretrained(out)


def _config(kind: Kind, hidden: int, layers: int, vocab: int, heads: int, positions: int) -> tuple[Any, Any]:
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 64,
        "max_position_embeddings": positions,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "rms_norm_eps": NORM_EPSILON,
    }
    if kind in ("dense", "swa"):
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaConfig(**common, mlp_bias=True), LlamaForCausalLM
    if kind == "mla":
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        return DeepseekV2Config(
            **common | {"num_key_value_heads": heads},
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=128,
            first_k_dense_replace=layers,  # No mixture of experts.
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=64,
            topk_method="greedy",
        ), DeepseekV2ForCausalLM
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **common,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        # vLLM wants a mixture-of-experts layer on each rank, of a pipeline of two as well.
        mlp_only_layers=[i for i in range(layers) if i not in (layers // 2 - 1, layers - 1)],
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
    )
    return config, Qwen3NextForCausalLM
