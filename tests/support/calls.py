"""Calls of Python and C functions, counted: what a hook does on the engine's thread, without times."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(hook: Callable[[], object], of: str = "") -> int:
    """Python and C calls that a hook makes; or only C calls of functions and methods of the package `of`."""
    seen = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        if not of:
            seen += event in ("call", "c_call")
        elif event == "c_call":
            owner = type(getattr(argument, "__self__", None)).__module__
            seen += of in (owner.partition(".")[0], (argument.__module__ or "").partition(".")[0])

    collects = gc.isenabled()
    gc.disable()  # What is called when it collects is no work of the hook's.
    sys.setprofile(count)
    try:
        hook()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return seen if of else seen - 2  # The hook itself, and the end of counting.
