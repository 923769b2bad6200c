"""A lane: one stream to the server, and what is on it. All else (serials, requests, staging, the spool) the lanes share."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slotstream.connector.sending.sample_state import ChunkState, SampleState
from slotstream.transport.base import SampleSink, SinkEvent

NO_LANE = -1


@dataclass(frozen=True, slots=True)
class Sent:
    """A chunk that a lane's sink has. `read_back_slot`: where its rows lie, unless that is its own staging slot."""

    sample: SampleState
    chunk: ChunkState
    read_back_slot: int | None


class Lane:
    """For the pump's thread, but for the plain attributes, which any thread may read.

    `samples`: those that the server knows by these numbers, and owes a verdict. `sent`: chunks that it has not taken yet, by
    number. `owed_bytes`: of rows that it has not taken, those that its samples only promise included. `answered_at`: when it
    last took a chunk, or was first given one, by the outbox's clock.
    """

    def __init__(self, index: int, sink: SampleSink) -> None:
        self.index = index
        self.sink = sink
        self.up = False
        self.taken_columns: frozenset[str] = frozenset()  # By the server of this stream.
        self.samples: dict[int, SampleState] = {}
        self.sent: dict[int, Sent] = {}
        self.names: Counter[tuple[str, str]] = Counter()  # Of these samples: namespace and sample id.
        self.owed_bytes = 0
        self.answered_at = 0.0
        self._numbers = itertools.count(1)  # None is ever used again, on any stream.
        self._chunk_numbers = itertools.count(1)

    def next_number(self) -> int:
        """Of a sample."""
        return next(self._numbers)

    def next_chunk_number(self) -> int:
        """Of a chunk."""
        return next(self._chunk_numbers)

    def begin(self, sample: SampleState, owed_bytes: int) -> None:
        """A sample is on this lane from here on, under a new number."""
        sample.lane, sample.number, sample.owed_bytes = self.index, self.next_number(), owed_bytes
        sample.sends += 1
        self.samples[sample.number] = sample
        self.names[sample.name] += 1
        self.owed_bytes += owed_bytes

    def owes(self, sample: SampleState, nbytes: int) -> None:
        """So many bytes of a sample that is on this lane are not taken yet."""
        self.owed_bytes += nbytes - sample.owed_bytes
        sample.owed_bytes = nbytes

    def end(self, sample: SampleState) -> None:
        """A sample is on it no longer."""
        del self.samples[sample.number]
        self.names[sample.name] -= 1
        if not self.names[sample.name]:
            del self.names[sample.name]
        self.owes(sample, 0)
        sample.lane = NO_LANE

    def went_down(self) -> list[Sent]:
        """Its stream is over, and nothing is on it any more. The chunks that were."""
        for sample in list(self.samples.values()):
            self.end(sample)
        sent, self.sent = self.sent, {}
        return list(sent.values())


class Lanes:
    """All lanes of a sender, one or more, by their index."""

    def __init__(self, sinks: Sequence[SampleSink]) -> None:
        self._lanes = tuple(Lane(index, sink) for index, sink in enumerate(sinks))

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def of(self, sample: SampleState) -> Lane:
        """The lane that a sample is on."""
        return self._lanes[sample.lane]

    @property
    def up(self) -> list[Lane]:
        """Those whose stream is up."""
        return [lane for lane in self._lanes if lane.up]

    @property
    def any_up(self) -> bool:
        """Whether one is."""
        return any(lane.up for lane in self._lanes)

    @property
    def unacked(self) -> int:
        """Chunks that the server has not taken yet."""
        return sum(len(lane.sent) for lane in self._lanes)

    def answered_since(self, when: float) -> bool:
        """Whether a lane that has chunks had an answer since then, by the outbox's clock; or none has any."""
        waiting = [lane.answered_at for lane in self._lanes if lane.sent]
        return not waiting or max(waiting) > when

    def for_sample(self, sample: SampleState) -> Lane:
        """Where a sample goes now: behind one of its name, so that the server hears of both in this order; else to the one that
        owes least. One is up.
        """
        same = (lane for lane in self.up if sample.name in lane.names)
        return next(same, None) or self.least_owing()

    def least_owing(self) -> Lane:
        """One that is down owes nothing, and is never chosen. One is up."""
        return min(self.up, key=lambda lane: lane.owed_bytes)


@dataclass(frozen=True, slots=True)
class Said:
    """What a lane's sink said."""

    lane: Lane
    event: SinkEvent
