"""A training process that forks its loader's workers.

It has to be one of its own: a test's has a sender's stream open, and where other threads are in gRPC calls at a fork, gRPC does
not work in the child.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from slotstream.client import Sample, connect, rows
from slotstream.client.dataset import SampleDataset


def in_a_trainer(read: Callable[..., Any], *arguments: Any, limit_s: float = 120.0) -> Any:
    """What `read` returns there, within `limit_s` seconds."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as trainer:
        return trainer.submit(read, *arguments).result(timeout=limit_s)


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


def read_rows_by_rank(
    address: str, namespace: str, shares: list[tuple[int, int]], drop_last: bool
) -> dict[tuple[int, int], list[list[Any]]]:
    """(ranks, workers) -> what the loader of each rank brought, one rank after the other."""
    with connect(address) as client:
        as_of = client.moment()
    found: dict[tuple[int, int], list[list[Any]]] = {}
    for world_size, workers in shares:
        found[world_size, workers] = []
        for rank in range(world_size):
            stream: Any = rows(
                4,
                256,
                client=address,
                namespace=namespace,
                rank=rank,
                world_size=world_size,
                as_of=as_of,
                drop_last=drop_last,
                buffer_rows=4000,
            )
            loader: Any = DataLoader(stream, batch_size=None, num_workers=workers)
            found[world_size, workers].append([batch.numpy() for batch in loader])
    return found


def read_rows_and_resume(address: str, namespace: str, workers: int) -> tuple[list[Any], list[Any]]:
    """Twenty batches, and those that another loader read from the state that was taken then."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        stream: Any = rows(4, 256, client=address, namespace=namespace, seed=5, buffer_rows=4000)
        return StatefulDataLoader(stream, batch_size=None, num_workers=workers)

    first = loader()
    received = iter(first)
    before = [next(received).numpy() for _ in range(20)]
    state = first.state_dict()
    del received
    second = loader()
    second.load_state_dict(state)
    return before, [batch.numpy() for batch in second]


Asked = tuple[str, tuple[int | None, ...]]  # A namespace, and what each rank is given as as_of.
Answered = tuple[int, Any]  # as_of and the numbers of its rows, or 0 and what it raised.


def read_rows_in_a_group(address: str, meeting: Path, asked: list[Asked]) -> list[list[Answered]]:
    """What the ranks of one process group answered to each of these, in the order of the ranks."""
    ranks = len(asked[0][1])
    with ProcessPoolExecutor(ranks, mp_context=multiprocessing.get_context("spawn")) as processes:
        answers = [
            processes.submit(_read_in_a_group, address, f"file://{meeting}", rank, ranks, asked) for rank in range(ranks)
        ]
        return [list(of_one) for of_one in zip(*(answer.result(timeout=120) for answer in answers), strict=True)]


def _read_in_a_group(address: str, meeting: str, rank: int, ranks: int, asked: list[Asked]) -> list[Answered]:
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    try:
        return [_read_one(address, namespace, moments[rank]) for namespace, moments in asked]
    finally:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _read_one(address: str, namespace: str, as_of: int | None) -> Answered:
    try:
        stream = rows(4, 100, client=address, namespace=namespace, as_of=as_of)
        return stream.as_of, [int(number) for batch in stream for number in batch[:, 0]]
    except Exception as error:
        return 0, repr(error)
