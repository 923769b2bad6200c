"""A stream of shuffled batches of rows: an epoch at a time, shared by ranks and workers, and resumed where its reader was."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import slotstream.client.epoch as plan
from slotstream.client.arrays import Arrays
from slotstream.client.batches import Options, Part, batch_of
from slotstream.client.connection import Connection
from slotstream.client.epoch import Cut, Member, Turn
from slotstream.client.follow import Follower
from slotstream.client.members import Selection, members_at
from slotstream.client.ranks import Place, agreed, place, worker_info
from slotstream.client.stretches import Held, read_stretches
from slotstream.wire.errors import SampleNotFound

STATE_VERSION = 1
_NUMBERS = ("epoch", "as_of", "split", "rows_left", "batches", "rows", "deleted_rows")  # Of a state.


@dataclass(frozen=True, slots=True)
class Epochs:
    """What all ranks know alike: the moment, how samples are cut, and each rank's rows by lane."""

    as_of: int
    cut: Cut
    counted: list[list[int]]


@dataclass(slots=True)
class Progress:
    """Where a worker is in an epoch. It is the state, and holds no row."""

    epoch: int
    as_of: int
    split: int
    window: int
    rows_left: int  # Of this worker, that were there when the epoch began, and neither came nor were found deleted.
    batches_left: int | None  # With drop_last and several ranks: what is still owed.
    mark: int = -1  # Of the last row that was handed out.
    batches: int = 0
    rows: int = 0
    deleted_rows: int = 0


