"""Samples that failed in the worker. The scheduler half tells the caller, where it still can; metrics and log hear of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from slotstream.common.logtext import log_text
from slotstream.common.throttle import Throttle
from slotstream.connector.counters import Counters
from slotstream.transport.logs import connector_logger

logger = connector_logger(__name__)

_LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class SampleFault:
    """A sample that failed after it was planned."""

    req_id: str
    code: str
    message: str


class Faults:
    """The pump adds and ticks, the engine's thread takes. `clock`: monotonic seconds.

    The first failure of a code is logged at once, later ones once a minute, with their number: none is left unsaid for longer.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._items: list[SampleFault] = []
        self._throttle = Throttle(_LOG_EVERY_S, clock)
        self._last: dict[str, str] = {}  # By code: what is to be said of the last one.

    def add(self, sample_id: str, fault: SampleFault) -> None:
        """A sample failed, for good."""
        self._counters.add("samples_failed", code=fault.code)
        if fault.req_id:  # Without one it is an earlier engine's: nobody here waits for it.
            with self._lock:
                self._items.append(fault)
        self._last[fault.code] = f"sample {sample_id} failed: {log_text(fault.code, fault.message)}"
        if (unsaid := self._throttle.admit(fault.code)) is not None:
            self._say(fault.code, unsaid)

    def tick(self) -> None:
        """Called about once a second: say what was left unsaid a minute ago."""
        for code, unsaid in self._throttle.overdue().items():
            self._say(code, unsaid - 1)

    def _say(self, code: str, more: int) -> None:
        others = f" ({more} more with this code since the last such line)" if more else ""
        logger.warning("slotstream: %s%s", self._last.pop(code), others)

    def __bool__(self) -> bool:
        """Whether there are any to take."""
        return bool(self._items)

    def take(self) -> list[SampleFault]:
        """Those added since the last call."""
        with self._lock:
            taken, self._items = self._items, []
        return taken
