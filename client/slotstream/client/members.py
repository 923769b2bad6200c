"""Which samples an epoch is made of: what was committed at a moment, with the layers that are wanted."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slotstream.client.client import Client
from slotstream.client.epoch import Member
from slotstream.client.info import SampleInfo, SampleState, unix_ns
from slotstream.wire.errors import BadLayers, ConfigError, SampleNotFound
from slotstream.wire.names import FINAL, LAYER_NAMES_KEY, PAGE_SIZE_MAX

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Filters:
    """As in `Client.list`; None and 0: no such filter."""

    namespace: str | None = None
    model: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    created_from_ns: int = 0
    created_until_ns: int = 0

    @classmethod
    def of(
        cls,
        namespace: str | None,
        model: str | None,
        tags: Mapping[str, str] | None,
        created_from: datetime.datetime | int | None,
        created_until: datetime.datetime | int | None,
    ) -> Filters:
        """Raises BadParams for a datetime without a timezone."""
        return cls(namespace, model, dict(tags or {}), unix_ns(created_from), unix_ns(created_until))

    def listed(
        self, client: Client, until: int, *, created_from: int = 0, state: SampleState | None = SampleState.COMMITTED
    ) -> Iterator[SampleInfo]:
        """What was created by `until` (Unix ns), newest first. Raises what `Client.list` raises."""
        ends = until + 1 if not self.created_until_ns else min(until + 1, self.created_until_ns)
        return client.list(
            namespace=self.namespace,
            model=self.model,
            state=state,
            tags=self.tags,
            created_from=max(self.created_from_ns, created_from),
            created_until=ends,
            page_size=PAGE_SIZE_MAX,
        )


class Selection:
    """The layers wanted of each sample, by the ids that it has for them."""

    def __init__(self, layers: Sequence[int | str] | None, *, keep_lacking: bool = False) -> None:
        """None: all that a sample has, in its file's order. `keep_lacking`: one that lacks a layer is a Member without any."""
        self._keep_lacking = keep_lacking
        self.layers = None if layers is None else tuple(layers)
        self._known: dict[tuple[tuple[int, ...], str | None], tuple[int, ...]] = {}
        self._hidden: tuple[int, str] | None = None

    def of(self, info: SampleInfo) -> Member:
        """Raises BadLayers, in a sentence, where the sample lacks a layer, or where its rows have another size than others."""
        name = f"{info.namespace}/{info.sample_id}"
        try:
            ids = self._ids(info, name)
        except BadLayers:
            if not self._keep_lacking:
                raise
            return Member(info.namespace, info.sample_id, info.num_tokens, info.committed_unix_ns or 0, ())
        if self.layers is not None:
            if self._hidden is None:
                self._hidden = info.hidden_size, name
            elif self._hidden[0] != info.hidden_size:
                raise BadLayers(
                    f"rows of {name} have {info.hidden_size} elements, and those of {self._hidden[1]} {self._hidden[0]}: "
                    "choose the samples of one model, by model or tags"
                )
        return Member(info.namespace, info.sample_id, info.num_tokens, info.committed_unix_ns or 0, ids)

    def _ids(self, info: SampleInfo, name: str) -> tuple[int, ...]:
        if self.layers is None:
            return info.layer_ids
        kind = info.layer_ids, info.metadata.get(LAYER_NAMES_KEY)
        if kind not in self._known:
            has_final = info.layer_names[-1:] == (FINAL,)
            ids = tuple(info.layer_ids[-1] if layer == FINAL and has_final else layer for layer in self.layers)
            lacking = [layer for layer in ids if layer not in info.layer_ids]
            if lacking:
                raise BadLayers(f"sample {name} has no layer {lacking[0]!r}: its layers are {', '.join(info.layer_names)}")
            self._known[kind] = tuple(int(layer) for layer in ids)
        return self._known[kind]


def members_at(
    client: Client, filters: Filters, selection: Selection, as_of: int | None, wait_s: float
) -> tuple[int, list[Member]]:
    """The moment, and what was committed then and is still there. as_of None: the moment now.

    Waits up to `wait_s` for a first sample. Raises SampleNotFound where there is none, which names the namespaces that hold
    samples; ConfigError for a moment that is not over yet; BadLayers, and what `Client.list` raises.
    """
    ends = time.monotonic() + wait_s
    while True:
        now = client.moment(namespace=filters.namespace)
        if as_of is not None and as_of > now:
            raise ConfigError(f"as_of {as_of} is not over yet: the server settled what is committed up to {now}")
        until = now if as_of is None else as_of
        infos = filters.listed(client, until)
        found = [selection.of(info) for info in infos if 0 < (info.committed_unix_ns or 0) <= until]
        if found:
            return until, found
        if (left := ends - time.monotonic()) <= 0 or as_of is not None:
            raise SampleNotFound(nothing_there(client, filters))
        client.pause(min(_POLL_S, left))


def nothing_there(client: Client, filters: Filters) -> str:
    """Why there is no sample, in one sentence."""
    used = sorted(space.namespace for space in client.usage().namespaces if space.samples)
    where = "in any namespace that you may read" if filters.namespace is None else f"in namespace {filters.namespace!r}"
    narrowed = any((filters.model, filters.tags, filters.created_from_ns, filters.created_until_ns))
    what = "no committed sample fits the filters" if narrowed else "there is no committed sample"
    there = f"; these hold samples: {', '.join(used)}" if used else ""
    return f"{what} {where}{there}"
