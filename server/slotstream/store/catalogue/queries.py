"""What a catalogue is asked, and what it answers: frozen data that checks itself, free of any database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from slotstream.store.records import SampleKey, SampleRecord, State, compact_json
from slotstream.wire.errors import BadParams
from slotstream.wire.hashing import xxh3
from slotstream.wire.names import PAGE_SIZE_MAX, TAG_FILTERS_MAX


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Filters of a listing; empty or 0 means any. Times in Unix nanoseconds. Raises BadParams past the limits.

    `namespaces` are those that the caller may see; None: all. Nothing of another shows, in rows or in page tokens.
    """

    namespace: str = ""
    namespaces: tuple[str, ...] | None = None
    model: str = ""
    state: State | None = None
    created_from_unix_ns: int = 0  # Inclusive.
    created_until_unix_ns: int = 0  # Exclusive.
    tags: Mapping[str, str] = field(default_factory=dict)
    page_size: int = 100
    page_token: str = ""
    request_id: str = ""  # As vLLM answered it: samples whose ids are made of it.

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= PAGE_SIZE_MAX:
            raise BadParams(f"page_size must be 1 to {PAGE_SIZE_MAX}, not {self.page_size}")
        if len(self.tags) > TAG_FILTERS_MAX:
            raise BadParams(f"a listing filters by at most {TAG_FILTERS_MAX} tags, not {len(self.tags)}")

    def fingerprint(self) -> int:
        """32 bits over the filters: a token continues the listing that it came from, and no other."""
        filters = [
            self.namespace,
            self.model,
            str(self.state or ""),
            self.created_from_unix_ns,
            self.created_until_unix_ns,
            dict(self.tags),
            self.namespaces,
            *([self.request_id] if self.request_id else []),
        ]
        return xxh3(compact_json(filters).encode()) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Usage:
    """What one namespace holds: committed samples, the bytes of their files, and failed samples that are still known."""

    namespace: str
    samples: int = 0
    bytes: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sample that a rule may delete. `stamp_unix_ns`, its commit's (a failed one's open's), tells it from a later one."""

    key: SampleKey
    stamp_unix_ns: int
    file_bytes: int
    position: tuple[int, int]  # In its queue: the next page begins behind it.
    error_code: str = ""  # Of a failed one.

    def is_of(self, record: SampleRecord) -> bool:
        """Whether the sample is still the one that the rule saw."""
        if record.state is State.COMMITTED:
            return record.committed_unix_ns == self.stamp_unix_ns
        return record.state is State.FAILED and record.created_unix_ns == self.stamp_unix_ns


@dataclass(frozen=True, slots=True)
class Standing:
    """What retention knows about a sample. Times in Unix nanoseconds, 0 for never."""

    reads: int = 0
    acked_unix_ns: int = 0
    leased_until_unix_ns: int = 0


class Queue(Enum):
    """An order in which samples of a namespace may go."""

    OLDEST = auto()  # Committed ones, by when they were.
    OLDEST_READ = auto()  # Likewise, of those that were read to the end or acked.
    READ = auto()  # Those that were read to the end, the fewest times first.
    ACKED = auto()  # Those that were acked, the first one first.
    FAILED = auto()  # By when they were opened.
    REFUSED = auto()  # Likewise, of those that never were open.
