"""The connector's metrics in the forms that vLLM takes: stats that cross its processes, Prometheus metrics, a log line."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from slotstream.connector.counters import CODE_SEPARATOR, METRICS, REASONS, Metric, merge


@dataclass
class SlotStreamStats(KVConnectorStats):
    """Counts by `name` or `name:code` since the last report, and gauges (see `counters.METRICS`)."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> SlotStreamStats:
        merge(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """The one-line summary of vLLM's periodic log."""
        failed = sum(v for k, v in self.data.items() if k.startswith("samples_failed"))
        return {
            "slotstream samples committed": int(self.data.get("samples_committed", 0)),
            "failed": int(failed),
            "in flight": int(self.data.get("samples_in_flight", 0)),
            "rows": int(self.data.get("rows", 0)),
            "MiB": round(self.data.get("bytes", 0) / (1 << 20), 1),
            "stalled s": round(self.data.get("stall_seconds", 0.0), 3),
        }


@functools.cache
def _collector(kind: Any, metric: Metric, labels: tuple[str, ...]) -> Any:
    """The one of its name in this process: Prometheus takes no second one, and a second engine counts in the first's."""
    # With several API servers (`vllm serve` starts one a data-parallel rank) each keeps the last gauges that it was told:
    # the newest is the true one.
    more = {"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}
    return kind(name=f"slotstream_connector_{metric.name}", documentation=metric.help, labelnames=list(labels), **more)


class SlotStreamPromMetrics(KVConnectorPromMetrics):
    """`slotstream_connector_*` in vLLM's own /metrics, with its labels, and `code` or `reason` where a metric has one."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        classes = {"counter": metric_types[Counter], "gauge": metric_types[Gauge]}
        self._metrics: dict[str, Any] = {}
        self._labelled = {m.name for m in METRICS if m.label}
        self._kinds = {m.name: m.kind for m in METRICS}
        for metric in METRICS:
            labels = [*labelnames, metric.label] if metric.label else labelnames
            self._metrics[metric.name] = _collector(classes[metric.kind], metric, tuple(labels))
        for metric in METRICS:
            if metric.label == "code":
                continue
            for values in per_engine_labelvalues.values():  # So that every series is there, at zero, from the start.
                for reason in REASONS if metric.label else ("",):
                    child = self._metrics[metric.name].labels(*values, *([reason] if reason else []))
                    if metric.kind == "gauge":
                        child.set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, _, code = key.partition(CODE_SEPARATOR)
            if name not in self._metrics:
                continue
            child = self._metrics[name].labels(*values, *([code] if name in self._labelled else []))
            if self._kinds[name] == "counter":
                child.inc(amount)
            else:
                child.set(amount)
