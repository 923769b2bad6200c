"""Stretches of samples, read one after the other: what is gone is told, and a server that is away is asked again."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from slotstream.client.arrays import Arrays
from slotstream.client.client import Client
from slotstream.client.epoch import Member, Stretch
from slotstream.client.info import SampleState
from slotstream.wire.errors import SampleNotFound, SlotStreamError

T = TypeVar("T")
_PAUSE_S, _PAUSE_S_MAX = 0.1, 2.0


@dataclass(slots=True, eq=False)
class Held:
    """Rows of a stretch in memory."""

    stretch: Stretch
    rows: Any  # [rows, layers, hidden]
    token_ids: array[int]
    left: int = 0  # Rows that have not been handed out.


# What a batch may hold beside the layers -> its value for a row, counted from the first of its stretch.
COLUMNS: dict[str, Callable[[Held, int], Any]] = {
    "token_ids": lambda held, row: held.token_ids[row],
    "positions": lambda held, row: held.stretch.start + row,
    "sample_ids": lambda held, row: held.stretch.member.name,
}


def read_stretches(
    client: Client, wanted: Iterable[tuple[T, Stretch]], arrays: Arrays, retry_s: float
) -> Iterator[tuple[T, Held | None]]:
    """Each stretch's rows, in the order asked; None for one whose sample is gone, or is another by now.

    Raises what `Client.read` raises of samples that are there; a failure that may pass, once `retry_s` are over.
    """
    for key, stretch in wanted:
        yield key, _read(client, stretch, arrays, retry_s)


def _read(client: Client, stretch: Stretch, arrays: Arrays, retry_s: float) -> Held | None:
    ends, pause_s = time.monotonic() + retry_s, _PAUSE_S
    while True:
        try:
            return _read_once(client, stretch, arrays)
        except SlotStreamError as error:
            try:
                if is_gone(client, stretch.member):
                    return None
                failed = error
            except SlotStreamError as second:
                failed = second
            if not failed.retryable or time.monotonic() >= ends:
                raise failed from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


def _read_once(client: Client, stretch: Stretch, arrays: Arrays) -> Held | None:
    member = stretch.member
    with client.read(
        member.sample_id,
        namespace=member.namespace,
        start=stretch.start,
        stop=stretch.stop,
        layers=member.layers,
        wait_s=0,
    ) as reader:
        if reader.info.committed_unix_ns != member.committed_unix_ns:
            return None
        return Held(stretch, arrays.receive(reader), reader.token_ids)


def is_gone(client: Client, member: Member) -> bool:
    """Whether the sample was deleted, taken out of service, or replaced by another of its name."""
    try:
        info = client.stat(member.sample_id, namespace=member.namespace)
    except SampleNotFound:
        return True
    return info.state is not SampleState.COMMITTED or info.committed_unix_ns != member.committed_unix_ns
