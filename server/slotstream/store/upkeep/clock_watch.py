"""Is the wall clock to be believed? Retention by age asks before it deletes much.

Two things are said: the clock is far ahead of where it was a moment ago, or when the store was last open (after a long stop
nobody can tell that from a leap); and samples bear times that are still to come, so the clock ran ahead once. Each stands until
the clock agrees again, or until somebody says that it is right: `serve --accept-clock`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

from slotstream.store.disk.clock import Clock
from slotstream.wire.errors import SlotStreamError

_log = logging.getLogger(__name__)
LEAP_NS = 3600 * 10**9  # What nobody corrects a clock by.
STOP_NS = 24 * 3600 * 10**9  # A stop that is no reason to ask.
_REMEMBER_NS = 600 * 10**9
_META = "clock"


@dataclass(frozen=True, slots=True)
class _Known:
    """What survives a restart: when the clock was last believed, and up to where stamps of the future are no news."""

    unix_ns: int = 0
    accepted_unix_ns: int = 0


class ClockWatch:
    """Watches the clock of one store. Not thread safe: the sweeping thread looks, and others read `trouble`."""

    def __init__(self, clock: Clock, remembered: Callable[[str], str | None], remember: Callable[[str, str], None]) -> None:
        self._clock = clock
        self._remember = remember
        self._known = _parsed(remembered(_META))
        now = clock.now()
        # A store of an earlier version remembers nothing but its samples' times.
        before = self._known.unix_ns or min(clock.last, now) or now
        self._anchor = (before if now - before >= STOP_NS else now, clock.elapsed())
        self._remembered_at = 0
        self.trouble = ""
        self.look()

    def look(self) -> str:
        """What is wrong with the clock, in a sentence; "" when nothing is. Logs it when it begins."""
        before = self.trouble
        now, elapsed = self._clock.now(), self._clock.elapsed()
        leap = now - (self._anchor[0] + elapsed - self._anchor[1])
        ahead = self._clock.last - now
        if leap >= LEAP_NS:
            self.trouble = f"the clock is {_hours(leap)} ahead of where it was: it leapt, or the server was stopped for long"
        # After those that were accepted, stamps go on by nanoseconds.
        elif ahead >= LEAP_NS and self._clock.last - self._known.accepted_unix_ns >= LEAP_NS:
            self.trouble = f"samples bear times up to {_hours(ahead)} ahead of the clock: it ran ahead, or is behind now"
        else:
            self.trouble = ""
        if self.trouble and not before:
            _log.warning("%s; if the clock is right, start with --accept-clock", self.trouble)
        if leap < LEAP_NS:
            self._anchor = (now, elapsed)
            if not self._remembered_at or elapsed - self._remembered_at >= _REMEMBER_NS:
                self._save(_Known(now, self._known.accepted_unix_ns))
        return self.trouble

    def accept(self) -> None:
        """The clock is right: what was said about it is over."""
        self._anchor = (self._clock.now(), self._clock.elapsed())
        self._save(_Known(self._anchor[0], self._clock.last))
        if self.trouble:
            _log.warning("the clock is accepted, though %s", self.trouble)
        self.look()

    def close(self) -> None:
        """Remember when the store was last open."""
        self._remembered_at = 0
        self.look()

    def _save(self, known: _Known) -> None:
        self._known = known
        self._remembered_at = self._clock.elapsed()
        try:
            self._remember(_META, json.dumps([known.unix_ns, known.accepted_unix_ns]))
        except SlotStreamError as error:
            _log.warning("what the clock says cannot be remembered: %s", error)


def _parsed(text: str | None) -> _Known:
    try:
        unix_ns, accepted_unix_ns = json.loads(text or "")
        return _Known(int(unix_ns), int(accepted_unix_ns))
    except (ValueError, TypeError):
        return _Known()  # Nothing, or another version's.


def _hours(ns: int) -> str:
    hours = ns // LEAP_NS
    return f"{hours} hours" if hours < 72 else f"{hours // 24} days"
