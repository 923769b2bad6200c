"""Samples as speculators takes them: rows [tokens, layers, hidden], the row before the last norm in the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hs_connectors import HiddenStatesTransfer

from slotstream.client import Client, SampleNotFound, StillArriving
from slotstream.client.connection import Connection
from slotstream.client.exports.formats import layers_of
from slotstream.client.exports.manifest import MANIFEST, Entry, load
from slotstream.client.info import SampleInfo
from slotstream.wire.errors import BadParams, DeadlineExceeded, SampleFailed

_FORMAT = "speculators"
_PAUSE_S = 0.05


class SlotStreamTransfer(HiddenStatesTransfer):  # type: ignore[misc]
    """Reads from the server at `address`. It is pickled for loader workers: each of them connects on its own.

    data_path: the folder of an export, whose manifest names the samples by their index; without one they are `hs_<index>` in
    `namespace`. layers: the layers beside the last one, in the draft's order; None: all that a sample has.
    """

    def __init__(
        self,
        address: str | None,
        data_path: str,
        namespace: str,
        layers: tuple[int, ...] | None,
        wait_s: float,
    ) -> None:
        self._connection = Connection(address)
        self._data_path = Path(data_path)
        self._namespace = namespace
        self._layers = layers
        self._wait_s = wait_s
        self._entries: tuple[Entry, ...] | None = None

    def setup(self) -> None:
        """Connects, so that an address that is wrong is told before the first sample."""
        self._connection.client()

    def get_cached(self, file_idx: int) -> dict[str, Any] | None:
        """The sample of this index; None where there is none, or another by now."""
        entry = self._entry(file_idx)
        namespace, name = (self._namespace, f"hs_{file_idx}") if entry is None else (entry.namespace, entry.sample_id)
        try:
            info = self._client.stat(name, namespace=namespace)
            if info.committed_unix_ns is None or (entry and entry.committed_unix_ns != info.committed_unix_ns):
                return None
            return self._read(info, entry.layers if entry else None)
        except (SampleNotFound, SampleFailed):
            return None

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, Any]:
        """The sample that an answer names, once it is stored. Raises what `Client.get` raises."""
        namespace, name = _named(hs_transfer_params.get("handle"))
        # It is waited for here, and what it has is known before its rows are read.
        with self._client.read(name, namespace=namespace, stop=0, wait_s=self._wait_s) as reader:
            return self._read(reader.info, None)

    def delete(self, handle: str) -> None:
        """Deletes the sample of an answer, also one that is still arriving: it waits for that. Raises StillArriving."""
        namespace, name = _named(handle)
        ends = time.monotonic() + self._wait_s
        while True:
            try:
                return self._client.delete(name, namespace=namespace)
            except SampleNotFound:
                return None
            except (StillArriving, DeadlineExceeded):
                if time.monotonic() >= ends:
                    raise
            time.sleep(_PAUSE_S)

    def _read(self, info: SampleInfo, layers: tuple[int, ...] | None) -> dict[str, Any]:
        chosen = layers_of(_FORMAT, info, self._layers) if layers is None or self._layers is not None else layers
        sample = self._client.get(info.sample_id, namespace=info.namespace, layers=chosen, wait_s=0.0)
        return {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids}

    @property
    def _client(self) -> Client:
        return self._connection.client()

    def _entry(self, index: int) -> Entry | None:
        """Of the export's manifest; None where the folder has none. Raises BadParams for an index past its end."""
        if self._entries is None:
            has_one = (self._data_path / MANIFEST).exists()
            found = load(self._data_path) if has_one else None
            self._entries = () if found is None else found.entries
        if not self._entries:
            return None
        if index >= len(self._entries):
            raise BadParams(f"the export in {self._data_path} has {len(self._entries)} samples, and none of index {index}")
        return self._entries[index]


def _named(handle: object) -> tuple[str, str]:
    """Namespace and id of a handle. Raises BadParams."""
    namespace, slash, name = handle.partition("/") if isinstance(handle, str) else ("", "", "")
    if not slash:
        raise BadParams(
            f'the engine names no sample ({handle!r}): start it with the connector option "response_handle": true, as '
            "`python -m slotstream.integrations.speculators launch` does"
        )
    return namespace, name
