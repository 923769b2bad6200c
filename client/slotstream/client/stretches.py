"""Stretches of samples, read one after the other: what is gone is told, and a server that is away is asked again."""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from slotstream.client.arrays import Arrays
from slotstream.client.client import Client
from slotstream.client.epoch import Member, Stretch
from slotstream.client.info import SampleState
from slotstream.client.reading import RowReader
from slotstream.v1 import samples_pb2
from slotstream.wire.columns import LOSS_MASK, further_columns
from slotstream.wire.errors import BadParams, SampleNotFound, SlotStreamError

T = TypeVar("T")
_PAUSE_S, _PAUSE_S_MAX = 0.1, 2.0


@dataclass(slots=True, eq=False)
class Held:
    """Rows of a stretch in memory."""

    stretch: Stretch
    rows: Any  # [rows, layers, hidden]
    token_ids: array[int]
    columns: Mapping[str, bytes]  # What the sample has beside these, by name.
    left: int = 0  # Rows that have not been handed out.


def _loss_mask(held: Held, row: int) -> bool:
    mask = held.columns.get(LOSS_MASK)
    if mask is None:
        raise BadParams(f"sample {held.stretch.member.name} was stored without a loss mask: leave loss_mask out of the columns")
    return mask[row] != 0


# What a batch may hold beside the layers -> its value for a row, counted from the first of its stretch.
COLUMNS: dict[str, Callable[[Held, int], Any]] = {
    "token_ids": lambda held, row: held.token_ids[row],
    "positions": lambda held, row: held.stretch.start + row,
    LOSS_MASK: _loss_mask,
    "sample_ids": lambda held, row: held.stretch.member.name,
}


def read_stretches(
    client: Client, wanted: Iterable[tuple[T, Stretch]], arrays: Arrays, retry_s: float
) -> Iterator[tuple[T, Held | None]]:
    """Each stretch's rows, in the order asked; None for one whose sample is gone, or is another by now.

    Raises what `Client.read` raises of samples that are there; a failure that may pass, once `retry_s` are over.
    """
    reads = (((key, stretch), _read_of(stretch)) for key, stretch in wanted)

    def receive(reader: RowReader) -> tuple[int | None, Any, array[int], Mapping[str, bytes]]:
        return reader.info.committed_unix_ns, arrays.receive(reader), reader.token_ids, reader.columns

    for (key, stretch), answer in client.many(wait_s=0.0, retry_s=retry_s).answers(reads, receive):
        if isinstance(answer, SlotStreamError):
            if not patiently(functools.partial(is_gone, client, stretch.member), retry_s, client.pause):
                raise answer
            yield key, None
        else:
            committed, rows, token_ids, columns = answer
            is_same = committed == stretch.member.committed_unix_ns
            yield key, Held(stretch, rows, token_ids, columns) if is_same else None


def _read_of(stretch: Stretch) -> samples_pb2.ReadRequest:
    member = stretch.member
    return samples_pb2.ReadRequest(
        namespace=member.namespace,
        sample_id=member.sample_id,
        start=stretch.start,
        stop=stretch.stop,
        layer_ids=member.layers,
        columns=further_columns(),
    )


def patiently(ask: Callable[[], T], retry_s: float, pause: Callable[[float], None]) -> T:
    """What `ask` says, asked again for so long where a failure may pass. `pause` sleeps, for seconds, and may end it all."""
    ends, pause_s = time.monotonic() + retry_s, _PAUSE_S
    while True:
        try:
            return ask()
        except SlotStreamError as error:
            if not error.retryable or time.monotonic() >= ends:
                raise
        pause(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


def is_gone(client: Client, member: Member) -> bool:
    """Whether the sample was deleted, taken out of service, or replaced by another of its name."""
    try:
        info = client.stat(member.sample_id, namespace=member.namespace)
    except SampleNotFound:
        return True
    return info.state is not SampleState.COMMITTED or info.committed_unix_ns != member.committed_unix_ns
