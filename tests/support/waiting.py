"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 60.0


def wait_until(condition: Callable[[], bool], what: str = "it") -> None:
    """Returns once `condition()` is true; fails, naming `what`, when it has not become so within WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} never happened"
        time.sleep(0.005)
