"""Guards the connector's hooks: after start-up, no exception of ours reaches the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from slotstream.common.throttle import Throttle
from slotstream.transport.logs import connector_logger

logger = connector_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
_LOG_EVERY_S = 60.0
DISABLE_AFTER_S = 60.0


class HookGuard:
    """Runs hooks. One that raises is counted by `on_fault`, logged (each hook once a minute), and answered with a default.

    When every step for DISABLE_AFTER_S had a fault, `disabled` turns true, for good, and the log says so.
    """

    def __init__(self, on_fault: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.disabled = False
        self.is_clean = True  # Else `end_step` has to be called.
        self._on_fault = on_fault
        self._clock = clock
        self._faults = 0
        self._faults_before_step = 0
        self._bad_since: float | None = None
        self._throttle = Throttle(every_s=_LOG_EVERY_S)

    def run(self, hook: Callable[P, T], default: T, *args: P.args, **kwargs: P.kwargs) -> T:
        """`hook(*args, **kwargs)`, or `default` when that raises."""
        try:
            return hook(*args, **kwargs)
        except Exception:
            self._count(getattr(hook, "__qualname__", repr(hook)))
            return default

    def holds(self, hook: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Run a hook that returns nothing; False when it raised."""
        try:
            hook(*args, **kwargs)
        except Exception:
            self._count(getattr(hook, "__qualname__", repr(hook)))
            return False
        return True

    def end_step(self) -> None:
        """Called once a step, but for those without a fault behind one without: a step without a fault clears the record."""
        if self._faults == self._faults_before_step:
            self._bad_since = None
            self.is_clean = True
            return
        self._faults_before_step = self._faults
        if self._bad_since is None:
            self._bad_since = self._clock()
        elif not self.disabled and self._clock() - self._bad_since > DISABLE_AFTER_S:
            self.disabled = True
            logger.error(
                "slotstream: every step for %.0f s had a fault (%d in all): capture is off until vLLM restarts; "
                "please report the tracebacks above",
                DISABLE_AFTER_S,
                self._faults,
            )

    def _count(self, name: str) -> None:
        self._faults += 1
        self.is_clean = False
        self._on_fault()
        if self._throttle.admit(name) is not None:
            logger.exception("slotstream: %s failed (fault %d); the engine goes on without its samples", name, self._faults)
