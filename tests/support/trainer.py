"""A training process that forks its loader's workers.

It has to be one of its own: a test's has a sender's stream open, and where other threads are in gRPC calls at a fork, gRPC does
not work in the child.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from torch.utils.data import DataLoader

from slotstream.client import Sample, connect
from slotstream.client.dataset import SampleDataset


def in_a_trainer(read: Callable[..., Any], *arguments: str) -> Any:
    """What `read` returns there."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as trainer:
        return trainer.submit(read, *arguments).result(timeout=120)


def read_with_workers(address: str, namespace: str) -> tuple[int, list[Sample], str]:
    """Samples that the process itself finds, those that workers read then, and what `state_dict` says after that."""
    # The client was used here before the workers are forked: each has to open a connection of its own.
    with connect(address) as client:
        dataset = SampleDataset(client, namespace=namespace)
        alone = len(list(dataset))
        loader: DataLoader[Sample] = DataLoader(dataset, batch_size=1, collate_fn=_one, num_workers=2)
        samples = list(loader)
        try:
            return alone, samples, str(dataset.state_dict())
        except RuntimeError as error:
            return alone, samples, f"refused: {error}"


def read_and_resume(address: str, namespace: str) -> tuple[list[str], list[str]]:
    """Ids of five samples that a loader's workers read before its state was taken, and of those that the next loader read."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        dataset = SampleDataset(address, namespace=namespace)
        return StatefulDataLoader(dataset, batch_size=1, collate_fn=_one, num_workers=2)

    first = loader()
    received = iter(first)
    before = [next(received).sample_id for _ in range(5)]
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    return before, [sample.sample_id for sample in second]


def _one(batch: list[Sample]) -> Sample:
    (sample,) = batch
    return sample
