"""What the golden files hold, and how such files are written: a data directory and a spool, as version 0.1.0 wrote them.

The files in `tests/golden/files` were made once, by `make_golden.py`. Nothing makes them again: a change that cannot read them,
or writes other bytes from the same input, breaks what people have stored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from support.hand_disk import HandDisk

from slotstream.connector.counters import Counters
from slotstream.connector.faults import Faults
from slotstream.connector.options import ConnectorOptions
from slotstream.connector.plan import SampleOpen
from slotstream.connector.sending.outbox import Outbox
from slotstream.connector.sending.sample_state import ChunkState
from slotstream.connector.sending.spool.disk_thread import Appended
from slotstream.connector.sending.spool.reader import SpoolReader
from slotstream.connector.sending.spool.writer import SpoolWriter
from slotstream.connector.sending.staging_pool import StagingPool, StagingShape
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.store.records import Failure, SampleKey, SampleSpec
from slotstream.store.samples import SampleStore
from slotstream.transport.loopback import LoopbackSink
from slotstream.v1 import ingest_pb2
from slotstream.wire.columns import RowFormat
from slotstream.wire.hashing import xxh3

FILES = Path(__file__).parent / "files"
DATA, SPOOL = FILES / "data", FILES / "spool"
OWNER = "0123456789abcdef0123456789abcdef"
START_NS = 1_767_225_600_000_000_000  # 2026-01-01T00:00:00Z
FIRST_CHUNK_NS = START_NS - 1_000_000_000
SPOOL_LAYER_IDS, SPOOL_HIDDEN = (2, 5), 4
SPOOL_ROW_BYTES = 2 * len(SPOOL_LAYER_IDS) * SPOOL_HIDDEN
_SLOT_BYTES = 4 * SPOOL_ROW_BYTES
_ELEMENT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class GoldenSample:
    """A committed sample. `chunks`: rows [start, stop) in the order in which they are written."""

    sample_id: str
    dtype: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    chunks: tuple[tuple[int, int], ...]
    seed: int
    namespace: str = "default"
    model: str = "golden/model"
    rows_max: int = 0
    tags: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    commit_metadata: Mapping[str, str] = field(default_factory=dict)
    flat: bool = False  # Each row is one byte again and again: the file is large, and its copy in git small.

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.namespace, self.sample_id)

    @property
    def rows(self) -> int:
        return max(stop for _, stop in self.chunks)

    @property
    def row_bytes(self) -> int:
        return _ELEMENT_BYTES[self.dtype] * len(self.layer_ids) * self.hidden_size

    @property
    def data(self) -> bytes:
        if self.flat:
            return b"".join(bytes([self.seed + row]) * self.row_bytes for row in range(self.rows))
        return random.Random(self.seed).randbytes(self.rows * self.row_bytes)

    @property
    def token_ids(self) -> list[int]:
        return [(self.seed << 32) + 7 * row for row in range(self.rows)]

    def spec(self) -> SampleSpec:
        return SampleSpec(
            self.namespace,
            self.sample_id,
            self.model,
            self.layer_ids,
            RowFormat.of(self.dtype, len(self.layer_ids), self.hidden_size),
            self.rows_max or self.rows,
            not self.rows_max,
            self.tags,
            self.metadata,
        )


SAMPLES = (
    GoldenSample(
        "chat-1",
        "BF16",
        (2, 18, 33, 36),
        8,
        ((0, 4), (4, 7)),
        1,
        tags={"split": "train", "lang": "de"},
        metadata={
            "engine_id": "golden-engine",
            "vllm_version": "0.32.0",
            "model_revision": "",
            "layer_names": '["2", "18", "33", "final"]',
            "note": 'quotes " and \\ and ünïcode 雪',
        },
        commit_metadata={"finish_reason": "stop", "num_prompt_tokens": "5"},
    ),
    GoldenSample("one-row", "F32", (0,), 1, ((0, 1),), 2, model=""),
    GoldenSample("half", "F16", (1, 3), 5, ((3, 6), (0, 3), (2, 4)), 3, namespace="other.ns", rows_max=1000),
    GoldenSample("groups", "F32", (7,), 1 << 18, ((0, 1), (1, 3)), 4, flat=True, tags={"split": "test"}),
    GoldenSample("long-header", "BF16", (4, 9), 2, ((0, 600),), 5, rows_max=100_000, commit_metadata={"k": "v" * 4000}),
)
FAILED = GoldenSample("failed", "BF16", (1,), 4, ((0, 2),), 6, tags={"split": "train"})
FAILURE = Failure("SLOT_MISMATCH", "the slots do not match")
ACKED, LEASED, READ = SAMPLES[0].key, SAMPLES[1].key, SAMPLES[2].key
LEASE_S, READS = 3600.0, 3
END_NS = START_NS + (len(SAMPLES) - 1) * 10**10 + 10**9  # When the store was closed.


def write_data(directory: Path) -> None:
    """Store the golden samples, at the golden times, and stop cleanly."""
    clock = {"now": START_NS}
    store = SampleStore.open(directory, wall=lambda: clock["now"], elapsed=lambda: clock["now"])
    with _first_chunks_at(FIRST_CHUNK_NS):
        for number, sample in enumerate(SAMPLES):
            clock["now"] = START_NS + number * 10**10
            upload = store.open_upload(sample.spec())
            data = memoryview(sample.data)
            for start, stop in sample.chunks:
                part = data[start * sample.row_bytes : stop * sample.row_bytes]
                upload.write_chunk(start, stop - start, part, xxh3(part))
            clock["now"] += 10**9
            assert not upload.commit(sample.rows, sample.token_ids, sample.commit_metadata)
        store.open_upload(FAILED.spec()).abort(FAILURE)
    store.lifetimes.ack(ACKED)
    store.lifetimes.lease(LEASED, "golden", LEASE_S)
    record = store.stat(READ)
    assert record is not None
    for _ in range(READS):
        store.lifetimes.count_reads([(READ, record.committed_unix_ns)]).result()
    store.close()


@contextmanager
def _first_chunks_at(unix_ns: int) -> Iterator[None]:
    with mock.patch("slotstream.store.sample.upload.time", SimpleNamespace(time_ns=lambda: unix_ns)):
        yield


@dataclass(frozen=True)
class SpooledRequest:
    """A sample in the golden spool. `end`: None, "commit", or the code that it failed with."""

    sample_id: str
    chunks: tuple[tuple[int, int], ...]
    seed: int
    end: str | None = "commit"
    namespace: str = "default"
    exact: bool = True
    tags: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    commit_metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return max(stop for _, stop in self.chunks)

    @property
    def data(self) -> bytes:
        return random.Random(self.seed).randbytes(self.rows * SPOOL_ROW_BYTES)

    @property
    def token_ids(self) -> list[int]:
        return [100 * self.seed + row for row in range(self.rows)]

    @property
    def opened(self) -> ingest_pb2.OpenSample:
        return ingest_pb2.OpenSample(
            namespace=self.namespace,
            sample_id=self.sample_id,
            model="golden/model",
            dtype="BF16",
            layer_ids=SPOOL_LAYER_IDS,
            hidden_size=SPOOL_HIDDEN,
            rows_max=self.rows + (0 if self.exact else 100),
            rows_exact=self.exact,
            tags=self.tags,
            metadata={"engine_id": "golden", **self.metadata},
        )

    @property
    def commit(self) -> ingest_pb2.CommitSample | None:
        if self.end != "commit":
            return None
        return ingest_pb2.CommitSample(row_count=self.rows, token_ids=self.token_ids, metadata=self.commit_metadata)

    @property
    def same_bytes(self) -> bool:
        """Whether what is written of it is the same each time: protobuf writes a map's entries in any order."""
        return not self.metadata and len(self.tags) < 2 and len(self.commit_metadata) < 2


