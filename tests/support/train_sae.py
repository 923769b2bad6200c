"""Trains one autoencoder of SAELens twice, from the same start: with rows of a server, and with the same rows out of memory.

`python train_sae.py ADDRESS NAMESPACE LAYER TRUTH`: TRUTH is a file of `torch.save`, float32 [rows, hidden], of which each row
begins with its number. Prints how many parameters differ, and by how much they moved. Needs SAELens.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch
from sae_lens import SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.config import SAETrainerConfig

from slotstream.client import RowStream, rows

_BATCH, _STEPS, _FEATURES = 256, 60, 128


def _stored(stream: RowStream) -> Iterator[torch.Tensor]:
    for epoch in itertools.count():
        stream.set_epoch(epoch)
        yield from stream


def _remembered(stream: RowStream, truth: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same batches: only which rows they have is asked of the server."""
    for batch in _stored(stream):
        yield truth[batch[:, 0].long()]


def _trained(batches: Iterator[torch.Tensor], hidden: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters before and after."""
    torch.manual_seed(0)
    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=hidden, d_sae=_FEATURES, k=8, device="cpu"))
    before = {name: value.clone() for name, value in sae.state_dict().items()}
    config = SAETrainerConfig(
        total_training_samples=_STEPS * _BATCH,
        train_batch_size_samples=_BATCH,
        lr=1e-3,
        lr_end=1e-4,
        n_batches_for_norm_estimate=4,
    )
    return before, dict(SAETrainer(cfg=config, sae=sae, data_provider=batches).fit().state_dict())


def main() -> None:
    address, namespace, layer, path = sys.argv[1:]
    torch.set_num_threads(1)
    truth = torch.load(path)

    def stream() -> RowStream:
        return rows(int(layer), _BATCH, client=address, namespace=namespace, dtype="float32", drop_last=True, buffer_rows=1000)

    before, stored = _trained(_stored(stream()), truth.shape[1])
    _, remembered = _trained(_remembered(stream(), truth), truth.shape[1])
    differ = [name for name in remembered if not torch.equal(stored[name], remembered[name])]
    moved = max(float((stored[name] - before[name]).abs().max()) for name in before)
    print(f"{len(differ)} of {len(remembered)} parameters differ; moved by {moved:.4f}")


if __name__ == "__main__":
    main()
