"""The connector's metrics: a table with one sentence each, and thread-safe counts of what happened since the last look."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

CODE_SEPARATOR = ":"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. In Prometheus `slotstream_connector_<name>`, counters with `_total`; `label` is one that it adds."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    label: Literal["", "code", "reason"] = ""


METRICS = (
    Metric("rows", "counter", "Rows read for the server; a row is every captured layer of one token."),
    Metric("bytes", "counter", "Bytes of rows read for the server; those sent again count once."),
    Metric("chunks", "counter", "Chunks of rows read for the server."),
    Metric("gathers", "counter", "Reads of the hidden-state cache; a step that captures nothing makes none."),
    Metric("zero_rows", "counter", "Rows that held only zeros, which no healthy model writes."),
    Metric("nonfinite_rows", "counter", "Rows that held a NaN or an infinity."),
    Metric("samples_opened", "counter", "Samples begun, or taken over from an earlier engine's spool."),
    Metric("samples_committed", "counter", "Samples that the server reported durable."),
    Metric("samples_failed", "counter", "Samples that were not stored, by stable error code.", label="code"),
    Metric("samples_replayed", "counter", "Times that a sample was sent again: after an outage, or once the server had room."),
    Metric("failures_reported", "counter", "Samples that failed while the server was away, and that it was told of since."),
    Metric("reports_dropped", "counter", "Failures that the server will never hear of: more than 65536 waited to be told."),
    Metric("spooled_bytes", "counter", "Bytes written to the spool."),
    Metric("spool_errors", "counter", "Operations of the spool that its disk refused."),
    Metric("stall_seconds", "counter", "Time that engine steps waited for room in staging."),
    Metric("nixl_fallbacks", "counter", "Times that NIXL failed, and chunks went over gRPC for a while."),
    Metric("sender_restarts", "counter", "Times that the sender process ended by itself and was started again."),
    Metric("hook_faults", "counter", "Exceptions caught at the connector's hooks."),
    Metric("samples_in_flight", "gauge", "Samples begun and neither committed nor failed."),
    Metric("staging_bytes_in_use", "gauge", "Staging memory that holds rows on their way."),
    Metric("staging_bytes_kept", "gauge", "Staging memory that holds rows for a replay until somebody needs the room."),
    Metric("staging_bytes_limit", "gauge", "Staging memory allocated."),
    Metric("row_pool_pages_in_use", "gauge", "Pages of the row pool that hold rows, or are about to."),
    Metric("row_pool_pages_free", "gauge", "Pages of the row pool that hold none; ROW_POOL_FULL counts what found too few."),
    Metric("row_pool_bytes", "gauge", "Device memory of the row pool's rows; 0 without the option layers."),
    Metric("spool_bytes_in_use", "gauge", "Bytes of files in the spool."),
    Metric("link_up", "gauge", "1 while a stream to the server is up."),
    Metric("streams_up", "gauge", "Streams to the server that are up, of as many as the option streams says."),
    Metric(
        "capture_off", "gauge", "1 while nothing new is captured, or cannot be stored, for this reason; else 0.", label="reason"
    ),
)
# Why capture is off: the reasons that each part of the connector knows.
SCHEDULER_REASONS = ("SERVER_UNAVAILABLE", "SERVER_DRAINING", "SCHEDULER_FAULTS")
WORKER_REASONS = ("WORKER_FAULTS", "ROWS_NOT_WRITTEN")
SENDER_REASONS = ("UNAUTHENTICATED",)
REASONS = (*SCHEDULER_REASONS, *WORKER_REASONS, *SENDER_REASONS)
_COUNTERS = {m.name for m in METRICS if m.kind == "counter"}


def capture_off(reasons: Iterable[str], found: str | None) -> dict[str, float]:
    """The gauge's values for `reasons`: 1 for the one that was found."""
    return {f"capture_off{CODE_SEPARATOR}{reason}": float(reason == found) for reason in reasons}


# The engine core's half has the row pool's, the sender all others; of `capture_off` each part has its own reasons.
SENDER_GAUGES = (
    *(m.name for m in METRICS if m.kind == "gauge" and not (m.label or m.name.startswith("row_pool_"))),
    *capture_off(SENDER_REASONS, None),
)


class Counters:
    """Counts since the last `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1, *, code: str = "") -> None:
        """Count `amount` of metric `name`, under `code` where the metric has one."""
        assert name in _COUNTERS, name
        key = f"{name}{CODE_SEPARATOR}{code}" if code else name
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + amount

    def merge(self, counts: Mapping[str, float]) -> None:
        """Add what another one's `take` returned."""
        with self._lock:
            merge(self._counts, counts)

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._counts)

    def take(self) -> dict[str, float]:
        """The counts since the last call, by `name` or `name:code`; only what changed."""
        if not self._counts:
            return {}
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken


def merge(into: dict[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Add `more` to `into`: counters add up, a gauge takes its newest value."""
    for key, value in more.items():
        if key.partition(CODE_SEPARATOR)[0] in _COUNTERS:
            into[key] = into.get(key, 0) + value
        else:
            into[key] = value
    return into
