"""Samples whose rows only the spool has, and whose turn has come to be sent beside what the engine captures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from slotstream.connector.sending.sample_state import SampleState
from slotstream.connector.sending.spool.files import SpoolFile
from slotstream.connector.sending.spool.reader import SpoolReader

AT_ONCE = 64  # Samples on their way out of the spool.


class Backlog:
    """Samples of this engine first, then the files that earlier engines left, each of which is read for its sample.

    For the pump's thread. A sample has its turn from `next` until it is `done`, also while it backs off.
    """

    def __init__(self, reader: SpoolReader) -> None:
        self._reader = reader
        self._samples: deque[SampleState] = deque()
        self._files: deque[SpoolFile] = deque()
        self._turns: set[SampleState] = set()
        self._loading = 0  # Files that are being read.

    @property
    def files(self) -> int:
        """Files whose samples are not known yet."""
        return len(self._files) + self._loading

    def add(self, sample: SampleState) -> None:
        """A sample that waits for its turn."""
        self._samples.append(sample)

    def adopted(self, files: Iterable[SpoolFile]) -> None:
        """Files of an earlier engine."""
        self._files.extend(files)

    def loaded(self, file: SpoolFile, *, link_up: bool) -> bool:
        """A file was read; whether its sample can be of use now. Else it is read again, when there is a link."""
        self._loading -= 1
        if not link_up:
            self._files.appendleft(file)
        return link_up

    def next(self) -> SampleState | None:
        """A sample whose turn it is, if there is one. The link is up."""
        while len(self._turns) + self._loading < AT_ONCE:
            if self._samples:
                sample = self._samples.popleft()
                self._turns.add(sample)
                return sample
            if not self._files:
                break
            self._loading += 1
            self._reader.load(self._files.popleft())
        return None

    def done(self, sample: SampleState) -> None:
        """A sample is over, and with it its turn, if it had one."""
        self._turns.discard(sample)

    def link_down(self) -> None:
        """Nothing has its turn any more, or waits for one: the next link begins anew."""
        self._samples.clear()
        self._turns.clear()
