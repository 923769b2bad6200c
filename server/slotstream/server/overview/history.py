"""What the server counted over the last hour: a reading of its counters every ten seconds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_READ_S = 10.0
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Counted:
    """The counters at one moment. `at`: monotonic seconds; `failed`: samples by code; `free_bytes`: None while unknown."""

    at: float
    committed: float = 0.0
    received_bytes: float = 0.0
    sent_bytes: float = 0.0
    failed: Mapping[str, float] = field(default_factory=dict)
    free_bytes: int | None = None


class History:
    """Any thread may note and ask."""

    def __init__(self, read: Callable[[float], Counted], clock: Callable[[], float] | None = None) -> None:
        """`read` reads the counters, at the moment that it is given."""
        self._read = read
        self._clock = clock or (lambda: time.monotonic())  # As in `Engines`.
        self._lock = threading.Lock()
        self._readings = deque([read(self._clock())], maxlen=int(_HOUR_S / _READ_S) + 1)

    def note(self) -> None:
        """Takes a reading when one is due. Called every second or so."""
        now = self._clock()
        with self._lock:
            if now - self._readings[-1].at < _READ_S:
                return
        reading = self._read(now)
        with self._lock:
            self._readings.append(reading)

    def over(self, seconds: float, now: Counted | None = None, *, of_disk: bool = False) -> tuple[Counted, Counted]:
        """The earliest reading of the last `seconds`, or the last there is, and one of now: the one given, else a new one.

        `of_disk`: the earliest that knows the disk.
        """
        now = now or self._read(self._clock())
        with self._lock:
            known = [one for one in self._readings if one.free_bytes is not None] if of_disk else list(self._readings)
            within = [reading for reading in known if now.at - reading.at <= seconds]
            return (within or list(self._readings)[-1:])[0], now


def failed_between(before: Counted, now: Counted) -> dict[str, int]:
    """How many samples failed between two readings, by code; codes of none are left out."""
    counts = {code: round(count - before.failed.get(code, 0.0)) for code, count in now.failed.items()}
    return {code: count for code, count in counts.items() if count > 0}


def hours_until_full(before: Counted, now: Counted, free_bytes_min: int) -> float | None:
    """When no sample fits any more, if the disk goes on filling as it did between two readings; None: it did not fill."""
    if before.free_bytes is None or now.free_bytes is None or now.free_bytes >= before.free_bytes or now.at <= before.at:
        return None
    bytes_per_s = (before.free_bytes - now.free_bytes) / (now.at - before.at)
    return max(0.0, now.free_bytes - free_bytes_min) / bytes_per_s / 3600.0
