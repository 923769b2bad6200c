"""A sparse autoencoder of SAELens, trained on a stream of one layer's rows.

    pip install sae-lens
    python examples/sae.py

It prints how much of the rows' variance the autoencoder explains, on prompts that it never saw, before training and after.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from common import store
from sae_lens import SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.config import SAETrainerConfig

from slotstream.client import rows

LAYER, HIDDEN, FEATURES, ACTIVE = 2, 256, 1024, 32
BATCH = 1024


def endless(address: str) -> Iterator[torch.Tensor]:
    """Float batches [BATCH, HIDDEN], one epoch after another, each in an order of its own."""
    stream = rows(LAYER, BATCH, client=address, tags={"split": "train"}, dtype="float32", drop_last=True)
    for epoch in itertools.count():
        stream.set_epoch(epoch)
        yield from stream


def explained(sae: TopKTrainingSAE, address: str) -> float:
    """The share of the variance of unseen rows that their reconstruction has."""
    held = torch.cat(list(rows(LAYER, BATCH, client=address, tags={"split": "test"}, dtype="float32")))
    with torch.no_grad():
        left = (sae.decode(sae.encode(held)) - held).square().sum()
    return float(1 - left / (held - held.mean(0)).square().sum())


def train(address: str, steps: int = 600) -> tuple[float, float]:
    """What the autoencoder explains before training, and after."""
    torch.manual_seed(0)
    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=HIDDEN, d_sae=FEATURES, k=ACTIVE, device="cpu"))
    before = explained(sae, address)
    config = SAETrainerConfig(
        total_training_samples=steps * BATCH,
        train_batch_size_samples=BATCH,
        lr=1e-3,
        lr_end=1e-4,
        n_batches_for_norm_estimate=20,
    )
    trained = SAETrainer(cfg=config, sae=sae, data_provider=endless(address)).fit()
    return before, explained(trained, address)


def main() -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200, help="of Python's documentation (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="slotstream-sae-") as folder,
        store(Path(folder), str(LAYER), arguments.prompts) as address,
    ):
        before, after = train(address)
    print(f"variance of unseen rows that is explained: {before:.3f} before training, {after:.3f} after")
    return before, after


if __name__ == "__main__":
    main()
