"""Gives memory that a load has left back to the system, once the load is over.

glibc is told to keep what it gets (`malloc.py`): under load that is a third of the speed. Afterwards it would be kept for ever.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Callable

from slotstream.wire.memory import resident_bytes

_log = logging.getLogger(__name__)
_LOOK_S = 5.0
_LOOKS = 2  # So often nothing new is seen before memory is given back.
_WORTH_BYTES = 32 << 20


async def give_back_when_idle(progress: Callable[[], object], look_s: float = _LOOK_S) -> None:
    """Until it is cancelled. `progress` differs from what it was when something happened."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # Not glibc.
        return
    least, before, looks = resident_bytes(), progress(), 0
    while True:
        await asyncio.sleep(look_s)
        least = min(least, resident_bytes())
        now = progress()
        looks = looks + 1 if now == before else 0
        before = now
        if looks == _LOOKS and (had := resident_bytes()) - least >= _WORTH_BYTES:
            await asyncio.to_thread(trim, 0)  # Without the interpreter's lock, and a heap at a time: nobody waits long.
            _log.debug("gave %d bytes back to the system", had - resident_bytes())
