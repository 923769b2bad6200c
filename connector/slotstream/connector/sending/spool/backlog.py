"""Samples whose rows only the spool has, and whose turn has come to be sent beside what the engine captures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from slotstream.connector.sending.sample_state import SampleState
from slotstream.connector.sending.spool.files import SpoolFile
from slotstream.connector.sending.spool.reader import SpoolReader

AT_ONCE = 64  # Samples on their way out of the spool.
_UNREAD_S, _UNREAD_S_MAX = 0.5, 30.0


class Backlog:
    """Samples of this engine first, then the files that earlier engines left, each of which is read for its sample.

    For the pump's thread. A sample has its turn from `next` until it is `done`, or `refused`: then it comes again, and others
    may be sent meanwhile. A server that refuses many gets fewer at a time, down to one more a tick.
    """

    def __init__(self, reader: SpoolReader) -> None:
        self._reader = reader
        self._samples: deque[SampleState] = deque()
        self._again: deque[SampleState] = deque()  # Those that were refused before: every other turn is theirs.
        self._again_is_next = False
        self._files: deque[SpoolFile] = deque()
        self._unread: list[SpoolFile] = []  # Which the disk did not let be read.
        self._unread_pause_s = _UNREAD_S
        self._read_again_at = 0.0
        self._turns: set[SampleState] = set()
        self._turns_max = AT_ONCE
        self._loading = 0  # Files that are being read.

    @property
    def files(self) -> int:
        """Files whose samples are not known yet."""
        return len(self._files) + len(self._unread) + self._loading

    def add(self, sample: SampleState) -> None:
        """A sample that waits for its turn."""
        self._samples.append(sample)

    def add_again(self, sample: SampleState) -> None:
        """One that was refused, and has waited."""
        self._again.append(sample)

    def adopted(self, files: Iterable[SpoolFile]) -> None:
        """Files of an earlier engine."""
        self._files.extend(files)

    def loaded(self, file: SpoolFile, *, link_up: bool) -> bool:
        """A file was read; whether its sample can be of use now. Else it is read again, when there is a link."""
        self._loading -= 1
        self._unread_pause_s = _UNREAD_S
        if not link_up:
            self._files.appendleft(file)
        return link_up

    def unread(self, file: SpoolFile, now: float) -> None:
        """The disk did not let a file be read: it is read again after a pause, which grows while that goes on."""
        self._loading -= 1
        if not self._unread:
            self._read_again_at = now + self._unread_pause_s
            self._unread_pause_s = min(2 * self._unread_pause_s, _UNREAD_S_MAX)
        self._unread.append(file)

    def next(self) -> SampleState | None:
        """A sample whose turn it is, if there is one. The link is up."""
        while len(self._turns) + self._loading < self._turns_max:
            waiting = self._again if self._again_is_next and self._again else self._samples
            if not (waiting or self._files):
                waiting = self._again
            self._again_is_next = waiting is not self._again
            if waiting:
                sample = waiting.popleft()
                self._turns.add(sample)
                return sample
            if not self._files:
                break
            self._loading += 1
            self._reader.load(self._files.popleft())
        return None

    def has_turn(self, sample: SampleState) -> bool:
        """Whether it has its turn now."""
        return sample in self._turns

    def done(self, sample: SampleState) -> None:
        """A sample is over, and with it its turn, if it had one."""
        if sample in self._turns:
            self._turns.remove(sample)
            self._turns_max = min(AT_ONCE, self._turns_max + 1)

    def refused(self, sample: SampleState) -> None:
        """A sample backs off: its turn is over, if it had one, and nobody has it in its place before the next tick."""
        if sample in self._turns:
            self._turns.remove(sample)
            self._turns_max -= 1

    def tick(self, now: float) -> None:
        """Called about once a second."""
        self._turns_max = min(AT_ONCE, self._turns_max + 1)
        if self._unread and self._read_again_at <= now:
            self._files.extend(self._unread)
            self._unread.clear()

    def link_down(self) -> None:
        """Nothing has its turn any more, or waits for one: the next link starts over."""
        self._samples.clear()
        self._again.clear()
        self._turns.clear()
        self._turns_max = AT_ONCE
