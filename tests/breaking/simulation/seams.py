"""Where the server meets threads, time and chance: its modules get the simulation's in place of Python's."""

from __future__ import annotations

import concurrent.futures
import importlib
import pkgutil
import queue
import secrets
import sqlite3
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

from simulation import threads
from simulation.disk import SimConnection

import slotstream.server
import slotstream.store
from slotstream.store.catalogue.sqlite import database, opening
from slotstream.store.sample import row_hash

_GROUP_BYTES = 1024  # Of hash groups: small samples have several.
_LOG_PAGES = 1 << 20  # No checkpoint but the one of a clean stop: `power.cut_log` would not know what it synced.
_READERS = 2  # Connections of the catalogue: each start opens them.
# What a module may have of it -> what it gets.
_REPLACED: dict[Any, Any] = {
    threading: threads.SimThreading,
    queue: threads.SimQueue,
    time: threads.SimTime,
    secrets: threads.SimSecrets,
    concurrent.futures.Future: threads.Future,
    concurrent.futures.wait: threads.wait,
    concurrent.futures.ThreadPoolExecutor: threads.ThreadPoolExecutor,
}
_PAST = ("threading", "_thread", "queue", "_queue", "time", "secrets")  # Whose functions are to be asked for by `module.name`.
_LEFT_ALONE = (
    "slotstream.server.processes",
    "slotstream.server.nixl",
    "slotstream.server.app",
    "slotstream.store.catalogue.postgres",
)


def install() -> None:
    """In this process, for good: it simulates, and does nothing else."""
    for package in (slotstream.store, slotstream.server):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.startswith(_LEFT_ALONE):
                importlib.import_module(found.name)
    for name, module in list(sys.modules.items()):
        if name.startswith("slotstream.") and not name.startswith(_LEFT_ALONE):
            _replace(module)
    connections: dict[str, Any] = {**vars(sqlite3), "connect": SimConnection.connect}
    opening.sqlite3 = SimpleNamespace(**connections)  # type: ignore[attr-defined,assignment]
    opening._LOG_PAGES = _LOG_PAGES
    opening.READERS = database.READERS = _READERS  # type: ignore[attr-defined]
    row_hash.GROUP_BYTES = _GROUP_BYTES


def _replace(module: ModuleType) -> None:
    for name, value in list(vars(module).items()):
        assert getattr(value, "__module__", "") not in _PAST, f"{module.__name__}.{name} goes past the simulation"
        try:
            replacement = _REPLACED.get(value)
        except TypeError:  # It cannot be a key.
            continue
        if replacement is not None:
            setattr(module, name, replacement)
