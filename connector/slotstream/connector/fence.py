"""The fence around the connector's hooks: nothing raises into the engine after start-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from slotstream.connector.throttle import Throttle
from slotstream.transport.logs import connector_logger

logger = connector_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
_LOG_EVERY_S = 60.0


class Fence:
    """Runs hooks. A hook that raises is counted, logged once a minute, reported to `on_trip`, and answered with a default."""

    def __init__(self, on_trip: Callable[[str, Exception], None]) -> None:
        self.trips = 0
        self._on_trip = on_trip
        self._throttle = Throttle(every_s=_LOG_EVERY_S)

    def run(self, hook: Callable[P, T], default: T, *args: P.args, **kwargs: P.kwargs) -> T:
        """`hook(*args, **kwargs)`, or `default` when that raises."""
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            self._trip(hook.__qualname__, error)
            return default

    def _trip(self, name: str, error: Exception) -> None:
        self.trips += 1
        if self._throttle.admit("") is not None:
            logger.exception(
                "slotstream: %s failed (%d faults so far); the engine goes on without its samples", name, self.trips
            )
        try:
            self._on_trip(name, error)
        except Exception:
            logger.exception("slotstream: cleaning up after a fault failed")