SPOOLED = (
    SpooledRequest("whole", ((0, 4), (4, 6)), 11, tags={"split": "train"}, commit_metadata={"finish_reason": "length"}),
    SpooledRequest("plain", ((0, 3),), 12, namespace="other.ns", exact=False),
    SpooledRequest("unfinished", ((0, 4),), 13, end=None),
    SpooledRequest("aborted", ((0, 4),), 14, end="ABORTED"),
    SpooledRequest(
        "entries",
        ((0, 4), (4, 8), (8, 9)),
        15,
        tags={"a": "1", "b": "2", "c": "雪"},
        metadata={"vllm_version": "0.32.0", "model_revision": "main"},
        commit_metadata={"finish_reason": "stop", "num_prompt_tokens": "4"},
    ),
)


def write_spool(base: Path) -> Path:
    """Fill a spool as a connector does whose server is away, and die; the directory with the files."""
    counters = Counters()
    shape = StagingShape(8, 2, _SLOT_BYTES, SPOOL_ROW_BYTES)
    pool = StagingPool(memoryview(bytearray(shape.nbytes)), shape)
    disk = HandDisk(base, 1 << 20, counters)
    outbox = Outbox(
        ConnectorConfig(
            ConnectorOptions(),
            "golden",
            "golden/model",
            SPOOL_LAYER_IDS,
            RowFormat.of("BF16", 2, SPOOL_HIDDEN),
            {"engine_id": "golden"},
        ),
        pool,
        [LoopbackSink()],
        SpoolWriter(disk, pool, lambda: 0.0),
        SpoolReader(disk, pool),
        counters,
        Faults(counters),
        lambda req_id: None,
        lambda action, sample: action(sample),
        lambda: 0.0,
    )

    def settle() -> None:
        while disk.step():
            while disk.events:
                event = disk.events.popleft()
                assert isinstance(event, Appended)
                outbox.appended(event)

    for request in SPOOLED:
        _spool(request, outbox, pool, settle)
    disk.die()
    (made,) = base.iterdir()
    return made


def _spool(request: SpooledRequest, outbox: Outbox, pool: StagingPool, settle: Callable[[], None]) -> None:
    opened = request.opened
    outbox.open(
        SampleOpen(
            request.sample_id,
            request.namespace,
            request.sample_id,
            0,
            opened.rows_max,
            opened.rows_exact,
            request.tags,
            request.metadata,
        )
    )
    sample = outbox.sample(request.sample_id)
    assert sample is not None
    settle()
    for start, stop in request.chunks:
        slots = pool.acquire(1, deadline=0.0, keep_waiting=lambda: False)
        assert slots is not None
        part = request.data[start * SPOOL_ROW_BYTES : stop * SPOOL_ROW_BYTES]
        pool.buffer(slots[0], len(part))[:] = part
        outbox.add(sample, ChunkState(start, stop - start, len(part), xxh3(part), slots[0]))
        settle()
    if (commit := request.commit) is not None:
        outbox.finish(sample, commit)
    elif request.end is not None:
        outbox.give_up(sample, request.end, "the request was aborted")
    settle()
