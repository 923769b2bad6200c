"""A torch dataset over stored samples. Resumable: its state says what the trainer received, not what was fetched ahead."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slotstream.client.client import Client, connect
from slotstream.client.info import SampleInfo, SampleState, unix_ns
from slotstream.client.tensors import Sample, require_torch
from slotstream.wire.errors import ConfigError, SampleNotFound
from slotstream.wire.hashing import xxh3

require_torch()

from torch.utils.data import IterableDataset, get_worker_info  # noqa: E402  (after the sentence that names the extra)

STATE_VERSION = 1


class SampleDataset(IterableDataset[Sample]):
    """Committed samples, newest first; one pass is what is committed when the pass comes by.

    Samples that arrive behind the cursor wait for the next pass, and ones deleted meanwhile are left out, so a pass neither
    repeats nor shifts. Each sample belongs to one shard, chosen by its id alone: `rank` of `world_size` trainers, times
    the DataLoader's workers. Every worker process opens a connection of its own.

    `state_dict()` is small and counts what left the iterator. In a loader without workers, and in torchdata's
    StatefulDataLoader with any, that is what the trainer received. A plain DataLoader with workers fetches ahead in
    processes that never report back: there `state_dict()` raises rather than lie.
    """

    def __init__(
        self,
        client_or_address: Client | str,
        *,
        namespace: str | None = None,
        model: str | None = None,
        tags: Mapping[str, str] | None = None,
        created_from: datetime.datetime | int | None = None,
        created_until: datetime.datetime | int | None = None,
        layers: Sequence[int | str] | None = None,
        rank: int = 0,
        world_size: int = 1,
        ack: bool = False,
    ) -> None:
        """Filters as in `Client.list`, `layers` as in `Client.get`. `ack`: ack each sample once the next one is asked for.

        Raises ConfigError for a rank outside the world size.

        A client that is passed stays the caller's to close; with an address the dataset opens its own when first iterated,
        with the token and certificates that the environment names (see `connect`).
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not one of world_size {world_size}")
        self._address = client_or_address if isinstance(client_or_address, str) else client_or_address.address
        self._client = None if isinstance(client_or_address, str) else client_or_address
        # Worker processes connect on their own, and show the server the same token and certificate.
        self._access = (
            {} if self._client is None else {**dataclasses.asdict(self._client.access), "data_dir": self._client.data_dir}
        )
        self._client_pid = os.getpid()
        self._filters: dict[str, Any] = {"namespace": namespace, "model": model, "tags": dict(tags or {})}
        self._created_from_ns, self._created_until_ns = unix_ns(created_from), unix_ns(created_until)
        self._layers = None if layers is None else tuple(layers)
        self._rank, self._world_size = rank, world_size
        self._ack = ack
        # Shared with worker processes, forked or spawned: tells state_dict() that it is not the one who knows.
        self._iterated_by_workers = require_torch().zeros(1, dtype=require_torch().uint8).share_memory_()
        self._received = 0
        self._cursor: _Cursor | None = None
        self._resuming = False

    def __iter__(self) -> Iterator[Sample]:
        """A new pass; after `load_state_dict`, the rest of that one. Raises what `Client.list` and `Client.get` raise."""
        worker = get_worker_info()
        if worker is not None:
            self._iterated_by_workers[0] = 1
        if not self._resuming:
            self._received, self._cursor = 0, None
        self._resuming = False
        shard, shards = self._shard()
        client = self._connected()
        for info in self._listed(client):
            if xxh3(f"{info.namespace}/{info.sample_id}".encode()) % shards != shard:
                continue
            try:
                sample = client.get(info.sample_id, namespace=info.namespace, layers=self._layers, wait_s=0)
            except SampleNotFound:
                continue  # Deleted since it was listed.
            self._received += 1
            self._cursor = _Cursor.after(self._cursor, info)
            yield sample
            if self._ack:  # Only now: who asks for the next sample has got this one.
                with contextlib.suppress(SampleNotFound):
                    client.ack(info.sample_id, namespace=info.namespace)

    def state_dict(self) -> dict[str, Any]:
        """Where this pass is, as plain values. Raises RuntimeError where only the worker processes know (see the class)."""
        if get_worker_info() is None and self._iterated_by_workers[0]:
            raise RuntimeError(
                "worker processes read this dataset, so its state is theirs: "
                "use torchdata's StatefulDataLoader and its state_dict(), or num_workers=0"
            )
        shard, shards = self._shard()
        cursor = None if self._cursor is None else [self._cursor.created_unix_ns, *sorted(self._cursor.names)]
        return {"version": STATE_VERSION, "received": self._received, "cursor": cursor, "shard": shard, "shards": shards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on where `state` was taken. Raises ValueError for a state of another kind or sharding."""
        try:
            version, received, cursor = state["version"], int(state["received"]), state["cursor"]
            shard = int(state["shard"]), int(state["shards"])
            restored = None if cursor is None else _Cursor(int(cursor[0]), frozenset(map(str, cursor[1:])))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError("this is not the state of a SampleDataset") from error
        if version != STATE_VERSION:
            raise ValueError(f"this state is of version {version}, and this SampleDataset reads version {STATE_VERSION}")
        if shard != self._shard():
            raise ValueError(f"this state is of shard {shard[0]} of {shard[1]}, not of {self._shard()}: keep ranks and workers")
        self._received, self._cursor, self._resuming = received, restored, True

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the connection, which no other process can use."""
        return {**self.__dict__, "_client": None}

    def _shard(self) -> tuple[int, int]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self._rank * workers + number, self._world_size * workers

    def _connected(self) -> Client:
        if self._client is None or self._client_pid != os.getpid():
            self._client, self._client_pid = connect(self._address, **self._access), os.getpid()
        return self._client

    def _listed(self, client: Client) -> Iterator[SampleInfo]:
        cursor = self._cursor
        until_ns = self._created_until_ns if cursor is None else cursor.created_unix_ns + 1
        listed = client.list(
            **self._filters, state=SampleState.COMMITTED, created_from=self._created_from_ns, created_until=until_ns
        )
        return (info for info in listed if cursor is None or not cursor.has_passed(info))


class _Cursor:
    """The creation time of the last sample received, and which samples of that very moment were."""

    def __init__(self, created_unix_ns: int, names: frozenset[str]) -> None:
        self.created_unix_ns, self.names = created_unix_ns, names

    @classmethod
    def after(cls, cursor: _Cursor | None, info: SampleInfo) -> _Cursor:
        earlier = cursor.names if cursor is not None and cursor.created_unix_ns == info.created_unix_ns else frozenset()
        return cls(info.created_unix_ns, earlier | {_name(info)})

    def has_passed(self, info: SampleInfo) -> bool:
        return info.created_unix_ns == self.created_unix_ns and _name(info) in self.names


def _name(info: SampleInfo) -> str:
    return f"{info.namespace}/{info.sample_id}"
