"""Rows of many samples as shuffled batches: `for batch in rows(18, 4096, namespace="train"): ...`."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slotstream.client.arrays import Arrays, NumpyArrays, TorchArrays
from slotstream.client.batches import Options
from slotstream.client.client import Client
from slotstream.client.connection import Connection
from slotstream.client.info import unix_ns
from slotstream.client.members import Filters
from slotstream.client.ranks import checked_rank
from slotstream.client.row_stream import RowStream
from slotstream.wire.errors import ConfigError


def rows(
    layers: int | str | Sequence[int | str],
    batch: int,
    *,
    client: Client | str | None = None,
    namespace: str | None = None,
    model: str | None = None,
    tags: Mapping[str, str] | None = None,
    created_from: datetime.datetime | int | None = None,
    created_until: datetime.datetime | int | None = None,
    seed: int = 0,
    buffer_rows: int = 16384,
    drop_last: bool = False,
    as_of: datetime.datetime | int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    follow: bool = False,
    dtype: Any = None,
    device: Any = None,
    numpy: bool = False,
    columns: Sequence[str] = (),
    wait_s: float = 0.0,
    retry_s: float = 60.0,
) -> RowStream:
    """A stream of shuffled batches of rows of stored samples, which can be iterated once an epoch and resumed exactly.

    layers: one layer id, or "final": a batch is [batch, hidden]. A list of them: a batch is a dict, layer -> [batch, hidden].
    batch: rows; the last batch of an epoch may hold fewer. client: a client, or a server's address; None: $SLOTSTREAM_SERVER.
    namespace, model, tags, created_from, created_until: which samples, as in `Client.list`.
    seed: of the order. The order of an epoch depends on it, on the epoch's number (`set_epoch`) and on the samples' ids alone.
    buffer_rows: rows of the layers wanted that are held at a time, about, by each worker; chance mixes so many.
    drop_last: True: all ranks get equally many batches, each of them full. False: each row comes once.
    as_of: an epoch is what was committed at this moment of the server's clock (Unix ns, or a datetime with a timezone); None:
    now. Several ranks must be given the same (see `Client.moment`), unless torch.distributed is initialised: then rank 0 says.
    rank, world_size: which trainer of how many this is; None: torch.distributed's, else the only one.
    follow: no epochs: batches of what is stored (with as_of: of what commits after it), then of all that commits, without end.
    dtype, device: torch's; None: the stored dtype, the CPU. numpy: float32 arrays, without torch.
    columns: what comes beside the layers, under these names, in a dict: "token_ids" (int64 [batch]), "positions" (int64
    [batch], the row's number in its sample), "loss_mask" (bool [batch], of samples that were stored with one), "sample_ids" (a
    list of "namespace/sample_id").
    wait_s: how long to wait for a first sample. retry_s: how long each read is tried again while the server is away.

    It is torch's IterableDataset where torch is used: `DataLoader(stream, batch_size=None, num_workers=4)`, and torchdata's
    StatefulDataLoader for a state with workers. Raises ConfigError; SampleNotFound where no sample fits; BadLayers where one
    lacks a layer; ImportError where torch (or numpy) is missing; what `connect` and `Client.list` raise.
    """
    options = Options(
        layers=(layers,) if isinstance(layers, int | str) else tuple(layers),
        is_one=isinstance(layers, int | str),
        batch=batch,
        filters=Filters.of(namespace, model, tags, created_from, created_until),
        seed=seed,
        buffer_rows=buffer_rows,
        drop_last=drop_last,
        as_of=unix_ns(as_of) or None,
        follow=follow,
        columns=tuple(columns),
        wait_s=wait_s,
        retry_s=retry_s,
    )
    arrays = _arrays(numpy, dtype, device)
    kind = RowStream
    if not numpy or sys.modules.get("torch") is not None:
        from slotstream.client.torch_rows import TorchRowStream

        kind = TorchRowStream
    return kind(Connection(client), options, arrays, *checked_rank(rank, world_size))


def _arrays(numpy: bool, dtype: Any, device: Any) -> Arrays:
    if not numpy:
        return TorchArrays(dtype, device)
    if dtype is not None or device is not None:
        raise ConfigError("numpy's rows are float32 in memory: leave dtype and device out")
    return NumpyArrays()
