"""The passes of a SampleDataset whose epochs are planned: what was committed at one moment, shared evenly, in a fixed order."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slotstream.client.bad_samples import BadSamples
from slotstream.client.client import Client
from slotstream.client.epoch import Member
from slotstream.client.many import READS_FIRST
from slotstream.client.members import Filters, Selection, members_at
from slotstream.client.ranks import Place, agreed
from slotstream.client.sample_plan import Share, even_bounds, ordered, share_of
from slotstream.client.stretches import is_gone, patiently
from slotstream.client.tensors import Sample, receive_sample
from slotstream.v1 import samples_pb2
from slotstream.wire.columns import further_columns
from slotstream.wire.errors import BadLayers, SlotStreamError

_RETRY_S = 60.0


@dataclass(slots=True)
class _Progress:
    """Where a worker is in an epoch; what a state holds."""

    epoch: int
    as_of: int
    low: int
    high: int
    cursor: list[int] | None = None  # Key and tag of the last sample that was handed out.
    received: int = 0
    left: int = 0
    deleted: int = 0
    skipped: int = 0


class PlannedSamples:
    """What all ranks know alike, and where this process is. It can be pickled, and holds no connection."""

    def __init__(
        self,
        client: Client,
        filters: Filters,
        layers: tuple[int | str, ...] | None,
        seed: int | None,
        as_of: int | None,
        rank_of_ranks: tuple[int, int],
        wait_s: float,
        bad: BadSamples,
    ) -> None:
        """seed None: not shuffled. Raises ConfigError and SampleNotFound, and BadLayers unless `bad` skips."""
        self._seed = seed
        self._bad = bad
        self._members: list[Member] = []
        self._progress: _Progress | None = None
        self._resuming: _Progress | None = None
        selection = Selection(layers, keep_lacking=bad.skips)
        rank, world_size = rank_of_ranks

        def find() -> tuple[int, list[int]]:
            until, self._members = members_at(client, filters, selection, as_of, wait_s)
            return until, even_bounds(self._members, world_size)

        self.as_of, self._bounds = agreed(rank, world_size, as_of, find)
        if not self._members:  # Another rank looked.
            _, self._members = members_at(client, filters, selection, self.as_of, 0.0)

    @property
    def deleted(self) -> int:
        return 0 if self._progress is None else self._progress.deleted

    @property
    def skipped(self) -> int:
        return 0 if self._progress is None else self._progress.skipped

    def samples(self, client: Client, where: Place, epoch: int) -> Iterator[Sample]:
        """One epoch, or the rest of the one that was resumed."""
        order, progress = self._begin(where, epoch, self._resuming)
        self._progress, self._resuming = progress, None
        self._bad.begin()
        reads = ((one, _read_of(one[2])) for one in order)
        # What a call asks for is read, though it is deleted before its turn: not many of a small epoch at once.
        many = client.many(wait_s=0.0, retry_s=_RETRY_S, first_reads=max(1, min(READS_FIRST, len(order) // 64)))
        for (key, tag, member), answer in many.answers(reads, receive_sample):
            sample = None if isinstance(answer, SlotStreamError) else _same(answer, member)
            progress.left -= 1
            if sample is not None:
                self._bad.good()
                progress.received += 1
                progress.cursor = [key, tag]
                yield sample
                continue
            if isinstance(answer, SlotStreamError) and self._bad.skip(member.name, answer):
                progress.skipped += 1
                progress.cursor = [key, tag]
                continue
            if isinstance(answer, SlotStreamError) and not patiently(
                functools.partial(is_gone, client, member), _RETRY_S, client.pause
            ):
                raise answer
            progress.deleted += 1
        self._bad.end(progress.received)

    def _begin(self, where: Place, epoch: int, state: _Progress | None) -> tuple[list[tuple[int, int, Member]], _Progress]:
        if state is None:
            share = share_of(self._members, self._bounds, where)
            state = _Progress(epoch, self.as_of, share.low, share.high)
            order = ordered(share.of(self._members), self._seed, epoch)
            state.left = len(order)
            return order, state
        there = [member for member in self._members if member.committed_unix_ns <= state.as_of]
        order = ordered(Share(state.low, state.high).of(there), self._seed, state.epoch)
        cursor = state.cursor
        order = [one for one in order if cursor is None or [one[0], one[1]] > cursor]
        gone = max(0, state.left - len(order))
        state.deleted += gone
        state.left -= gone
        return order, state

    def state(self, where: Place, epoch: int) -> dict[str, Any]:
        progress = self._resuming or self._progress or self._begin(where, epoch, None)[1]
        # Numbers of 64 bits as text: they are longer than the integers of some readers of JSON.
        cursor = None if progress.cursor is None else [hex(number) for number in progress.cursor]
        return {**asdict(progress), "seed": self._seed, "low": hex(progress.low), "high": hex(progress.high), "cursor": cursor}

    def resume(self, state: Mapping[str, Any]) -> int:
        """Goes on there, next time; the epoch that it is. Raises ValueError for a state of another order or a later moment."""
        try:
            seed = state["seed"]
            numbers = {name: int(state[name]) for name in ("epoch", "as_of", "received", "left", "deleted")}
            numbers["skipped"] = int(state.get("skipped", 0))
            low, high = int(state["low"], 16), int(state["high"], 16)
            cursor = None if state["cursor"] is None else [int(number, 16) for number in state["cursor"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("this is not the state of a SampleDataset with shuffle or as_of") from error
        if seed != self._seed:
            raise ValueError(f"this state is of seed {seed}, and this SampleDataset's is {self._seed}")
        if numbers["as_of"] > self.as_of:
            raise ValueError(f"this state is of a later moment ({numbers['as_of']}) than this dataset's as_of ({self.as_of})")
        self._resuming = _Progress(low=low, high=high, cursor=cursor, **numbers)
        return self._resuming.epoch


def _read_of(member: Member) -> samples_pb2.ReadRequest | BadLayers:
    if not member.layers:
        return BadLayers(f"sample {member.name} lacks a layer that was asked for")
    return samples_pb2.ReadRequest(
        namespace=member.namespace, sample_id=member.sample_id, layer_ids=member.layers, columns=further_columns()
    )


def _same(sample: Sample, member: Member) -> Sample | None:
    """The sample, if it is the one that was committed then."""
    return sample if sample.metadata["committed_unix_ns"] == str(member.committed_unix_ns) else None
