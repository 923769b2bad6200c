"""Loads exported folders with their tools' own loaders, and writes what came out: for the environment that has the tools.

`python load_exports.py FOLDER OUT`: FOLDER has a folder for each format; OUT becomes one file of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

Loaded = dict[str, Any]


def specforge(folder: Path) -> Iterator[Loaded]:
    from specforge.data.preprocessing import process_offline_eagle3_sample
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    refs = OfflineManifestReader(str(folder), validate_files=True).read()
    transform = partial(process_offline_eagle3_sample, max_len=4096)
    for batch in FeatureDataLoader(LocalFeatureStore(), refs=refs, per_sample_transform=transform, ack=False):
        held = batch.tensors
        yield {
            "ids": held["input_ids"].flatten(),
            "mask": held["loss_mask"].flatten(),
            "base": held["target"].flatten(0, -2),
            "others": held["hidden_state"].flatten(0, -2),
            "before_norm": False,
        }


def modelopt(folder: Path) -> Iterator[Loaded]:
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    files = sorted(str(path) for path in folder.rglob("*.pt"))
    dataset = OfflineSupervisedDataset(files, answer_only_loss=True)
    for number in range(len(dataset)):
        batch = EagleOfflineDataCollator(train_len=len(dataset[number]["input_ids"]))([dataset[number]])
        rows = batch["base_model_outputs"]
        yield {
            "ids": batch["input_ids"][0],
            "mask": batch["loss_mask"][0],
            "base": rows["base_model_hidden_states"][0],
            "others": rows["aux_hidden_states"][0],
            "before_norm": rows["base_hidden_prenorm"],
        }


def speculators(folder: Path) -> Iterator[Loaded]:
    from speculators.train.data import ArrowDataset

    dataset = ArrowDataset(4096, folder, on_missing="raise")
    for number in range(len(dataset)):
        held = dataset[number]
        yield {
            "ids": held["input_ids"],
            "mask": held["loss_mask"],
            "base": held["verifier_last_hidden_states"],
            "others": held["hidden_states"],
            "before_norm": True,
        }


TOOLS: tuple[Callable[[Path], Iterator[Loaded]], ...] = (specforge, modelopt, speculators)


if __name__ == "__main__":
    exports, out = map(Path, sys.argv[1:])
    torch.save({tool.__name__: list(tool(exports / tool.__name__)) for tool in TOOLS}, out)
