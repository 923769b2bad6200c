"""Rows in memory, as torch or as numpy has them: what a stream of rows holds of a stretch, and what it makes of a batch."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

from slotstream.client.reading import RowReader
from slotstream.client.tensors import empty_tensor, receive_rows, require_torch
from slotstream.wire.errors import ConfigError

_LARGE_BYTES = 2048  # Of a row: its copy takes longer than a turn of a loop.
Part = tuple[Any, Sequence[int], Sequence[int]]  # Rows that are held, the numbers of those wanted, and their places in a batch.


class Arrays(Protocol):
    """Held rows are [rows, layers, hidden] in the stored dtype; a batch is what the trainer gets."""

    def receive(self, reader: RowReader) -> Any:
        """All rows of `reader`, in memory of their own. Raises what iterating the reader raises, and MemoryError."""

    def gather(self, parts: Sequence[Part]) -> Any:
        """[rows, layers, hidden] of the rows that the parts name, each at its place. They have every place once."""

    def layer(self, rows: Any, at: int) -> Any:
        """[rows, hidden] of one layer, contiguous, as the trainer wants it."""

    def numbers(self, values: Sequence[int] | Sequence[bool]) -> Any:
        """int64 [len(values)], or bool where they are."""


class TorchArrays:
    """Tensors of a dtype (None: the stored one) on a device (None: the CPU)."""

    def __init__(self, dtype: Any, device: Any) -> None:
        """Raises ImportError where torch is missing, ConfigError for a dtype that it has not."""
        torch = require_torch()
        self._dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and not isinstance(self._dtype, torch.dtype):
            raise ConfigError(f"dtype {dtype!r} is not one of torch's")
        self._device = device

    def receive(self, reader: RowReader) -> Any:
        return receive_rows(reader)

    def gather(self, parts: Sequence[Part]) -> Any:
        torch = require_torch()
        if _has_numpy() and _are_of_one_kind(parts):
            first = parts[0][0]
            laid = empty_tensor((_count(parts), *first.shape[1:]), first.dtype)
            _copy(_torch_bytes(laid), [(_torch_bytes(rows), wanted, places) for rows, wanted, places in parts])
            return laid
        order = torch.empty(_count(parts), dtype=torch.int64)
        order[torch.tensor([place for _, _, places in parts for place in places])] = torch.arange(len(order))
        laid = torch.cat([rows.index_select(0, torch.tensor(wanted)) for rows, wanted, _ in parts])
        return laid.index_select(0, order)

    def layer(self, rows: Any, at: int) -> Any:
        return rows[:, at].to(device=self._device, dtype=self._dtype).contiguous()

    def numbers(self, values: Sequence[int] | Sequence[bool]) -> Any:
        return require_torch().tensor(values, device=self._device)  # Which makes int64 or bool of them.


class NumpyArrays:
    """float32 arrays. Rows are held in the stored dtype."""

    def __init__(self) -> None:
        """Raises ImportError where numpy is missing."""
        import numpy

        self._numpy: Any = numpy

    def receive(self, reader: RowReader) -> Any:
        memory = bytearray(reader.nbytes)
        reader.read_into(memoryview(memory))
        return self.of(memory, reader.info.dtype, reader.row_format.columns[0].shape(reader.num_rows))

    def of(self, memory: Any, dtype: str, shape: Sequence[int]) -> Any:
        """The array that lies in `memory`, in its stored dtype, which safetensors spells so."""
        # numpy has no bfloat16: its upper halves of float32 are held as they are.
        stored = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[dtype]
        return self._numpy.frombuffer(memory, dtype=stored).reshape(shape)

    def gather(self, parts: Sequence[Part]) -> Any:
        if not _are_of_one_kind(parts):
            parts = [(self.float32(rows[wanted]), range(len(wanted)), places) for rows, wanted, places in parts]
        first = parts[0][0]
        laid = self._numpy.empty((_count(parts), *first.shape[1:]), dtype=first.dtype)
        _copy(self._bytes(laid), [(self._bytes(rows), wanted, places) for rows, wanted, places in parts])
        return laid

    def _bytes(self, rows: Any) -> Any:
        return rows.reshape(len(rows), -1).view(self._numpy.uint8)

    def layer(self, rows: Any, at: int) -> Any:
        return self.float32(rows[:, at])

    def float32(self, rows: Any) -> Any:
        """A copy: bfloat16 is the upper half of a float32."""
        if rows.dtype.kind == "u":
            return (rows.astype(self._numpy.uint32) << 16).view(self._numpy.float32)
        return self._numpy.ascontiguousarray(rows, dtype=self._numpy.float32)

    def numbers(self, values: Sequence[int] | Sequence[bool]) -> Any:
        return self._numpy.asarray(values)


def _count(parts: Sequence[Part]) -> int:
    return sum(len(places) for _, _, places in parts)


def _are_of_one_kind(parts: Sequence[Part]) -> bool:
    """Whether all have one dtype and one shape of a row."""
    first = parts[0][0]
    return all(rows.dtype == first.dtype and rows.shape[1:] == first.shape[1:] for rows, _, _ in parts)


def _copy(target: Any, parts: Sequence[Part]) -> None:
    """Rows as bytes, [rows, bytes] each. numpy copies them in half the time that torch takes to select them.

    It copies each row twice, and makes memory for that: large ones are copied one by one.
    """
    nbytes = target.shape[1]
    if nbytes < _LARGE_BYTES:
        for rows, wanted, places in parts:
            target[places] = rows[wanted]
        return
    to = memoryview(target).cast("B")
    for rows, wanted, places in parts:
        source = memoryview(rows).cast("B")
        for at, place in zip(wanted, places, strict=True):
            to[place * nbytes : (place + 1) * nbytes] = source[at * nbytes : (at + 1) * nbytes]


def _torch_bytes(rows: Any) -> Any:
    return rows.view(require_torch().uint8).reshape(len(rows), -1).numpy()


@functools.cache
def _has_numpy() -> bool:
    """torch can be installed without it."""
    return importlib.util.find_spec("numpy") is not None
