"""A torch dataset over stored samples. Resumable: its state says what the trainer received, not what was fetched ahead."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slotstream.client.bad_samples import BadSamples
from slotstream.client.client import Client
from slotstream.client.collating import collate
from slotstream.client.connection import Connection
from slotstream.client.info import SampleInfo, SampleState, unix_ns
from slotstream.client.members import Filters, nothing_there
from slotstream.client.planned_samples import PlannedSamples
from slotstream.client.ranks import checked_rank, place, worker_info
from slotstream.client.tensors import Sample, require_torch
from slotstream.wire.errors import SampleNotFound
from slotstream.wire.hashing import xxh3

require_torch()

from torch.utils.data import IterableDataset  # noqa: E402  (after the sentence that names the extra)

STATE_VERSION = 1
_POLL_S = 0.5


class SampleDataset(IterableDataset[Sample]):
    """Committed samples, newest first; one pass is what is committed when the pass comes by.

    Samples that arrive behind the cursor wait for the next pass, and ones deleted meanwhile are left out, so a pass neither
    repeats nor shifts. Each sample belongs to one shard, chosen by its id alone: `rank` of `world_size` trainers, times
    the DataLoader's workers. Every worker process opens a connection of its own.

    With `shuffle`, or an `as_of`, each pass is an epoch of what was committed at one moment instead, and shards differ by one
    sample at most. The order is that of seed, epoch and ids (with `as_of` alone: what committed last comes first).

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
        rank: int | None = None,
        world_size: int | None = None,
        ack: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        as_of: datetime.datetime | int | None = None,
        wait_s: float = 0.0,
        on_bad: str = "raise",
        bad_max: int = 100,
    ) -> None:
        """Filters as in `Client.list`, `layers` as in `Client.get`. `ack`: ack each sample once the next one is asked for.

        rank, world_size: which trainer of how many; None: torch.distributed's, else the only one.
        as_of: as in `slotstream.client.rows`; with `shuffle`, several ranks need it, unless torch.distributed is initialised.
        wait_s: how long a pass, or with `shuffle` or `as_of` this call, waits for a first sample.

        on_bad: what is done about a bad sample: a damaged one, one of a format that is not known here, or one without a layer
        that was asked for. "raise" ends the pass. "skip" leaves it out, names it once in the log, and counts it in
        `state_dict()["skipped"]`. bad_max: so many in a row end the pass all the same, as does a pass of bad ones only.
        What may pass, as a server that is away, is always raised.

        Raises ConfigError for a rank outside the world size, and for ranks without one moment. With `shuffle` or `as_of` it
        asks the server at once, and raises SampleNotFound where no sample fits.

        A client that is passed stays the caller's to close; with an address the dataset opens its own when first iterated,
        with the token and certificates that the environment names (see `connect`).
        """
        self._rank, self._world_size = checked_rank(rank, world_size)
        self._connection = Connection(client_or_address)
        self._filters = Filters.of(namespace, model, tags, created_from, created_until)
        self._layers = None if layers is None else tuple(layers)
        self._ack = ack
        self._wait_s = wait_s
        self._bad = BadSamples(on_bad, bad_max)
        self._skipped = 0
        # Shared with worker processes, forked or spawned: the epoch, and who knows where the pass is.
        torch = require_torch()
        self._shared = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._received = 0
        self._cursor: _Cursor | None = None
        self._resuming = False
        self._plan: PlannedSamples | None = None
        if shuffle or as_of is not None:
            ranks, moment = (self._rank, self._world_size), unix_ns(as_of) or None
            order = seed if shuffle else None
            self._plan = PlannedSamples(
                self._connection.client(), self._filters, self._layers, order, moment, ranks, wait_s, self._bad
            )
            self._connection.close()

    collate = staticmethod(collate)

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch, on which the order of `shuffle` depends. Workers of a loader see it, too."""
        if not 0 <= epoch < 1 << 62:
            raise ValueError(f"epoch {epoch} is not 0 or more")
        self._shared[0] = epoch

    @property
    def as_of(self) -> int | None:
        """The moment whose samples an epoch has, in Unix ns; None without `shuffle` and `as_of`."""
        return None if self._plan is None else self._plan.as_of

    @property
    def deleted_samples(self) -> int:
        """With `shuffle` or `as_of`: samples of this pass and process that were deleted before they were read."""
        return 0 if self._plan is None else self._plan.deleted

    @property
    def skipped_samples(self) -> int:
        """With `on_bad="skip"`: samples of this pass and process that nobody could have used."""
        return self._skipped if self._plan is None else self._plan.skipped

    def __iter__(self) -> Iterator[Sample]:
        """A new pass; after `load_state_dict`, the rest of that one. Raises what `Client.list` and `Client.get` raise.

        Raises SampleNotFound where there was no sample at all, unless they are acked, which may delete the last one.
        """
        if worker_info() is not None:
            self._shared[1] = 1
        client = self._connection.client()
        if self._plan is not None:
            samples = self._plan.samples(client, place(self._rank, self._world_size), int(self._shared[0]))
        else:
            samples = self._pass(client)
        for sample in samples:
            yield sample
            if self._ack:  # Only now: who asks for the next sample has got this one.
                with contextlib.suppress(SampleNotFound):
                    client.ack(sample.sample_id, namespace=sample.namespace)

    def _pass(self, client: Client) -> Iterator[Sample]:
        if not self._resuming:
            self._received, self._skipped, self._cursor = 0, 0, None
            if not self._ack:
                self._wait_for_one(client)
        self._resuming = False
        shard, shards = self._shard()
        asked: deque[SampleInfo] = deque()  # And not answered yet.

        def mine() -> Iterator[SampleInfo]:
            for info in self._listed(client):
                if xxh3(_name(info).encode()) % shards == shard:
                    asked.append(info)
                    yield info

        self._bad.begin()
        for answer in client.get_many(mine(), layers=self._layers):
            info = asked.popleft()
            if answer.sample is not None:
                self._bad.good()
                self._received += 1
                self._cursor = _Cursor.after(self._cursor, int(answer.sample.metadata["created_unix_ns"]), _name(info))
                yield answer.sample
            elif not isinstance(answer.error, SampleNotFound):  # Deleted since it was listed.
                assert answer.error is not None
                if not self._bad.skip(_name(info), answer.error):
                    raise answer.error
                self._skipped += 1
                self._cursor = _Cursor.after(self._cursor, info.created_unix_ns, _name(info))
        self._bad.end(self._received)

    def _wait_for_one(self, client: Client) -> None:
        ends = time.monotonic() + self._wait_s
        while next(self._listed(client), None) is None:
            if (left := ends - time.monotonic()) <= 0:
                raise SampleNotFound(nothing_there(client, self._filters))
            client.pause(min(_POLL_S, left))

    def state_dict(self) -> dict[str, Any]:
        """Where this pass is, as plain values. Raises RuntimeError where only the worker processes know (see the class)."""
        if worker_info() is None and self._shared[1]:
            raise RuntimeError(
                "worker processes read this dataset, so its state is theirs: "
                "use torchdata's StatefulDataLoader and its state_dict(), or num_workers=0"
            )
        shard, shards = self._shard()
        if self._plan is not None:
            planned = self._plan.state(place(self._rank, self._world_size), int(self._shared[0]))
            return {"version": STATE_VERSION, "shard": shard, "shards": shards, **planned}
        cursor = None if self._cursor is None else [self._cursor.created_unix_ns, *sorted(self._cursor.names)]
        counts = {"received": self._received, "skipped": self._skipped}
        return {"version": STATE_VERSION, **counts, "cursor": cursor, "shard": shard, "shards": shards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on where `state` was taken. Raises ValueError for a state of another kind or sharding."""
        try:
            version, planned = state["version"], "as_of" in state
            shard = int(state["shard"]), int(state["shards"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("this is not the state of a SampleDataset") from error
        if version != STATE_VERSION:
            raise ValueError(f"this state is of version {version}, and this SampleDataset reads version {STATE_VERSION}")
        if shard != self._shard():
            raise ValueError(f"this state is of shard {shard[0]} of {shard[1]}, not of {self._shard()}: keep ranks and workers")
        if planned != (self._plan is not None):
            raise ValueError("one has shuffle or as_of, and one has not: this state, and this SampleDataset")
        if self._plan is not None:
            self._shared[0] = self._plan.resume(state)
            return
        try:
            received, skipped, cursor = int(state["received"]), int(state.get("skipped", 0)), state["cursor"]
            restored = None if cursor is None else _Cursor(int(cursor[0]), frozenset(map(str, cursor[1:])))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError("this is not the state of a SampleDataset") from error
        self._received, self._skipped, self._cursor, self._resuming = received, skipped, restored, True

    def _shard(self) -> tuple[int, int]:
        where = place(self._rank, self._world_size)
        return where.shard, where.shards

    def _listed(self, client: Client) -> Iterator[SampleInfo]:
        cursor, filters = self._cursor, self._filters
        listed = client.list(
            namespace=filters.namespace,
            model=filters.model,
            tags=filters.tags,
            state=SampleState.COMMITTED,
            created_from=filters.created_from_ns,
            created_until=filters.created_until_ns if cursor is None else cursor.created_unix_ns + 1,
        )
        return (info for info in listed if cursor is None or not cursor.has_passed(info))


class _Cursor:
    """The creation time of the last sample received, and which samples of that very moment were."""

    def __init__(self, created_unix_ns: int, names: frozenset[str]) -> None:
        self.created_unix_ns, self.names = created_unix_ns, names

    @classmethod
    def after(cls, cursor: _Cursor | None, created_unix_ns: int, name: str) -> _Cursor:
        earlier = cursor.names if cursor is not None and cursor.created_unix_ns == created_unix_ns else frozenset()
        return cls(created_unix_ns, earlier | {name})

    def has_passed(self, info: SampleInfo) -> bool:
        return info.created_unix_ns == self.created_unix_ns and _name(info) in self.names


def _name(one: SampleInfo) -> str:
    return f"{one.namespace}/{one.sample_id}"
