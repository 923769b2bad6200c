"""What the catalogue says, as plain Python values: no protobuf type leaves the client."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from enum import StrEnum

from slotstream.v1 import sample_pb2, samples_pb2
from slotstream.wire.errors import BadParams, ProtocolViolation
from slotstream.wire.hashing import to_hex
from slotstream.wire.names import layer_names


class SampleState(StrEnum):
    """A sample moves ARRIVING -> COMMITTED, or ARRIVING -> FAILED; both ends are final."""

    ARRIVING = "ARRIVING"
    COMMITTED = "COMMITTED"
    FAILED = "FAILED"


_STATE_OF_WIRE: dict[int, SampleState] = {
    sample_pb2.SAMPLE_STATE_ARRIVING: SampleState.ARRIVING,
    sample_pb2.SAMPLE_STATE_COMMITTED: SampleState.COMMITTED,
    sample_pb2.SAMPLE_STATE_FAILED: SampleState.FAILED,
}


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """One sample as the catalogue knows it. What is not known yet, or does not apply, is None."""

    namespace: str
    sample_id: str
    state: SampleState
    model: str
    dtype: str  # safetensors spelling: BF16, F16, F32
    layer_ids: tuple[int, ...]  # id i is the residual stream after i layers, in the file's order
    hidden_size: int  # elements a row and layer
    num_tokens: int  # rows; while ARRIVING the most it can hold
    file_bytes: int | None
    created_unix_ns: int
    committed_unix_ns: int | None
    error_code: str | None
    error_message: str | None
    tags: dict[str, str]
    metadata: dict[str, str]
    # What follows is known to `Client.stat` alone; elsewhere it is 0 and None.
    reads: int = 0  # of every row, answered to the end
    acked_unix_ns: int | None = None  # when a reader first was done with it
    leased_until_unix_ns: int | None = None
    expires_unix_ns: int | None = None  # when the server deletes it for its age
    # While committed: other samples that failed under this id since the server started, by error code.
    refused: dict[str, int] = field(default_factory=dict)
    header_xxh3: str | None = None  # of its file's header, 16 hexadecimal characters; None where the server has no such file

    @property
    def layer_names(self) -> tuple[str, ...]:
        """What people call the layers, in the file's order: the ids, and "final" for the output of the last norm."""
        return layer_names(self.layer_ids, self.metadata)

    @property
    def created(self) -> datetime.datetime:
        """When the server opened the sample, in UTC, to the microsecond."""
        return datetime.datetime.fromtimestamp(self.created_unix_ns / 1e9, datetime.UTC)

    @classmethod
    def from_wire(cls, info: sample_pb2.SampleInfo) -> SampleInfo:
        """Raises ProtocolViolation for a state that this version does not know."""
        if info.state not in _STATE_OF_WIRE:
            raise ProtocolViolation(f"sample {info.sample_id!r} is in state {info.state}, which this client does not know")
        return cls(
            namespace=info.namespace,
            sample_id=info.sample_id,
            state=_STATE_OF_WIRE[info.state],
            model=info.model,
            dtype=info.dtype,
            layer_ids=tuple(info.layer_ids),
            hidden_size=info.hidden_size,
            num_tokens=info.num_tokens,
            file_bytes=info.file_bytes or None,
            created_unix_ns=info.created_unix_ns,
            committed_unix_ns=info.committed_unix_ns or None,
            error_code=info.error_code or None,
            error_message=info.error_message or None,
            tags=dict(info.tags),
            metadata=dict(info.metadata),
            reads=info.reads,
            acked_unix_ns=info.acked_unix_ns or None,
            leased_until_unix_ns=info.leased_until_unix_ns or None,
            expires_unix_ns=info.expires_unix_ns or None,
            refused=dict(info.refused),
            header_xxh3=to_hex(info.header_xxh3) if info.HasField("header_xxh3") else None,
        )


