"""What the connector holds of a sample until the server's verdict: enough to send it again."""

from __future__ import annotations

from dataclasses import dataclass, field

from slotstream.connector.plan import SampleOpen
from slotstream.connector.sending.phases import MOVES, Event, Phase
from slotstream.connector.sending.row_check import BadRowCount
from slotstream.connector.sending.spool.files import Place, SpoolFile
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.v1 import ingest_pb2
from slotstream.wire.columns import RowFormat
from slotstream.wire.errors import Interrupted


class NotAllowed(AssertionError):
    """A bug of ours: the table has no such move. The sample is where it was."""

    def __init__(self, sample: SampleState, event: Event) -> None:
        super().__init__(f"sample {sample.serial} is {sample.phase.name}, where {event.name} cannot happen")
        self.sample = sample


@dataclass(slots=True, eq=False)
class ChunkState:
    """Rows [first_row, first_row + rows) of a sample: in a staging slot, in the spool, in both, or lost.

    `ticket`: the staging slot is kept in the pool, where others may take it. `wire`: the number under which the sink has the
    rows, until their ack. `skip`: where in the data at `place` the rows begin.
    """

    first_row: int
    rows: int
    nbytes: int
    digest: int
    staging_slot: int | None
    ticket: int = 0
    wire: int = 0
    writing: bool = False  # The spool reads from the staging slot.
    place: Place | None = None
    skip: int = 0

    @property
    def lost(self) -> bool:
        """Whether the rows are nowhere on this side."""
        return self.staging_slot is None and self.place is None


@dataclass(slots=True, eq=False)
class SampleState:
    """A sample and its phase, which only `move` changes. What is said of one phase means nothing in the others."""

    serial: int
    req_id: str  # "" for a sample of an earlier engine.
    opened: ingest_pb2.OpenSample
    phase: Phase = Phase.WAITING
    chunks: list[ChunkState] = field(default_factory=list)
    commit: ingest_pb2.CommitSample | None = None
    lane: int = -1  # The index of the lane that it is on; -1: of none.
    number: int = 0  # On its lane: what the server knows it by.
    owed_bytes: int = 0  # On a lane: of rows that the server has not taken, promised ones included.
    sends: int = 0  # How often it was opened.
    unsent: int = 0  # OPEN: chunks that are not submitted yet.
    why: tuple[str, str] = (Interrupted.code, "its rows were let go of")  # It is not stored, or not yet: code and message.
    retry_at: float = 0.0  # BACKING_OFF: when it is sent again, by the outbox's clock.
    refusals: int = 0  # How often it backed off.
    file: SpoolFile | None = None
    unspooled: int = 0  # Chunks that are not in the file.
    commit_spooled: bool = False  # Or asked to be.
    rows_unix_ns: int = 0  # When the last rows were computed and in host memory.
    bad_rows: BadRowCount | None = None  # Those found so far, if any.

    @property
    def name(self) -> tuple[str, str]:
        """Its namespace and sample id: several samples may have one, of which one is stored."""
        return self.opened.namespace, self.opened.sample_id

    def move(self, event: Event) -> Phase:
        """Go where the table says; the new phase. Raises NotAllowed."""
        move = MOVES.get((self.phase, event))
        if move is None:
            raise NotAllowed(self, event)
        self.phase = move.to
        return move.to

    def add(self, chunk: ChunkState) -> None:
        """One more chunk."""
        self.chunks.append(chunk)
        self.unsent += 1
        self.unspooled += chunk.place is None

    @property
    def in_memory(self) -> bool:
        """Whether staging holds some of its rows, or may."""
        return any(chunk.staging_slot is not None for chunk in self.chunks)


def open_message(config: ConnectorConfig, item: SampleOpen) -> ingest_pb2.OpenSample:
    """The OpenSample of a planned sample, without its number."""
    row_format = config.row_format
    return ingest_pb2.OpenSample(
        namespace=item.namespace,
        sample_id=item.sample_id,
        model=config.model,
        dtype=row_format.dtype,
        layer_ids=config.layer_ids,
        hidden_size=row_format.hidden_size,
        rows_max=item.rows_max,
        rows_exact=item.rows_exact,
        tags=item.tags,
        metadata={**config.metadata, **item.metadata},
        columns=item.columns,
    )


def format_of(opened: ingest_pb2.OpenSample) -> RowFormat:
    """What a sample of this engine announces. Raises UnsupportedFormat, TooLarge and BadParams where it cannot be sent."""
    row_format = RowFormat.of(opened.dtype, len(opened.layer_ids), opened.hidden_size, opened.columns)
    row_format.check_commit(opened.rows_max)
    return row_format


def numbered(opened: ingest_pb2.OpenSample, number: int) -> ingest_pb2.OpenSample:
    """A copy of `opened` under this number."""
    request = ingest_pb2.OpenSample()
    request.CopyFrom(opened)
    request.sample = number
    return request
