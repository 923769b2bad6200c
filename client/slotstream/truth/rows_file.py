"""A safetensors file of rows, of any extractor: `hidden_states` [tokens, layers, hidden], `token_ids` [tokens]."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

_HIDDEN, _TOKENS = "hidden_states", ("token_ids", "input_ids")
_PART_BYTES = 32 << 20


class NoRows(Exception):
    """The file holds no rows with token ids; the message says why."""


class RowsFile:
    """An open file; of its rows only those that are asked for are in memory."""

    def __init__(self, path: Path) -> None:
        """Raises NoRows."""
        import safetensors

        opened: Any = safetensors.safe_open  # Without types.
        try:
            self._file: Any = opened(path, framework="pt")
            names = set(self._file.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise NoRows(f"it is no safetensors file: {error}") from error
        self.metadata: dict[str, str] = dict(self._file.metadata() or {})
        tokens = next((name for name in _TOKENS if name in names), None)
        if _HIDDEN not in names or tokens is None:
            raise NoRows(f"it has no {_HIDDEN} with {_TOKENS[0]}: {sorted(names)[:8]}")
        self.token_ids: torch.Tensor = self._file.get_tensor(tokens).flatten()
        self._rows = self._file.get_slice(_HIDDEN)
        shape = tuple(self._rows.get_shape())
        if len(shape) not in (2, 3) or self.token_ids.is_floating_point() or not len(self.token_ids):
            raise NoRows(f"{_HIDDEN} has the shape {list(shape)}, and {tokens} is {self.token_ids.dtype}")
        self.token_ids = self.token_ids.long()
        self.shape = shape if len(shape) == 3 else (shape[0], 1, shape[1])

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop), [rows, layers, hidden]. Raises NoRows where their elements are no floats."""
        rows: torch.Tensor = self._rows[start:stop]
        if not rows.is_floating_point():
            raise NoRows(f"its rows are {rows.dtype}")
        return rows.reshape(-1, *self.shape[1:])

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """All rows, a few MiB at a time: the first one's number, and the rows."""
        count = max(1, _PART_BYTES // max(1, self.shape[1] * self.shape[2] * 4))
        for first in range(0, self.shape[0], count):
            yield first, self.rows(first, min(first + count, self.shape[0]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del self._rows, self._file
