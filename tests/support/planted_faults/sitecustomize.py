"""Plants one fault in the running connector: with this directory on its path, Python runs this in every process.

SLOTSTREAM_TEST_PLANT names it. The connector's modules are changed when they are loaded; what it stores then is wrong or
missing, and neither it nor the server can know.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_PLANT = os.environ.get("SLOTSTREAM_TEST_PLANT", "")
_AT = 20  # Faults of one sample, or of one row, are in that one of them.


def _other_rows(change: Callable[[list[Any]], list[Any]]) -> Callable[[Any], None]:
    """What the forward pass writes, changed before it is written."""

    def plant(module: Any) -> None:
        write = module.write_rows
        module.write_rows = lambda pages, layers, slots: write(pages, change(list(layers)), slots)

    return plant


def _flip(module: Any) -> None:
    """One bit of one chunk, in staging, before it is hashed."""
    of, chunks = module.Digests.of, itertools.count(1)

    def call(self: Any, buffers: Sequence[memoryview]) -> Iterator[int]:
        for buffer in buffers:
            if next(chunks) == _AT:
                view = buffer.cast("B")
                view[100] ^= 1
        found: Iterator[int] = of(self, buffers)
        return found

    module.Digests.of = call


def _lose(module: Any) -> None:
    """The server is never told of one sample."""
    opened, samples = module.Outbox.open, itertools.count(1)

    def call(self: Any, item: Any) -> None:
        if next(samples) != _AT:
            opened(self, item)

    module.Outbox.open = call


_PLANTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "layer swapped": ("reading.forward_capture", _other_rows(lambda layers: [layers[1], layers[0], *layers[2:]])),
    "row shifted": ("reading.forward_capture", _other_rows(lambda layers: [rows.roll(1, 0) for rows in layers])),
    "bit flipped": ("sending.row_hashes", _flip),
    "sample lost": ("sending.outbox", _lose),
}


class _Planting(importlib.abc.MetaPathFinder):
    """Finds the one module, and plants the fault once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        where, plant = _PLANTS[_PLANT]
        if name != f"slotstream.connector.{where}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader = spec.loader
        assert loader is not None
        execute = loader.exec_module

        def planted(module: types.ModuleType) -> None:
            execute(module)
            plant(module)

        setattr(loader, "exec_module", planted)  # noqa: B010  (mypy: a method is no variable)
        return spec


if _PLANT:
    sys.meta_path.insert(0, _Planting())
