"""Samples whose rows say which row, layer and element they are, in any dtype, without torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from slotstream.wire.columns import RowFormat


def _encode(dtype: str, values: list[float]) -> bytes:
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    packed = struct.pack(f"<{len(values)}f", *values)
    # bfloat16 is the upper half of a float32; exact for the integers below 256 that are used here.
    return packed if dtype == "F32" else b"".join(packed[i + 2 : i + 4] for i in range(0, len(packed), 4))


@dataclass(frozen=True)
class SyntheticSample:
    """What a connector would send. `hidden_states[row, j, k] == (31 * row + 7 * layer_ids[j] + k + seed) % 251`, exactly."""

    sample_id: str
    namespace: str = "default"
    model: str = "test/model"
    dtype: str = "BF16"
    layer_ids: tuple[int, ...] = (1, 2, 4)
    hidden_size: int = 16
    num_tokens: int = 40
    seed: int = 0
    tags: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=lambda: {"engine_id": "test-engine"})

    @property
    def token_ids(self) -> list[int]:
        return [1000 + self.seed + row for row in range(self.num_tokens)]

    @property
    def row_bytes(self) -> int:
        return self.row_format.row_bytes

    @property
    def row_format(self) -> RowFormat:
        return RowFormat.of(self.dtype, len(self.layer_ids), self.hidden_size)

    def value(self, row: int, layer_id: int, element: int) -> float:
        return float((31 * row + 7 * layer_id + element + self.seed) % 251)

    def rows(self, start: int = 0, stop: int | None = None, layers: tuple[int, ...] | None = None) -> bytes:
        """The bytes of rows [start, stop), [rows, layers, hidden], of the layers named."""
        stop = self.num_tokens if stop is None else stop
        wanted = self.layer_ids if layers is None else layers
        values = [self.value(r, i, k) for r in range(start, stop) for i in wanted for k in range(self.hidden_size)]
        return _encode(self.dtype, values)