@dataclass(frozen=True, slots=True)
class Page:
    """Some samples of a list, newest first. `next_token`: what `Client.page` takes for the next ones; "" after the last."""

    samples: tuple[SampleInfo, ...]
    next_token: str


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of one file of the server's quarantine. `damage`: why it does not verify, as in a Verdict; `message`: why it
    stays there, None when the sample is committed again.
    """

    namespace: str
    sample_id: str
    file: str  # where it was, below the data directory
    restored: bool
    damage: str | None
    message: str | None
    bytes: int  # checked

    @classmethod
    def from_wire(cls, reply: samples_pb2.RestoreReply) -> Restored:
        return cls(
            reply.namespace,
            reply.sample_id,
            reply.file,
            reply.restored,
            reply.damage or None,
            reply.message or None,
            reply.bytes,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What checking one stored sample found. `damage` is None for a sound one, else a class of damage:
    MISSING, UNREADABLE, TRUNCATED, HASH_MISMATCH, FOREIGN, IO_ERROR or UNSUPPORTED_FORMAT, with `message` saying more.
    """

    namespace: str
    sample_id: str
    damage: str | None
    message: str | None
    bytes: int  # checked
    quarantined: bool = False  # taken out of service, as `verify` was asked to

    @property
    def sound(self) -> bool:
        return self.damage is None

    @classmethod
    def from_wire(cls, reply: samples_pb2.VerifyReply) -> Verdict:
        damage, message = reply.damage or None, reply.message or None
        return cls(reply.namespace, reply.sample_id, damage, message, reply.bytes, reply.quarantined)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a rule of retention would delete now. `key`: of the rules file, "" where nothing would go, and the rest says why."""

    namespace: str
    key: str
    samples: int
    bytes: int  # of their files
    stored: int  # committed samples of the namespace
    held: bool = False  # nothing is deleted here until somebody accepts the server's rules
    age_held: bool = False  # nothing is deleted by age here: the clock is in doubt

    @classmethod
    def from_wire(cls, reply: samples_pb2.RetentionReply) -> Forecast:
        counts = (reply.samples, reply.bytes, reply.stored)
        return cls(reply.namespace, reply.key, *counts, reply.held, reply.age_held)


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """What a namespace holds. `limits`: what the server's retention rule says of it, by the names of the file's keys."""

    namespace: str
    samples: int  # committed
    bytes: int  # of their files
    failed: int  # failed samples that are still known
    limits: dict[str, str]

    @classmethod
    def from_wire(cls, usage: samples_pb2.NamespaceUsage) -> NamespaceUsage:
        return cls(usage.namespace, usage.samples, usage.bytes, usage.failed, dict(usage.limits))


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server holds. What it scrubs never, or not yet, is None.

    All but `namespaces` is of the whole server: None, or empty, where the token is not of every namespace, or one was named.
    """

    namespaces: tuple[NamespaceUsage, ...]
    free_bytes: int | None
    free_bytes_target: int | None  # below it, the server deletes what its rules allow for that
    quarantined_files: int | None
    quarantined_bytes: int | None
    scrub_every_s: float | None
    scrub_begun_unix_ns: int | None
    scrub_ended_unix_ns: int | None
    scrub_samples: int | None
    scrub_damaged: int | None
    clock: str | None = None  # why the server doubts its clock
    age_held: tuple[str, ...] = ()  # namespaces in which it deletes nothing by age meanwhile
    rules_held: tuple[str, ...] = ()  # namespaces in which it deletes nothing until somebody accepts its rules
    rules_wait_s: float = 0.0  # for so long its rules, which changed, delete nothing

    @classmethod
    def from_wire(cls, namespaces: tuple[NamespaceUsage, ...], reply: samples_pb2.UsageReply) -> Usage:
        scrub = reply.scrub
        # Earlier servers do not say `whole`; a disk of theirs without a free byte cannot be told from none.
        whole = reply.whole or bool(reply.free_bytes)
        return cls(
            namespaces=namespaces,
            free_bytes=reply.free_bytes if whole else None,
            free_bytes_target=reply.free_bytes_target or None,
            quarantined_files=reply.quarantined_files if whole else None,
            quarantined_bytes=reply.quarantined_bytes if whole else None,
            scrub_every_s=scrub.every_s or None,
            scrub_begun_unix_ns=scrub.begun_unix_ns or None,
            scrub_ended_unix_ns=scrub.ended_unix_ns or None,
            scrub_samples=scrub.samples if whole else None,
            scrub_damaged=scrub.damaged if whole else None,
            clock=reply.clock or None,
            age_held=tuple(reply.age_held),
            rules_held=tuple(reply.rules_held),
            rules_wait_s=reply.rules_wait_s,
        )


def wire_state(state: str | None) -> str:
    """The protocol's name of a state given in any case; None is any state. Raises BadParams."""
    if state is None:
        return "SAMPLE_STATE_UNSPECIFIED"
    try:
        return f"SAMPLE_STATE_{SampleState(state.upper())}"
    except (ValueError, AttributeError):
        raise BadParams(f"state {state!r} is not one of {', '.join(SampleState)}") from None


def unix_ns(when: datetime.datetime | int | None) -> int:
    """A moment as nanoseconds since 1970 UTC; None is 0, "no bound". Raises BadParams for a datetime without a timezone."""
    if when is None:
        return 0
    if isinstance(when, datetime.datetime):
        if when.tzinfo is None:
            raise BadParams(f"{when.isoformat()} has no timezone, so it is not a moment")
        since = when - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        # Not timestamp() * 1e9: a float cannot hold today's nanoseconds.
        return ((since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds) * 1000
    if isinstance(when, bool) or not isinstance(when, int):
        raise BadParams(f"{when!r} is neither a datetime nor nanoseconds since 1970")
    return when
