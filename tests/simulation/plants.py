"""Faults to plant."""

from __future__ import annotations

from collections.abc import Callable

PLANTS: dict[str, Callable[[], None]] = {}
