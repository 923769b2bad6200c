"""A slotstream connector whose rows are read into staging and dropped there: what capture costs without sending."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slotstream.connector import worker_side
from slotstream.connector.facade import SlotStreamConnector
from slotstream.connector.sending.sender import in_thread
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.transport.base import Acked, Committed, Failed, LinkUp, RowChunk, SinkEvent
from slotstream.v1 import ingest_pb2


class DroppingSink:
    """Takes every chunk at once, and commits every sample."""

    def __init__(self) -> None:
        self._on_event: Callable[[SinkEvent], None] = lambda event: None

    def use_staging(self, memory: memoryview, slot_bytes: int) -> None:
        return

    def start(self, on_event: Callable[[SinkEvent], None]) -> None:
        self._on_event = on_event
        on_event(LinkUp("dropped"))

    def open_sample(self, request: ingest_pb2.OpenSample) -> None:
        return

    def submit(self, chunk: RowChunk) -> None:
        self._on_event(Acked((chunk.chunk,)))

    def commit(self, request: ingest_pb2.CommitSample) -> None:
        self._on_event(Committed(request.sample, duplicate=False))

    def abort(self, request: ingest_pb2.AbortSample) -> None:
        self._on_event(Failed(request.sample, request.code, request.message))

    def report(self, report: ingest_pb2.EngineReport) -> None:
        return

    def check_deadlines(self) -> None:
        return

    def reset(self) -> None:
        return

    def close(self, timeout_s: float) -> None:
        self._on_event = lambda event: None


def _dropping(config: ConnectorConfig, hello: ingest_pb2.Hello) -> Any:
    return in_thread(config, [DroppingSink()])


class DroppingConnector(SlotStreamConnector):
    """See the module."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        vars(worker_side)["sender_for"] = _dropping  # In this worker alone.
        super().register_kv_caches(kv_caches)
