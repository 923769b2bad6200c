"""Samples that no reader can use: what a pass of a SampleDataset does with them."""

from __future__ import annotations

import logging

from slotstream.wire.errors import BadLayers, ConfigError, Damaged, SampleFailed, SlotStreamError, UnsupportedFormat

_log = logging.getLogger(__name__)
_BAD = (Damaged, UnsupportedFormat, BadLayers)
_NAMED_MAX = 10_000  # Of one process; who has more has read enough of them.


class BadSamples:
    """Decides for one pass at a time; `begin` begins one. It can be pickled.

    Bad are damaged samples, those of a format that is not known here, and those that lack a layer that was asked for. What may
    pass, as a server that is away or a disk that does not answer, is never bad, nor is a right that the token lacks.
    """

    def __init__(self, on_bad: str, bad_max: int) -> None:
        """Raises ConfigError."""
        if on_bad not in ("raise", "skip"):
            raise ConfigError(f"on_bad must be 'raise' or 'skip', not {on_bad!r}")
        if isinstance(bad_max, bool) or not isinstance(bad_max, int) or bad_max < 1:
            raise ConfigError(f"bad_max must be a whole number from 1 on, not {bad_max!r}")
        self.skips = on_bad == "skip"
        self._bad_max = bad_max
        self._in_a_row = 0
        self._named: set[str] = set()
        self._last: tuple[str, SlotStreamError] | None = None

    def begin(self) -> None:
        """A pass begins, or the rest of one."""
        self._in_a_row, self._last = 0, None

    def good(self) -> None:
        """A sample could be used."""
        self._in_a_row = 0

    def skip(self, name: str, error: SlotStreamError) -> bool:
        """Whether to go on behind a sample that cannot be read. Raises where too many came one after the other."""
        if not self.skips or not _is_bad(error):
            return False
        self._last = name, error
        self._in_a_row += 1
        if name not in self._named and len(self._named) < _NAMED_MAX:
            self._named.add(name)
            _log.warning("slotstream: sample %s is left out: %s: %s", name, error.code, error)
        if self._in_a_row >= self._bad_max:
            raise self._error(f"{self._in_a_row} bad samples in a row, as many as bad_max allows")
        return True

    def end(self, received: int) -> None:
        """A pass is over, with so many good samples. Raises where there were bad ones only."""
        if self._last is not None and not received:
            raise self._error("every sample of this pass is bad")

    def _error(self, what: str) -> SlotStreamError:
        assert self._last is not None
        name, error = self._last
        kind = type(error) if isinstance(error, _BAD) else Damaged
        return kind(f"{what}: the last is {name} ({error})")


def _is_bad(error: SlotStreamError) -> bool:
    """A damaged sample is taken out of service once somebody met its damage."""
    return isinstance(error, _BAD) or (isinstance(error, SampleFailed) and error.reason == Damaged.code)
