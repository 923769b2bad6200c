"""Which trainer this process is, which of its loader's workers, and what all must agree on. Uses torch only if it is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from slotstream.wire.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """One reader among all: a worker of a rank."""

    rank: int
    world_size: int
    worker: int
    workers: int

    @property
    def shard(self) -> int:
        return self.rank * self.workers + self.worker

    @property
    def shards(self) -> int:
        return self.world_size * self.workers


def group() -> Any:
    """torch.distributed where this process has initialised it, else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def checked_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size as given, else torch.distributed's, else those of one trainer. Raises ConfigError."""
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size are given together, or neither")
    if rank is None or world_size is None:
        ranks = group()
        return (0, 1) if ranks is None else (ranks.get_rank(), ranks.get_world_size())
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not one of world_size {world_size}")
    return rank, world_size


def worker_info() -> tuple[int, int] | None:
    """Which worker of how many of a torch loader this process is; None in a process that is none."""
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    return None if worker is None else (worker.id, worker.num_workers)


def place(rank: int, world_size: int) -> Place:
    """Of this process."""
    worker, workers = worker_info() or (0, 1)
    return Place(rank, world_size, worker, workers)


def agreed(rank: int, world_size: int, as_of: int | None, find: Callable[[], T]) -> T:
    """What `find` says: of rank 0 for all ranks where torch.distributed connects them, else of this process.

    as_of: the moment that was given. Raises ConfigError where ranks could not take the same: it was given differently, or not
    at all and nothing connects them. What `find` raises on rank 0 is raised on every rank.
    """
    ranks = group()
    if world_size == 1 or ranks is None or ranks.get_world_size() != world_size:
        if world_size > 1 and as_of is None:
            raise ConfigError(
                f"{world_size} ranks must read the same epoch: give all of them one as_of (client.moment() on one of them), "
                "or initialise torch.distributed first"
            )
        return find()
    given: list[Any] = [None] * world_size
    ranks.all_gather_object(given, as_of)
    if len(set(given)) > 1:
        raise ConfigError(f"the ranks were given different moments as as_of: {given}")
    answer: list[Any] = [None, None]
    if rank == 0:
        try:
            answer[0] = find()
        except Exception as error:  # Passed on: the others wait for an answer.
            answer[1] = error
    ranks.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    found: T = answer[0]
    return found
