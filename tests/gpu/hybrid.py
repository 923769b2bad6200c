"""Prefix hits on a hybrid: rows after a hit against the same rows computed without prefix caching, and by transformers.

usage: python tests/gpu/hybrid.py [--logs DIR]      needs a GPU and vLLM; says so and exits 0 where there is none.

The truth model cannot show a stale recurrent state, for its rows do not depend on it. So this takes random weights: a
conversation of three turns (each sends all that came before, and a block more; in between, text is generated, greedy or
sampled, one to two tokens a step) on an engine with "align" prefix caching, and then every sequence again, as one prompt, on
an engine without. What a state that is wrong would do is measured too: the last tokens of a sequence without those before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engines

from slotstream.client import connect

LAYERS = 6
LAYER_IDS = [1, 3, LAYERS - 1]  # The last layer is a mixture of experts: where a near-tie falls is not what is asked here.
LENGTHS = (255, 256, 257, 511, 513, 700, 1023, 1300)
ADDED = (300, 257)
OUTPUT_TOKENS = 150
# Relative error of a row. Two ways of computing the same come to a few hundredths, a wrong state to more than a third.
WORST_MAX = 0.15
WORST_MAX_THEIRS = 0.3  # transformers computes it yet another way.


def make_model(path: Path) -> Path:
    """A Qwen3-Next of random weights, large enough for its recurrent state to matter."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    from slotstream.truth.model import write_tokenizer

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        eos_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.08,
        dtype="bfloat16",
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=list(range(LAYERS - 1)),
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)],
    )
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    write_tokenizer(path)
    return path


def make_engine(model: str, server: str, namespace: str, *, prefix_caching: bool) -> Any:
    options = engines.small(
        enforce_eager=True,
        async_scheduling=os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1",  # With V1 it is refused: see decode.py.
        enable_prefix_caching=prefix_caching,
        mamba_cache_mode="align" if prefix_caching else "none",
        max_num_batched_tokens=512,
        max_model_len=4096,
        max_num_seqs=16,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=4 << 30,
        kv_transfer_config=engines.slotstream(server, namespace=namespace),
        **engines.of_kind("gdn"),
        **engines.extraction(LAYER_IDS),
    )
    return engines.make(model, options)


def generate(engine: Any, asks: dict[str, list[int]], *, outputs: bool, max_tokens: int) -> dict[str, list[int]]:
    """Capture each prompt under its name; returns prompt and text of each."""
    # Greedy text of random weights soon repeats itself: drafts are accepted. Sampled text rarely.
    params = [
        engines.sampling({"slotstream": {"sample_id": name, "include_output_tokens": outputs}}, max_tokens, i % 2)
        for i, name in enumerate(asks)
    ]
    answers = engine.generate([{"prompt_token_ids": p} for p in asks.values()], params, use_tqdm=False)
    for answer in answers:
        assert "error" not in answer.kv_transfer_params["slotstream"], answer.kv_transfer_params
    return {name: asks[name] + list(answer.outputs[0].token_ids) for name, answer in zip(asks, answers, strict=True)}


def converse(model: str, server: str, namespace: str) -> None:
    """Three turns on an engine with prefix caching, each beginning with all of the turn before."""
    rng = random.Random(0)
    engine = make_engine(model, server, namespace, prefix_caching=True)
    texts = {f"c{i}": [rng.randrange(2, 512) for _ in range(length)] for i, length in enumerate(LENGTHS)}
    for turn in range(1 + len(ADDED)):
        if turn:
            texts = {name: text + [rng.randrange(2, 512) for _ in range(ADDED[turn - 1])] for name, text in texts.items()}
        said = generate(
            engine, {f"{name}-t{turn}": text for name, text in texts.items()}, outputs=True, max_tokens=OUTPUT_TOKENS
        )
        texts = {name.partition("-")[0]: text for name, text in said.items()}


def recompute(model: str, server: str, namespace: str, of: str) -> None:
    """Every sample of namespace `of` again, as a prompt, without prefix caching; and the last 200 tokens of each alone."""
    engine = make_engine(model, server, namespace, prefix_caching=False)
    with connect(server) as client:
        whole = {i.sample_id: client.get(i.sample_id, namespace=of).token_ids.tolist() for i in client.list(namespace=of)}
    first = {f"c{i}-t0": whole[f"c{i}-t0"][:length] for i, length in enumerate(LENGTHS)}
    own = generate(engine, {f"{name}-own": tokens for name, tokens in first.items()}, outputs=True, max_tokens=OUTPUT_TOKENS)
    whole |= {f"{name}-again": tokens[:-1] for name, tokens in own.items()}
    generate(engine, whole, outputs=False, max_tokens=1)
    generate(engine, {f"{name}-tail": tokens[-200:] for name, tokens in whole.items()}, outputs=False, max_tokens=1)


