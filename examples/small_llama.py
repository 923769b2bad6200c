"""A Llama of 3.6 million parameters, trained here on the docstrings of Python's own library."""

from __future__ import annotations

import ast
import contextlib
import math
import random
import shutil
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LAYERS, HIDDEN, VOCAB = 4, 256, 1024
_CONTEXT, _BATCH = 256, 4
_CHARS_MIN = 160  # Of a docstring: shorter ones say little.
_HELD_OUT = 8  # One in so many is kept from all training.


def docstrings() -> tuple[list[str], list[str]]:
    """Those of Python's library, each once, in an order of chance: to train on, and held out."""
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [path for path in sorted(library.rglob("*.py")) if not skipped & set(path.relative_to(library).parts)]
    found = dict.fromkeys(text for path in files for text in _docstrings(path) if len(text) >= _CHARS_MIN and text.isascii())
    texts = list(found)
    random.Random(0).shuffle(texts)
    return [text for number, text in enumerate(texts) if number % _HELD_OUT], texts[::_HELD_OUT]


def _docstrings(path: Path) -> Iterator[str]:
    with contextlib.suppress(SyntaxError, UnicodeDecodeError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def trained(path: Path, texts: list[str], steps: int, threads: int) -> Path:
    """The checkpoint in `path`; trained now where it is not there yet. Prints how far it is."""
    if path.exists():
        return path
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    torch.set_num_threads(threads)
    model = _new_model()
    data = _tokens(partial, texts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    generator = torch.Generator().manual_seed(0)
    begun = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(data) - _CONTEXT, (_BATCH,), generator=generator)
        batch = torch.stack([data[at : at + _CONTEXT] for at in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"  step {step + 1} of {steps}: loss {loss.item():.2f}, {time.monotonic() - begun:.0f} s", flush=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    partial.rename(path)
    return path


def _tokens(path: Path, texts: list[str]) -> torch.Tensor:
    """All texts, each with an end. The tokenizer that is made of them is left in `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<eos>", "<bos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>").save_pretrained(path)
    return torch.tensor([token for one in tokenizer.encode_batch(texts) for token in [*one.ids, 0]])


def _rate(step: int, steps: int) -> float:
    """A rise over the first steps, then a cosine's fall."""
    return 2e-3 * min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps) + 0.02)


def _new_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=80,  # At multiples of 32, attention of vLLM 0.32 dies of an illegal instruction on some CPUs with AMX.
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=0,
            tie_word_embeddings=False,
            dtype="float32",
        )
    )
