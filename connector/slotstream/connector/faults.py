"""Samples that failed in the worker. The scheduler half tells the caller, where it still can; metrics and log hear of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from slotstream.common.logtext import log_text
from slotstream.common.throttle import Throttle
from slotstream.connector.counters import Counters
from slotstream.transport.logs import connector_logger
from slotstream.wire.errors import PermissionDenied, Unauthenticated

logger = connector_logger(__name__)

_DENIALS = frozenset({PermissionDenied.code, Unauthenticated.code})


@dataclass(frozen=True, slots=True)
class SampleFault:
    """A sample that failed after it was planned."""

    req_id: str
    code: str
    message: str


class Faults:
    """The pump adds, the engine's thread takes."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._items: list[SampleFault] = []
        self._throttle = Throttle(every_s=10.0)
        self._throttle_denied = Throttle(every_s=60.0)  # It takes a person to change what the server denies.

    def add(self, sample_id: str, fault: SampleFault) -> None:
        """A sample failed, for good."""
        self._counters.add("samples_failed", code=fault.code)
        if fault.req_id:  # Without one it is an earlier engine's: nobody here waits for it.
            with self._lock:
                self._items.append(fault)
        throttle = self._throttle_denied if fault.code in _DENIALS else self._throttle
        if (unsaid := throttle.admit(fault.code)) is not None:
            more = f" ({unsaid} more with this code were not logged)" if unsaid else ""
            logger.warning("slotstream: sample %s failed: %s%s", sample_id, log_text(fault.code, fault.message), more)

    def take(self) -> list[SampleFault]:
        """Those added since the last call."""
        with self._lock:
            taken, self._items = self._items, []
        return taken