def errors(rows: Any, reference: Any) -> Any:
    """Relative error of each row and layer."""
    import torch

    rows, reference = rows.float(), reference.float()
    return torch.linalg.vector_norm(rows - reference, dim=-1) / torch.linalg.vector_norm(reference, dim=-1)


def by_transformers(model: Path, token_ids: Any) -> Any:
    """transformers' own rows, in bfloat16."""
    import torch
    from transformers import Qwen3NextForCausalLM

    loaded: Any = Qwen3NextForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()
    with torch.no_grad():
        states = loaded(token_ids[None].cuda(), output_hidden_states=True).hidden_states
    return torch.stack([states[i][0] for i in LAYER_IDS], 1).cpu()


def compare(server: str, model: Path, runner: int) -> bool:
    """Print what was found for one runner; whether all is well."""
    import torch

    hit, fresh = f"hit-v{runner}", f"fresh-v{runner}"
    after: list[torch.Tensor] = []
    before: list[torch.Tensor] = []
    wrong: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    hits = 0
    bad = []
    with connect(server) as client:
        for i in range(len(LENGTHS)):
            own, again = (client.get(f"c{i}-t0-own{e}", namespace=fresh) for e in ("", "-again"))
            bad.append((own.sample_id, own.metadata, errors(own.hidden_states, again.hidden_states)))
        for info in client.list(namespace=hit):
            ours, again = (client.get(info.sample_id, namespace=n) for n in (hit, fresh))
            tail = client.get(f"{info.sample_id}-tail", namespace=fresh)
            error = errors(ours.hidden_states, again.hidden_states)
            split = int(info.metadata["prefix_hit_tokens"])
            bad.append((info.sample_id, info.metadata, error))
            hits += split
            (after if split else before).append(error[split:].flatten())
            wrong.append(errors(tail.hidden_states[:10], again.hidden_states[-200:-190]).flatten())
            if info.sample_id in ("c0-t2", "c1-t2"):
                theirs.append(errors(ours.hidden_states, by_transformers(model, ours.token_ids)).flatten())
    ok = hits > 0
    print(f"runner V{runner}: {hits} rows of prefix hits")
    for name, metadata, error in sorted(bad, key=lambda b: b[0]):
        rows = (error >= WORST_MAX).any(1).nonzero().flatten().tolist()
        if rows:
            ok = False
            print(
                f"  {name}: {len(rows)} of {len(error)} rows are wrong, from row {rows[0]}; prompt {metadata['prompt_tokens']}"
            )
    for what, found, allowed in (
        ("rows after a hit", after, WORST_MAX),
        ("rows without one", before, WORST_MAX),
        ("against transformers", theirs, WORST_MAX_THEIRS),
    ):
        values = torch.cat(found)
        worst = float(values.max())
        ok = ok and worst < allowed
        print(f"  {what:22} {len(values):7} errors, median {float(values.median()):.4f}, worst {worst:.4f}")
    stale = float(torch.cat(wrong).median())
    print(f"  {'a state that is wrong':22} median {stale:.4f}", flush=True)
    return ok and stale > 2 * WORST_MAX


def main() -> int:
    parser = engines.command_line(__doc__)
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        what, *rest = json.loads(arguments.child)
        (converse if what == "converse" else recompute)(*rest)
        return 0
    if not engines.has_gpus():
        return 0
    with engines.place(arguments.logs) as here:
        model = make_model(here.work / "model")

        def child(runner: int, what: str, *rest: str) -> None:
            asked, log = json.dumps([what, str(model), here.server, *rest]), here.logs / f"{what}-v{runner}.log"
            if engines.run_script(__file__, "--child", asked, log=log, runner=runner, timeout_s=400) != 0:
                raise RuntimeError(f"{what} with runner V{runner} failed ({log})")

        def both(runner: int) -> None:
            child(runner, "converse", f"hit-v{runner}")
            child(runner, "recompute", f"fresh-v{runner}", f"hit-v{runner}")

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(both, (1, 2)))
        verdicts = [compare(here.server, model, runner) for runner in (1, 2)]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
