"""Files of a truth model's rows as any extractor may write them, and faults that are planted in one of them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slotstream.truth import model as truth_model
from support.workload import FINAL_ID, text_tokens

LAYER_IDS = [1, 3, truth_model.LAYERS, FINAL_ID]


def write_files(
    folder: Path,
    count: int = 4,
    *,
    kind: truth_model.Kind = "dense",
    layer_ids: Sequence[int] = LAYER_IDS,
    metadata: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, list[int]]:
    """`count` files of 30 rows and more, `s0.safetensors` and so on, every other with output rows; their prompts, by name."""
    rng = random.Random(5)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = {}
    for number in range(count):
        tokens = text_tokens(rng, 30 + number)
        prompts[f"p{number}"] = tokens[: -5 if number % 2 else None]
        ids = torch.tensor(tokens)
        rows = truth_model.expected(ids, layer_ids, kind=kind).to(dtype)
        said = {"layer_ids": json.dumps(list(layer_ids))} if metadata else None
        save_file({"hidden_states": rows, "token_ids": ids}, folder / f"s{number}.safetensors", said)
    return prompts


def plant(folder: Path, what: str, *, file: str = "s2.safetensors", row: int = 17) -> None:
    """Break one file, at one row where it can be one."""
    path = folder / file
    if what == "sample lost":
        path.unlink()
        return
    held: Mapping[str, torch.Tensor] = load_file(path)
    opened: Any = safe_open
    with opened(path, framework="pt") as header:
        metadata = header.metadata()
    rows, ids = held["hidden_states"].clone(), held["token_ids"].clone()
    if what == "layer swapped":
        rows[row, [0, 1]] = rows[row, [1, 0]]
    elif what == "row shifted":
        rows[row:] = torch.roll(rows[row:], 1, 0)
    elif what == "bit flipped":
        rows.view(torch.int16)[row, 1, 99] ^= 1
    elif what == "bit flipped in final":
        rows.view(torch.int16)[row, -1, truth_model.LAYER_COLUMN] ^= 1
    elif what == "token flipped":
        ids[row] ^= 1
    elif what == "rows lost":
        rows, ids = rows[:row], ids[:row]
    save_file({"hidden_states": rows, "token_ids": ids}, path, metadata)