class RowStream:
    """What `rows` returns. Each iteration is one epoch, or the rest of the one whose state was loaded."""

    def __init__(self, connection: Connection, options: Options, arrays: Arrays, rank: int, world_size: int) -> None:
        self._connection = connection
        self._options = options
        self._arrays = arrays
        self._rank, self._world_size = rank, world_size
        self._members: list[Member] = []
        self._epochs = Epochs(0, Cut(1, 1), [])
        self._progress: Progress | None = None
        self._resuming: Progress | None = None
        self._follower: Follower | None = None
        self._since = options.as_of or 0  # Where following begins.
        self._shared: Any = self._share()
        if not options.follow:
            self._plan()
        connection.close()  # A connection that is open at a fork is of no use to the child.

    def _share(self) -> Any:
        """[the epoch, whether a loader's workers read it]: where there are worker processes, they see it too."""
        return [0, 0]

    def _plan(self) -> None:
        options, client = self._options, self._connection.client()
        selection = Selection(options.layers)

        def find() -> Epochs:
            until, self._members = members_at(client, options.filters, selection, options.as_of, options.wait_s)
            cut = Cut.of(len(self._members), options.buffer_rows, self._world_size)
            return Epochs(until, cut, plan.census(self._members, cut, self._world_size))

        self._epochs = agreed(self._rank, self._world_size, options.as_of, find)
        if not self._members:  # Another rank looked.
            _, self._members = members_at(client, options.filters, selection, self._epochs.as_of, 0.0)

    @property
    def as_of(self) -> int:
        """The moment, in Unix ns, at which an epoch's samples were committed."""
        return self._epochs.as_of

    @property
    def deleted_rows(self) -> int:
        """Rows of the epoch under way that were deleted before they were read; of this process."""
        return 0 if self._progress is None else self._progress.deleted_rows

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch, which its order depends on. Workers of a loader see it, too."""
        if not 0 <= epoch < 1 << 62:
            raise ValueError(f"epoch {epoch} is not 0 or more")
        self._shared[0] = epoch

    def __iter__(self) -> Iterator[Any]:
        """Batches of one epoch. Raises what reading raises, SampleNotFound where drop_last cannot be kept (see `rows`)."""
        if worker_info() is not None:
            self._shared[1] = 1
        where = place(self._rank, self._world_size)
        if self._options.follow:
            self._follower = Follower(self._connection.client(), self._options, self._arrays, where, self._since)
            yield from self._follower.batches()
            return
        order, progress = self._begin(where, self._resuming)
        self._progress, self._resuming = progress, None
        held: dict[int, Held] = {}
        mixed = self._mixed(order, progress, held)
        marks: list[int] = []
        at, batch = 0, self._options.batch
        while progress.batches_left is None or progress.batches_left > 0:
            if len(marks) - at < batch:
                marks, at = marks[at:], 0
                while len(marks) < batch and (more := next(mixed, None)) is not None:
                    marks += more
            picked = marks[at : at + batch]
            at += len(picked)
            if not picked or (len(picked) < batch and self._options.drop_last):
                break
            progress.mark = picked[-1]
            progress.batches += 1
            progress.rows += len(picked)
            progress.rows_left -= len(picked)
            if progress.batches_left is not None:
                progress.batches_left -= 1
            yield batch_of(_taken(held, picked), self._options, self._arrays)
        if progress.batches_left:
            raise SampleNotFound(
                f"{progress.deleted_rows} rows of this rank were deleted during the epoch, so {progress.batches_left} of its "
                "batches cannot be filled, and other ranks have more: take a new as_of, or drop_last=False"
            )

    def _begin(self, where: Place, state: Progress | None) -> tuple[list[Turn], Progress]:
        """What is left to read of an epoch: all of it, or what comes after a state. Rows deleted since then are counted."""
        options, epochs = self._options, self._epochs
        as_of = epochs.as_of if state is None else state.as_of
        there = [member for member in self._members if member.committed_unix_ns <= as_of]
        cut = epochs.cut if state is None else Cut(state.split, epochs.cut.stretch_rows)
        number = int(self._shared[0]) if state is None else state.epoch
        mine = (unit for unit in plan.stretches(there, cut) if unit.is_of(where))
        order = plan.turns(mine, options.seed, number)
        if state is None:
            owed = None
            if options.drop_last and where.world_size > 1:
                owed = plan.full_batches(epochs.counted, options.batch, where)
            width = plan.window(sum(member.rows for member in there), options.buffer_rows, where.shards)
            left = sum(turn.stretch.rows for turn in order)
            return order, Progress(number, as_of, cut.split, width, left, owed)
        reached = plan.place_of(state.mark) if state.mark >= 0 else -1
        order = [turn for turn in order if turn.key + state.window > reached]
        left = sum(self._left(turn, state) for turn in order)
        gone = max(0, state.rows_left - left)
        state.deleted_rows += gone
        state.rows_left -= gone
        return order, state

    def _left(self, turn: Turn, progress: Progress) -> int:
        """Rows of a stretch that come after the mark."""
        if progress.mark < 0 or turn.key > plan.place_of(progress.mark):
            return turn.stretch.rows
        return sum(mark > progress.mark for mark in turn.marks(self._options.seed, progress.epoch, progress.window))

    def _mixed(self, order: Sequence[Turn], progress: Progress, held: dict[int, Held]) -> Iterator[list[int]]:
        """Marks of rows in their order, about a batch at a time. `held` gets what holds them, by tag."""
        begun = progress.mark
        waiting: list[int] = []
        new = 0  # Of these, since they were sorted: sorting all for each stretch, or each batch, would cost more than reads.
        wanted = (turn for turn in order if self._left(turn, progress))
        read = read_stretches(
            self._connection.client(), ((turn, turn.stretch) for turn in wanted), self._arrays, self._options.retry_s
        )
        for turn, found in read:
            if new >= max(self._options.batch, len(waiting) // 8):
                waiting.sort()
                at = bisect_left(waiting, plan.first_mark(turn.key))  # Those before it are all known.
                ready, waiting, new = waiting[:at], waiting[at:], 0
                yield ready
            marks = turn.marks(self._options.seed, progress.epoch, progress.window)
            left = marks if begun < 0 else [mark for mark in marks if mark > begun]
            if found is None:
                progress.deleted_rows += len(left)
                progress.rows_left -= len(left)
                continue
            found.left = len(left)
            held[turn.tag] = found
            waiting += left
            new += len(left)
        waiting.sort()
        yield waiting

    def state_dict(self) -> dict[str, Any]:
        """Where this epoch is, as plain values of a few hundred bytes. Raises RuntimeError where only worker processes know."""
        if worker_info() is None and self._shared[1]:
            raise RuntimeError(
                "worker processes read this stream, so its state is theirs: "
                "use torchdata's StatefulDataLoader and its state_dict(), or num_workers=0"
            )
        where = place(self._rank, self._world_size)
        if self._options.follow:
            since = self._since if self._follower is None else self._follower.since
            return {**self._kept(where), "as_of": since}
        progress = self._resuming or self._progress or self._begin(where, None)[1]
        # As text: they are longer than the integers of some readers of JSON.
        return {**self._kept(where), **asdict(progress), "window": hex(progress.window), "mark": hex(progress.mark)}

    def _kept(self, where: Place) -> dict[str, Any]:
        return {"version": STATE_VERSION, "stream": self._options.fingerprint(), "place": list(asdict(where).values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on where `state` was taken. Raises ValueError for a state of another stream or place."""
        where = place(self._rank, self._world_size)
        try:
            version, stream, of = state["version"], state["stream"], tuple(map(int, state["place"]))
            as_of = int(state["as_of"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("this is not the state of a stream of rows") from error
        if version != STATE_VERSION:
            raise ValueError(f"this state is of version {version}, and this stream reads version {STATE_VERSION}")
        if of != tuple(asdict(where).values()):
            raise ValueError(f"this state is of (rank, ranks, worker, workers) {of}, not of {where}: keep ranks and workers")
        if stream != self._options.fingerprint():
            raise ValueError("this state is of a stream with other samples, layers, batch, seed, buffer_rows or drop_last")
        if self._options.follow:
            self._since, self._follower = as_of, None
            return
        if as_of > self.as_of:
            raise ValueError(f"this state is of a later moment ({as_of}) than this stream's as_of ({self.as_of})")
        self._resuming = _progress_of(state)
        self._shared[0] = self._resuming.epoch


def _progress_of(state: Mapping[str, Any]) -> Progress:
    """Raises ValueError."""
    try:
        numbers = {name: int(state[name]) for name in _NUMBERS}
        owed = None if state["batches_left"] is None else int(state["batches_left"])
        return Progress(window=int(state["window"], 16), mark=int(state["mark"], 16), batches_left=owed, **numbers)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("this is not the state of a stream of rows") from error


def _taken(held: dict[int, Held], marks: Sequence[int]) -> list[Part]:
    """What holds the rows of these marks, each for no longer than its last row."""
    places: dict[int, list[int]] = defaultdict(list)
    for at, tag in enumerate(plan.tags_of(marks)):
        places[tag].append(at)
    rows = plan.rows_of(marks)
    parts = []
    for tag, of_tag in places.items():
        one = held[tag]
        parts.append(Part(one, [rows[at] for at in of_tag], of_tag))
        one.left -= len(of_tag)
        if not one.left:
            del held[tag]
    return parts
