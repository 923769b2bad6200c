"""What the server counts: one table, a sentence each. Labels take values from fixed sets, never from peers, and
no namespace is named: scraping needs no token.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from email.message import Message
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from slotstream.server.http import Answer, serve_pages
from slotstream.server.overview.history import Counted
from slotstream.store.records import State
from slotstream.store.samples import SampleStore
from slotstream.wire import errors
from slotstream.wire.errors import SlotStreamError

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_KNOWN_CODES = frozenset(
    kind.code
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, SlotStreamError)
)


Value = tuple[str, dict[str, str], float]  # Name with its suffix, labels, value.
_Line = tuple[str, tuple[tuple[str, str], ...]]
_SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


def code_label(code: str) -> str:
    """`code` if it is one of slotstream's own, else OTHER: a peer may abort a sample with any code."""
    return code if code in _KNOWN_CODES else "OTHER"


class _Stored:
    """Asks the store when it is scraped."""

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    def collect(self) -> Iterable[Metric]:
        samples = GaugeMetricFamily("slotstream_stored_samples", "Samples in the catalogue, by state.", labels=["state"])
        nbytes = GaugeMetricFamily("slotstream_stored_bytes", "Bytes of committed sample files.")
        damaged = CounterMetricFamily("slotstream_quarantined_samples", "Damaged samples that were taken out of service.")
        damaged.add_metric([], self._store.lifetimes.quarantined)
        free = GaugeMetricFamily("slotstream_free_bytes", "Bytes that may still be written to the data directory's disk.")
        disk = GaugeMetricFamily("slotstream_disk_bytes", "Size of the data directory's disk.")
        leads = GaugeMetricFamily(
            "slotstream_leads", "1: this server applies retention and scrubs. Of several that share a catalogue one does."
        )
        behind = GaugeMetricFamily(
            "slotstream_catalogue_behind",
            "1: the catalogue is older than its bucket, and nothing is deleted until slotstream rebuild has compared both.",
        )
        behind.add_metric([], self._store.is_behind)
        scratch = GaugeMetricFamily("slotstream_scratch_bytes", "Bytes of samples that arrive, in --scratch.")
        attempts = GaugeMetricFamily(
            "slotstream_attempts",
            "Uploads of all servers that are no samples: arriving, or ended. Those of both that are late should be gone.",
            labels=["state"],
        )
        if (shared := self._store.shared_state()) is not None:
            scratch.add_metric([], shared.scratch_bytes)
            for state in ("arriving", "ended", "late"):
                attempts.add_metric([state], getattr(shared.attempts, state))
        try:
            totals = self._store.totals()
            leads.add_metric([], self._store.leads)
            free.add_metric([], self._store.free_bytes())
            disk.add_metric([], self._store.disk_bytes())
        except SlotStreamError:
            yield from (behind, scratch, attempts)
            return  # A scrape must not fail because the disk does; the other metrics say that it did.
        for state, (count, _) in sorted(totals.items()):
            samples.add_metric([str(state)], count)
        nbytes.add_metric([], totals[State.COMMITTED][1])
        yield from (samples, nbytes, damaged, free, disk, leads, behind, scratch, attempts)


