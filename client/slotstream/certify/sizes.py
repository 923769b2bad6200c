"""How large the engine and its load are, so that steps cut prompts and the cache is too small."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from slotstream.certify.flags import MODEL_NAME, Flags
from slotstream.truth.model import Kind
from slotstream.wire.errors import ConfigError

_TOKENS_MIN = 64  # Of a request, prompt and output: the load is made of such.
_STEP_TOKENS = 2048  # Where the flags do not say.
_UNCHUNKED_TOKENS = 2048
_REQUESTS_HELD = 2.5  # So many of the longest requests fit the cache.
_SEQUENCES = 256  # vLLM's smallest default of --max-num-seqs.
_BLOCK_TOKENS, _CPU_BLOCK_TOKENS = 16, 128  # vLLM's own.
_STATE_BLOCK_TOKENS = 256  # About: blocks of gated delta nets are as long as their states are large.


@dataclass(frozen=True, slots=True)
class Sizes:
    """tokens_max: of a request, prompt and output. step_tokens: a longer prompt takes several steps; None where none does.

    sequences: requests that may run at a time. blocks: of the KV cache; None: as the flags say.
    """

    tokens_max: int
    step_tokens: int | None
    sequences: int
    blocks: int | None


def sizes_of(flags: Flags, kind: Kind, *, gpu: bool) -> Sizes:
    """Raises ConfigError for a flag that is no number, and where a request is too short for the load."""
    longest, step = flags.number("--max-model-len"), flags.number("--max-num-batched-tokens")
    sequences = flags.number("--max-num-seqs") or _SEQUENCES
    if is_off(flags, "--enable-chunked-prefill"):
        tokens_max = min(longest or _UNCHUNKED_TOKENS, step or _UNCHUNKED_TOKENS, _UNCHUNKED_TOKENS)
        step = None
    else:
        step = step or max(_STEP_TOKENS, sequences)
        if longest is not None and longest < step + 64:  # No prompt is longer than a step: shorter ones are.
            step = max(longest // 2, sequences)
        tokens_max = min(longest or step + max(512, step // 4), step + max(512, step // 4))
        step = step if step < tokens_max else None
    if tokens_max < _TOKENS_MIN:
        raise ConfigError(f"with these flags a request has at most {tokens_max} tokens, and the load needs {_TOKENS_MIN}")
    blocks = None if flags.has("--num-gpu-blocks-override") else _blocks(flags, kind, tokens_max, sequences, gpu=gpu)
    return Sizes(tokens_max, step, sequences, blocks)


def is_off(flags: Flags, name: str) -> bool:
    """Whether a flag that vLLM has on by default is off."""
    return flags.has(name.replace("--", "--no-", 1)) or (flags.value(name) or "").lower() == "false"


def _blocks(flags: Flags, kind: Kind, tokens_max: int, sequences: int, *, gpu: bool) -> int:
    """Room for a few of the longest requests; for fewer where few may run. Where it is too little, vLLM says so, at start."""
    held = tokens_max * min(_REQUESTS_HELD, max(1.2, 0.65 * sequences))
    if kind == "gdn":
        return math.ceil(held / _STATE_BLOCK_TOKENS) + 12
    block = flags.number("--block-size") or (_BLOCK_TOKENS if gpu else _CPU_BLOCK_TOKENS)
    groups = (2 if kind == "swa" else 1) + (2 if flags.extracted() is not None else 0)
    return math.ceil(held / block) * groups + 2


def apply(flags: Flags, sizes: Sizes, kind: Kind, *, gpu: bool) -> None:
    """Write the sizes into the flags, and what this kind of model asks for besides."""
    flags.set("--served-model-name", MODEL_NAME, "the truth model is asked by this name")
    flags.set("--max-model-len", str(sizes.tokens_max), "the longest request of the load")
    if sizes.step_tokens is not None:
        flags.set("--max-num-batched-tokens", str(sizes.step_tokens), "a step that is shorter than the longest prompt")
    if sizes.blocks is not None:
        why = "a cache that is too small for the load, so that requests are preempted"
        flags.set("--num-gpu-blocks-override", str(sizes.blocks), why)
        flags.set("--kv-cache-memory-bytes", None, why)
    if not gpu:
        return
    if kind == "mla":
        why = "other kernels take no model of this one's sizes"
        flags.set("--attention-backend", None, why)
        flags.set("--attention-config", json.dumps({"backend": "TRITON_MLA"}), why)
    if kind == "gdn":
        more = flags.json("--additional-config") or {}
        if "gdn_prefill_backend" not in more:
            why = "other kernels take no model of this one's sizes"
            flags.set("--additional-config", json.dumps({**more, "gdn_prefill_backend": "triton"}), why)


def without_room(log: str) -> bool:
    """Whether vLLM's log says that the cache holds no request of the longest."""
    return "KV cache is needed, which is larger than the available KV" in " ".join(log.split())
