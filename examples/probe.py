"""Which layer of a model knows where it is in the text? A linear probe for each layer: is this token one of the first twenty?

    python examples/probe.py

The embedding (layer 0) knows its own token alone, so its probe can only guess. What the layers above know, attention brought.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from common import store

from slotstream.client import rows

LAYERS, HIDDEN = (0, 1, 2, 3), 256
FIRST = 20
EPOCHS, BATCH = 4, 2048
Held = dict[int, torch.Tensor]  # By layer, [rows, HIDDEN].


def batches(address: str, split: str, epoch: int = 0) -> Iterator[tuple[Held, torch.Tensor]]:
    """Rows of each layer, standardised, and whether each is one of the first, in an order of chance."""
    stream = rows(LAYERS, BATCH, client=address, tags={"split": split}, dtype="float32", columns=["positions"], seed=epoch)
    for batch in stream:
        held = {layer: torch.nn.functional.layer_norm(batch[layer], (HIDDEN,)) for layer in LAYERS}
        yield held, (batch["positions"] < FIRST).float()


def train(address: str) -> dict[int, float]:
    """By layer: of the first tokens and of the others in prompts never seen, the mean of how many its probe tells rightly."""
    torch.manual_seed(0)
    probes = {layer: torch.nn.Linear(HIDDEN, 1) for layer in LAYERS}
    optimizer = torch.optim.Adam([weight for probe in probes.values() for weight in probe.parameters()], lr=0.02)
    for epoch in range(EPOCHS):
        for held, wanted in batches(address, "train", epoch):
            # The first tokens are few: as a whole they count as much as the others.
            loss_of = torch.nn.BCEWithLogitsLoss(pos_weight=(1 - wanted).sum() / wanted.sum().clamp(min=1))
            loss = torch.stack([loss_of(probe(held[layer])[:, 0], wanted) for layer, probe in probes.items()]).sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    right, of = {layer: torch.zeros(2) for layer in LAYERS}, torch.zeros(2)
    for held, wanted in batches(address, "test"):
        kinds = torch.stack([wanted, 1 - wanted])
        of += kinds.sum(1)
        for layer, probe in probes.items():
            said = (probe(held[layer])[:, 0] > 0).float()
            right[layer] += (kinds * (said == wanted)).sum(1)
    return {layer: float((found / of).mean()) for layer, found in right.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200, help="of Python's documentation (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    layers = ",".join(map(str, LAYERS))
    with (
        tempfile.TemporaryDirectory(prefix="slotstream-probe-") as folder,
        store(Path(folder), layers, arguments.prompts) as to,
    ):
        scores = train(to)
    for layer, score in scores.items():
        print(f"layer {layer}: {score:.3f} of both kinds told rightly (0.5 is chance)")


if __name__ == "__main__":
    main()