class Merged:
    """The families of a registry, with the values that other processes reported added to its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._reports: dict[int, dict[_Line, float]] = {}
        self._ended: dict[_Line, float] = {}

    def merge(self, worker: int, values: list[Value]) -> None:
        with self._lock:
            self._reports[worker] = {(name, tuple(sorted(labels.items()))): value for name, labels, value in values}

    def gone(self, worker: int) -> None:
        with self._lock:
            gauges = {family.name for family in self._registry.collect() if family.type == "gauge"}
            for line, value in self._reports.pop(worker, {}).items():
                if line[0] not in gauges:
                    self._ended[line] = self._ended.get(line, 0.0) + value

    def others(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """What other processes counted under a name, by labels."""
        found: dict[tuple[tuple[str, str], ...], float] = defaultdict(float)
        with self._lock:
            for report in (self._ended, *self._reports.values()):
                for (reported, labels), value in report.items():
                    if reported == name:
                        found[labels] += value
        return found

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            others = defaultdict(float, self._ended)
            for report in self._reports.values():
                for line, value in report.items():
                    others[line] += value
        for family in self._registry.collect():
            names = {family.name + suffix for suffix in _SUFFIXES}
            found = {(s.name, tuple(sorted(s.labels.items()))) for s in family.samples}
            family.samples = [
                s._replace(value=s.value + others.get((s.name, tuple(sorted(s.labels.items()))), 0.0)) for s in family.samples
            ]
            for (name, labels), value in others.items():
                if name in names and (name, labels) not in found:
                    family.add_sample(name, dict(labels), value)
            yield family


class Metrics:
    """Every metric of one server, in a registry of its own."""

    def __init__(self, store: SampleStore | None) -> None:
        """`store` is None in a worker process: the primary alone asks the store."""
        self._own = registry = CollectorRegistry()
        # What is shown: this process's, with what the workers reported added.
        self.registry = CollectorRegistry()
        self._merged = Merged(registry)
        self.registry.register(self._merged)

        def counter(name: str, sentence: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"slotstream_{name}", sentence, labels, registry=registry)

        def gauge(name: str, sentence: str) -> Gauge:
            return Gauge(f"slotstream_{name}", sentence, registry=registry)

        def seconds(name: str, sentence: str) -> Histogram:
            return Histogram(f"slotstream_{name}_seconds", sentence, buckets=_LATENCY_S, registry=registry)

        self.samples = counter(
            "samples", "Samples that ended: committed, duplicate or failed; code says why.", ("outcome", "code")
        )
        self.open_samples = gauge("open_samples", "Samples that are arriving now.")
        self.streams = gauge("ingest_streams", "Connected ingest streams.")
        self.held_bytes = gauge("held_bytes", "Bytes of chunks received and not written yet.")
        chunks = counter("chunks", "Chunks received, by transport.", ("transport",))
        self.chunks = {transport: chunks.labels(transport) for transport in ("grpc", "nixl")}
        self.nixl_fallbacks = counter("nixl_fallbacks", "Chunks that could not be read over NIXL, and came over gRPC instead.")
        self.nixl_timeouts = counter("nixl_timeouts", "NIXL transfers that were given up because they took too long.")
        self.nixl_reader_deaths = counter("nixl_reader_deaths", "Times that the process that reads over NIXL died.")
        self.nixl_quarantined = gauge("nixl_quarantined_slots", "Slots that a transfer that was given up may still write into.")
        self.chunk_bytes = counter("received_bytes", "Bytes of rows received.")
        self.hash_mismatches = counter("hash_mismatches", "Samples that failed because a chunk did not match its hash.")
        self.violations = counter("protocol_violations", "Ingest streams ended because the peer broke the protocol.")
        self.refused_streams = counter(
            "refused_streams",
            "Ingest streams refused or ended for want of a token, for a limit or by a fault (INTERNAL), by code.",
            ("code",),
        )
        self.open_to_durable = seconds("open_to_durable", "Seconds from a sample's open until it was durable.")
        self.commit_to_durable = seconds("commit_to_durable", "Seconds from a sample's commit until it was durable.")
        self.requests = counter("requests", "Finished requests of the Samples service.", ("method", "code"))
        self.sent_bytes = counter("sent_bytes", "Bytes of rows sent to readers.")
        self.reads = gauge("reads", "Reads running or waiting now.")
        self.waiting_reads = gauge("waiting_reads", "Reads waiting for a sample that is not committed yet.")
        self.deleted_samples = counter("deleted_samples", "Samples deleted, by reason; request: by name.", ("reason",))
        self.deleted_bytes = counter("deleted_bytes", "Bytes of sample files deleted by retention, by reason.", ("reason",))
        self.age_held = gauge("age_held_namespaces", "Namespaces in which nothing is deleted by age: the clock is in doubt.")
        self.rules_held = gauge(
            "rules_held_namespaces",
            "Namespaces in which nothing is deleted until new rules, which would delete more than half, are accepted.",
        )
        self.rules_wait = gauge("rules_wait_seconds", "For how long new rules delete nothing yet; 0: they act.")
        self.scrubbed_bytes = counter("scrubbed_bytes", "Bytes of rows that the scrubber read and checked.")
        self.scrub_passes = counter("scrub_passes", "Passes of the scrubber over all samples.")
        # Seconds since the epoch are Unix time, as in all metrics of that name.
        self.scrub_end = gauge("scrub_end_timestamp_seconds", "When the scrubber's last whole pass ended; 0: it does not run.")
        self.scrub_every = gauge("scrub_every_seconds", "How often the scrubber passes over all samples; 0: never.")
        self.free_target = gauge("free_bytes_target", "Free bytes below which retention deletes samples; 0: it does not.")
        self.certificate_expiry = gauge(
            "certificate_expiry_timestamp_seconds", "When the certificate in use expires; 0: no TLS."
        )
        if store is not None:
            registry.register(_Stored(store))

    def moved_bytes(self) -> float:
        """Of rows that this process took and gave."""
        families = (self.chunk_bytes, self.sent_bytes)
        return sum(s.value for family in families for one in family.collect() for s in one.samples if s.name.endswith("_total"))

    def sums(self, metric: Counter | Gauge) -> dict[tuple[tuple[str, str], ...], float]:
        """The values of one metric by its labels, those of all processes together."""
        (family,) = metric.collect()
        own = [s for s in family.samples if not s.name.endswith("_created")]
        # Also where this process has no value yet: the others may have some.
        sums = self._merged.others(family.name + "_total" if family.type == "counter" else family.name)
        for s in own:
            labels = tuple(sorted(s.labels.items()))
            sums[labels] = sums.get(labels, 0.0) + s.value
        return sums

    def counted(self, at: float, free_bytes: int | None) -> Counted:
        """What `History` keeps, of all processes, at a moment."""
        ended = [(dict(labels), value) for labels, value in self.sums(self.samples).items()]
        return Counted(
            at,
            committed=sum(value for labels, value in ended if labels["outcome"] == "committed"),
            received_bytes=self.total(self.chunk_bytes),
            sent_bytes=self.total(self.sent_bytes),
            failed={labels["code"]: value for labels, value in ended if labels["outcome"] == "failed"},
            free_bytes=free_bytes,
        )

    def total(self, metric: Counter | Gauge) -> float:
        """The sum of all values of one metric, of all processes."""
        return sum(self.sums(metric).values())

    def values(self) -> list[Value]:
        """Everything that this process counted, for its primary."""
        return [
            (s.name, s.labels, s.value)
            for family in self._own.collect()
            for s in family.samples
            if not s.name.endswith("_created") and s.value
        ]

    def merge(self, worker: int, values: list[Value]) -> None:
        """Add what a worker process counted, in place of what it said before."""
        self._merged.merge(worker, values)

    def gone(self, worker: int) -> None:
        """The worker ended: what it counted stays, what it had open does not."""
        self._merged.gone(worker)


def serve_metrics(metrics: Metrics, address: str) -> tuple[str, Callable[[], None]]:
    """Serve /metrics on `address` (host:port); returns the real address and what stops it. Raises ConfigError."""
    exposition = make_wsgi_app(metrics.registry)  # Knows which formats and encodings a scraper may ask for.

    def page(asked: Message) -> Answer:
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "HTTP_ACCEPT": asked.get("Accept")}
        environ["HTTP_ACCEPT_ENCODING"] = asked.get("Accept-Encoding")
        headers: list[tuple[str, str]] = []
        body = b"".join(exposition(environ, lambda status, its: headers.extend(its)))
        return Answer(HTTPStatus.OK, body, headers)

    return serve_pages("metrics", address, {"/metrics": page})
