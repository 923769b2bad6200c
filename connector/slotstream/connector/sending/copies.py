"""Copies between the device and staging, for those who wait for them but need not know how they are made."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

KvSlots = npt.NDArray[np.int64]  # Slots of the KV cache: block * block size + offset.


class Ticket(Protocol):
    """A copy under way."""

    @property
    def is_done(self) -> bool:
        """Whether every byte of the copy is in host memory."""

    def wait(self) -> None:
        """Return once it is. Raises whatever the device has to say where the copy failed."""


class Gathered(Ticket, Protocol):
    """Rows on their way into staging."""

    def peaks(self) -> npt.NDArray[np.float32]:
        """The largest magnitude of each row, float32 [n]; to be asked for after `wait`."""


class Copied:
    """A copy that is over."""

    is_done = True

    def wait(self) -> None:
        """Return."""


class Arrived(Copied):
    """Rows that are in staging, with their peaks, float32 [n]. Plain data: it can go to another process."""

    def __init__(self, peaks: npt.NDArray[np.float32]) -> None:
        self._peaks = peaks

    def peaks(self) -> npt.NDArray[np.float32]:
        """See `Gathered`."""
        return self._peaks
