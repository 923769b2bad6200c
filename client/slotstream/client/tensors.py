"""A sample as torch tensors. The only module of the client, with the dataset, that uses torch; loaded when first needed."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slotstream.client.reading import RowReader
from slotstream.common.memory import map_memory
from slotstream.wire.columns import LOSS_MASK
from slotstream.wire.errors import SlotStreamError

if TYPE_CHECKING:
    import numpy
    import torch

_HUGE_BYTES = 4 << 20  # From here on in memory of its own.
_TORCH_NAMES = {
    **{"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "BOOL": "bool", "U8": "uint8"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sample:
    """Rows of one stored sample, in memory that is the caller's own."""

    namespace: str
    sample_id: str
    hidden_states: torch.Tensor  # [tokens, layers, hidden], in the dtype that the model computed
    token_ids: torch.Tensor  # int64 [tokens]; token_ids[i] is the token that row i was computed for
    layer_ids: tuple[int, ...]  # layer_ids[j] names hidden_states[:, j]: the residual stream after that many layers
    start: int  # row 0 here is row `start` of the stored sample
    tags: dict[str, str]  # the request's
    metadata: dict[str, str]  # what the connector and the store recorded; times in Unix nanoseconds
    layer_names: tuple[str, ...] = ()  # the ids as people name them: "final" is the output of the model's last norm
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what else it has, as stored: name -> [tokens, ...]

    @property
    def loss_mask(self) -> torch.Tensor | None:
        """Bool [tokens], true where a trainer's loss counts the token; None where the sample was stored without."""
        stored = self.columns.get(LOSS_MASK)
        return None if stored is None else stored != 0

    def numpy(self) -> dict[str, numpy.ndarray[Any, Any]]:
        """All columns as numpy arrays: `hidden_states` float32 [tokens, layers, hidden], `token_ids` int64 [tokens], others.

        Rows are copied where numpy has no such dtype, as of bfloat16; else the arrays share the tensors' memory.
        """
        rows = self.hidden_states if self.hidden_states.dtype.itemsize == 4 else self.hidden_states.float()
        arrays = {"hidden_states": rows.numpy(), "token_ids": self.token_ids.numpy()}
        return arrays | {name: column.numpy() for name, column in self.columns.items()}

    def __repr__(self) -> str:
        """One line, without the rows."""
        tokens, _, hidden = self.hidden_states.shape
        layers = ",".join(self.layer_names or map(str, self.layer_ids))
        dtype = str(self.hidden_states.dtype).removeprefix("torch.")
        first = f" from row {self.start}" if self.start else ""
        return f"<Sample {self.namespace}/{self.sample_id}: {tokens} tokens{first}, layers {layers}, hidden {hidden}, {dtype}>"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one sample of `get_many`: the sample, or why there is none."""

    namespace: str
    sample_id: str
    sample: Sample | None
    error: SlotStreamError | None


def require_torch() -> ModuleType:
    """torch. Raises ImportError with a sentence that names the extra."""
    try:
        import torch
    except ImportError as error:
        raise ImportError("slotstream.client returns torch tensors: pip install 'slotstream[torch]'") from error
    return torch


def torch_dtype(name: str) -> torch.dtype:
    """torch's name of a dtype that safetensors spells so."""
    found: torch.dtype = getattr(require_torch(), _TORCH_NAMES[name])
    return found


def receive_sample(reader: RowReader) -> Sample:
    """Reads all of `reader` into one tensor, allocated once; every row is copied once, into its place.

    Raises MemoryError when the rows do not fit, and what iterating the reader raises.
    """
    torch = require_torch()
    info = reader.info
    rows = receive_rows(reader)
    return Sample(
        namespace=info.namespace,
        sample_id=info.sample_id,
        hidden_states=rows,
        # frombuffer takes the array's memory over, but does not take an empty one.
        token_ids=torch.frombuffer(reader.token_ids, dtype=torch.int64)
        if reader.num_rows
        else torch.empty(0, dtype=torch.int64),
        layer_ids=reader.layer_ids,
        layer_names=reader.layer_names,
        start=reader.start,
        columns=_columns(reader),
        tags=info.tags,
        metadata={
            **info.metadata,
            "model": info.model,
            "created_unix_ns": str(info.created_unix_ns),
            "committed_unix_ns": str(info.committed_unix_ns or 0),
        },
    )


def _columns(reader: RowReader) -> dict[str, torch.Tensor]:
    torch_module = require_torch()
    tensors: dict[str, torch.Tensor] = {}
    for column in reader.row_format.further:
        dtype, shape = torch_dtype(column.dtype), column.shape(reader.num_rows)
        raw = bytearray(reader.columns[column.name])  # Which frombuffer takes over; but it does not take an empty one.
        flat = torch_module.frombuffer(raw, dtype=dtype) if raw else torch_module.empty(0, dtype=dtype)
        tensors[column.name] = flat.reshape(shape)
    return tensors


def receive_rows(reader: RowReader) -> torch.Tensor:
    """All rows of `reader`, [rows, layers, hidden] in their dtype; raises as `receive_sample`."""
    rows = _empty_rows(reader)
    # Not numpy: it has no bfloat16, and torch can be installed without it.
    reader.read_into(memoryview((ctypes.c_ubyte * reader.nbytes).from_address(rows.data_ptr())).cast("B"))
    return rows


def _empty_rows(reader: RowReader) -> torch.Tensor:
    """Memory for the rows of `reader`. Raises MemoryError where they do not fit."""
    try:
        return empty_tensor((reader.num_rows, len(reader.layer_ids), reader.info.hidden_size), torch_dtype(reader.info.dtype))
    except (RuntimeError, OSError) as error:
        raise MemoryError(f"the rows wanted are {reader.nbytes} bytes: read fewer rows or layers at a time") from error


def empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty, which takes small pages of memory for large tensors too: to get those takes longer than to fill them.

    Raises RuntimeError and OSError where there is no memory.
    """
    torch_module, nbytes = require_torch(), math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE_BYTES:
        small: torch.Tensor = torch_module.empty(shape, dtype=dtype)
        return small
    large: torch.Tensor = torch_module.frombuffer(map_memory(nbytes), dtype=dtype).reshape(shape)
    return large
