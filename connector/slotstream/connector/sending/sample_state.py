"""What the connector holds of a sample until the server's verdict: enough to send it again."""

from __future__ import annotations

from dataclasses import dataclass, field

from slotstream.connector.plan import SampleOpen
from slotstream.connector.sending.row_check import BadRowCount
from slotstream.connector.sending.spool.files import Place, SpoolFile
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.v1 import ingest_pb2


@dataclass(slots=True, eq=False)
class ChunkState:
    """Rows [first_row, first_row + rows) of a sample: in a staging slot, in the spool, in both, or not to be had any more.

    `ticket`: the slot is kept in the pool, where others may take it. `wire`: the number under which the sink has the rows,
    until their ack. `skip`: where in the data at `place` the rows begin.
    """

    first_row: int
    rows: int
    nbytes: int
    digest: int
    slot: int | None
    ticket: int = 0
    wire: int = 0
    sent: bool = False  # Submitted since the sample was last opened.
    writing: bool = False  # The spool reads from the slot.
    place: Place | None = None
    skip: int = 0

    @property
    def lost(self) -> bool:
        """Whether the rows are nowhere on this side."""
        return self.slot is None and self.place is None


@dataclass(slots=True, eq=False)
class SampleState:
    """A sample without a verdict. `number`: its number on the present stream, 0 while it is not open there."""

    serial: int
    req_id: str  # "" for a sample of an earlier engine.
    opened: ingest_pb2.OpenSample
    chunks: list[ChunkState] = field(default_factory=list)
    commit: ingest_pb2.CommitSample | None = None
    number: int = 0
    ending: bool = False  # Commit or abort sent on this stream; only the answer is missing.
    failure: tuple[str, str] | None = None  # Given up: code and message, which the server is told.
    over: bool = False  # Its rows have no further use.
    unsent: int = 0  # Chunks not submitted since the sample was last opened.
    retry_at: float = 0.0  # monotonic; when it is opened again after the server had no room
    attempts: int = 0
    refusal: tuple[str, str] | None = None  # Why the server had no room.
    file: SpoolFile | None = None
    unspooled: int = 0  # Chunks that are not in the file.
    commit_spooled: bool = False  # Or asked to be.
    rows_unix_ns: int = 0  # When the last rows were computed and in host memory.
    bad_rows: BadRowCount | None = None  # Those found so far, if any.
    queued: bool = False  # Counts among those that are replayed from the spool now.

    def add(self, chunk: ChunkState) -> None:
        """One more chunk."""
        self.chunks.append(chunk)
        self.unsent += 1
        self.unspooled += chunk.place is None

    def unsend(self) -> None:
        """It is not open on any stream."""
        self.number = 0
        self.ending = False
        self.unsent = len(self.chunks)
        for chunk in self.chunks:
            chunk.sent = False

    @property
    def in_memory(self) -> bool:
        """Whether staging holds some of its rows, or may."""
        return any(chunk.slot is not None for chunk in self.chunks)


def open_message(config: ConnectorConfig, item: SampleOpen) -> ingest_pb2.OpenSample:
    """The OpenSample of a planned sample, without its number."""
    return ingest_pb2.OpenSample(
        namespace=item.namespace,
        sample_id=item.sample_id,
        model=config.model,
        dtype=config.dtype,
        layer_ids=config.layer_ids,
        hidden_size=config.hidden_size,
        rows_max=item.rows_max,
        rows_exact=item.rows_exact,
        tags=item.tags,
        metadata={**config.metadata, **item.metadata},
    )


def numbered(opened: ingest_pb2.OpenSample, number: int) -> ingest_pb2.OpenSample:
    """A copy of `opened` under this number."""
    request = ingest_pb2.OpenSample()
    request.CopyFrom(opened)
    request.sample = number
    return request
