"""Reads what is stored, slowly and again and again, to find bit rot before a trainer does; damaged samples are quarantined.

The walk follows the catalogue's row numbers, which samples get as they are first seen; where it is survives a restart.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from slotstream.store.records import SampleRecord, State
from slotstream.store.upkeep.lifetimes import Lifetimes
from slotstream.store.upkeep.verifying import IO_ERROR, UNSUPPORTED
from slotstream.wire.errors import SlotStreamError

_log = logging.getLogger(__name__)
_META = "scrub"
_PAGE = 256
_REMEMBER_S = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where scrubbing is. Times in Unix nanoseconds, 0 for never."""

    row: int = 0  # Rows up to here are done in this pass.
    begun_unix_ns: int = 0  # The pass under way, or the last one.
    ended_unix_ns: int = 0  # The last whole pass.
    samples: int = 0  # Checked in the pass under way.
    damaged: int = 0  # Found in the pass under way.

    @property
    def is_under_way(self) -> bool:
        return self.begun_unix_ns > self.ended_unix_ns


class _Stopped(Exception):
    """The server is stopping: the sample being read is left for the next start."""


class Scrubber:
    """Scrubs one store. `run_pass` blocks for as long as a pass takes; `stop`, from any thread, ends it."""

    def __init__(self, lifetimes: Lifetimes, bytes_per_s: float, checked: Callable[[int], None] = lambda _: None) -> None:
        """`bytes_per_s`: how fast it reads; `checked` is told of bytes that were read."""
        self._lifetimes = lifetimes
        self._bytes_per_s = bytes_per_s
        self._checked = checked
        self._stopping = threading.Event()
        self._remembered_at = 0.0
        self.progress = self._load()

    def stop(self) -> None:
        self._stopping.set()

    def due_in_s(self, every_s: float) -> float:
        """Seconds until the next pass should begin; 0 when one is under way. A new store's first is `every_s` away."""
        progress = self.progress
        if progress.is_under_way:
            return 0.0
        now = self._lifetimes.clock.now()
        if not progress.ended_unix_ns:
            self.progress = replace(progress, begun_unix_ns=now, ended_unix_ns=now)
            self._save()
            return every_s
        return min(every_s, max(0.0, every_s - (now - progress.begun_unix_ns) / 1e9))

    def run_pass(self) -> bool:
        """Check every committed sample, from where the last run stopped. False when stopped, or the store is in trouble."""
        if not self.progress.is_under_way:
            self.progress = Progress(begun_unix_ns=self._lifetimes.clock.stamp(), ended_unix_ns=self.progress.ended_unix_ns)
        try:
            while page := self._lifetimes.records_after(self.progress.row, _PAGE):
                for row, record in page:
                    self._check(row, record)
        except _Stopped:
            self._save()
            return False
        except SlotStreamError as error:
            _log.warning("scrubbing stops for now: %s", error)
            return False
        self.progress = replace(self.progress, row=0, ended_unix_ns=self._lifetimes.clock.stamp())
        self._save()
        _log.info("scrubbed %d samples, %d damaged", self.progress.samples, self.progress.damaged)
        return True

    def _check(self, row: int, record: SampleRecord) -> None:
        if self._stopping.is_set():
            raise _Stopped
        progress = replace(self.progress, row=row)
        if record.state is State.COMMITTED:
            verdict = self._lifetimes.scrub(record, self._slow_down)
            damaged = verdict is not None and self._lifetimes.quarantine(verdict) is not None
            if verdict is not None and verdict.damage in (IO_ERROR, UNSUPPORTED):
                _log.warning("sample %s cannot be checked now: %s: %s", record.key, verdict.damage, verdict.message)
            progress = replace(progress, samples=progress.samples + 1, damaged=progress.damaged + damaged)
        self.progress = progress
        if time.monotonic() - self._remembered_at >= _REMEMBER_S:
            self._save()

    def _slow_down(self, nbytes: int) -> None:
        self._checked(nbytes)
        if self._stopping.wait(nbytes / self._bytes_per_s):
            raise _Stopped

    def _load(self) -> Progress:
        text = self._lifetimes.remembered(_META)
        if text is None:
            return Progress()
        try:
            values = json.loads(text)
            return Progress(**{name: int(values[name]) for name in asdict(Progress())})
        except (ValueError, TypeError, KeyError):
            return Progress()  # Another version's, or not ours: begin again.

    def _save(self) -> None:
        self._remembered_at = time.monotonic()
        try:
            self._lifetimes.remember(_META, json.dumps(asdict(self.progress)))
        except SlotStreamError as error:
            _log.warning("where scrubbing is cannot be remembered: %s", error)
