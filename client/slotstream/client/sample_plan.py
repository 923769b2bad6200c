"""Whole samples of an epoch, shared evenly and put in an order. Pure: nothing is read here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slotstream.client.epoch import Member, number_of
from slotstream.client.ranks import Place

_END = 1 << 64


@dataclass(frozen=True, slots=True)
class Share:
    """The samples whose hash is in [low, high). Part of a state, so that what was deleted meanwhile moves no other."""

    low: int
    high: int

    def of(self, members: Sequence[Member]) -> list[Member]:
        return [member for member in members if self.low <= number_of("share", member.name) < self.high]


def even_bounds(members: Sequence[Member], parts: int) -> list[int]:
    """Where each of the parts begins, and where the last ends, so that they differ by one sample at most."""
    hashes = sorted(number_of("share", member.name) for member in members)
    inner = [hashes[len(hashes) * part // parts] if hashes else _END for part in range(1, parts)]
    return [0, *inner, _END]


def share_of(members: Sequence[Member], bounds: Sequence[int], where: Place) -> Share:
    """This worker's even part of its rank's part."""
    of_rank = Share(bounds[where.rank], bounds[where.rank + 1])
    inner = even_bounds(of_rank.of(members), where.workers)[1:-1]
    ends = [of_rank.low, *inner, of_rank.high]
    return Share(ends[where.worker], ends[where.worker + 1])


def ordered(members: Sequence[Member], seed: int | None, epoch: int) -> list[tuple[int, int, Member]]:
    """(key, tag, sample) in the order in which samples are handed out. seed None: what was committed last comes first."""

    def key(member: Member) -> int:
        return _END - member.committed_unix_ns if seed is None else number_of("turn", seed, epoch, member.name)

    return sorted(((key(member), number_of("tag", member.name), member) for member in members), key=lambda one: one[:2])
