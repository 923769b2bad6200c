"""Tells the log how far something long has come."""

from __future__ import annotations

import logging
import time

EVERY_S = 10.0


class Progress:
    """One line every ten seconds. For one thread."""

    def __init__(self, log: logging.Logger, what: str, of: int = 0) -> None:
        """`what`: a sentence with %s for how many are done. `of`: how many there are; 0 where that is not known."""
        self._log, self._what, self._of = log, what, f" of {of}" if of else ""
        self.done = 0
        self._next = time.monotonic() + EVERY_S

    def step(self, more: int = 1) -> None:
        """So many more are done."""
        self.done += more
        if (now := time.monotonic()) >= self._next:
            self._next = now + EVERY_S
            self._log.info(self._what, f"{self.done}{self._of}")
