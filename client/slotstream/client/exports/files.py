"""A sample's file in each format. Each is whole under its name, or not there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from slotstream.client.arrays import NumpyArrays
from slotstream.client.info import SampleInfo
from slotstream.client.reading import RowReader, little_endian
from slotstream.client.tensors import require_torch, torch_dtype
from slotstream.common.memory import map_memory
from slotstream.wire.columns import LOSS_MASK, TOKEN_IDS, RowFormat
from slotstream.wire.layout import SampleHeader, encode_header, header_bytes_for
from slotstream.wire.names import LAYER_NAMES_KEY


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """One sample in memory. `data` is [rows, layers, hidden] in the stored dtype, little-endian."""

    info: SampleInfo
    row_format: RowFormat  # Of the rows, and of `columns`.
    data: memoryview
    token_ids: array[int]
    columns: dict[str, bytes]
    layer_ids: tuple[int, ...]
    layer_names: tuple[str, ...]
    start: int = 0

    @classmethod
    def received(cls, reader: RowReader, mask: bytes | None) -> Rows:
        """All rows of `reader`, with this loss mask where it has none. Raises what reading raises, and MemoryError."""
        memory = memoryview(map_memory(reader.nbytes)) if reader.nbytes else memoryview(b"")
        reader.read_into(memory)
        columns = dict(reader.columns) if mask is None else {LOSS_MASK: mask, **reader.columns}
        form = reader.row_format
        if set(columns) != set(form.names):
            form = RowFormat.of(form.dtype, form.num_layers, form.hidden_size, columns)
        return cls(reader.info, form, memory, reader.token_ids, columns, reader.layer_ids, reader.layer_names, reader.start)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def header(self) -> SampleHeader:
        return header_of(self.info, self.row_format, self.num_rows, self.layer_ids, self.layer_names, self.start)

    def late(self) -> Iterator[bytes]:
        """What stands behind the rows, in the file's order."""
        for column in self.row_format.columns[1:]:
            yield little_endian(self.token_ids) if column.name == TOKEN_IDS else self.columns[column.name]


def header_of(
    info: SampleInfo,
    row_format: RowFormat,
    rows: int,
    layer_ids: tuple[int, ...],
    layer_names: tuple[str, ...],
    start: int,
) -> SampleHeader:
    """The header of a file of these rows. The metadata has the keys of the server's own files, and where the rows are from."""
    metadata = {
        **dict(sorted(info.metadata.items())),  # In the order of the wire a file would have other bytes each time.
        "format": "pt",
        "sample_id": info.sample_id,
        "namespace": info.namespace,
        "model": info.model,
        LAYER_NAMES_KEY: json.dumps(layer_names),
        "layer_ids": json.dumps(layer_ids, separators=(",", ":")),
        "tags": json.dumps(info.tags, separators=(",", ":"), sort_keys=True),
        "created_unix_ns": str(info.created_unix_ns),
        "committed_unix_ns": str(info.committed_unix_ns or 0),
        "first_row": str(start),
        "sample_rows": str(info.num_tokens),
    }
    header = SampleHeader(row_format, rows, metadata, header_bytes=0)
    return dataclasses.replace(header, header_bytes=header_bytes_for(header))


def sync(path: Path) -> None:
    """A file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name, synced, when the block ends well. What a killed process left of it is written over."""
    partial = path.with_name(f".{path.name[:200]}.partial")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_safetensors(rows: Rows, path: Path) -> None:
    """As the server's own files. Needs neither torch nor numpy."""
    with whole(path) as file:
        file.write(encode_header(rows.header()))
        file.write(rows.data)
        for data in rows.late():
            file.write(data)


def write_npz(rows: Rows, path: Path) -> None:
    """`hidden_states` float32 [rows, layers, hidden], `token_ids` int64, `layer_names`; `loss_mask` bool where there is one."""
    import numpy

    arrays = NumpyArrays()
    held = {
        "hidden_states": arrays.float32(arrays.of(rows.data, rows.info.dtype, rows.row_format.columns[0].shape(rows.num_rows))),
        "token_ids": numpy.array(rows.token_ids, dtype=numpy.int64),
        "layer_names": numpy.array(rows.layer_names),
    }
    if LOSS_MASK in rows.columns:
        held[LOSS_MASK] = numpy.frombuffer(rows.columns[LOSS_MASK], dtype=numpy.uint8) != 0
    with whole(path) as file:
        numpy.savez(file, **held)


def write_specforge(rows: Rows, path: Path) -> None:
    """`hidden_state` [1, rows, hidden] after the last norm, `aux_hidden_state` [1, rows, 3 * hidden], ids and mask int64."""
    hidden, aux = _base_and_others(rows)
    _save(path, {**_ids_and_mask(rows), "hidden_state": hidden[None], "aux_hidden_state": aux[None]})


def write_modelopt(rows: Rows, path: Path) -> None:
    """`hidden_states` [rows, hidden], `aux_hidden_states` [rows, 3 * hidden], and whether the last norm is still to come."""
    hidden, aux = _base_and_others(rows)
    prenorm = rows.info.metadata.get("num_hidden_layers") == str(rows.layer_ids[-1])
    _save(path, {**_ids_and_mask(rows), "hidden_states": hidden, "aux_hidden_states": aux, "hidden_states_prenorm": prenorm})


def _base_and_others(rows: Rows) -> tuple[Any, Any]:
    """[rows, hidden] of the last layer, and [rows, others * hidden]; each in memory of its own, so that it is saved alone."""
    torch = require_torch()
    flat = torch.frombuffer(rows.data, dtype=torch_dtype(rows.info.dtype))
    laid = flat.reshape(rows.row_format.columns[0].shape(rows.num_rows))
    return laid[:, -1].clone(), laid[:, :-1].flatten(1).clone()


def _ids_and_mask(rows: Rows) -> dict[str, Any]:
    torch = require_torch()
    mask = torch.frombuffer(bytearray(rows.columns[LOSS_MASK]), dtype=torch.uint8)
    return {"input_ids": torch.tensor(rows.token_ids, dtype=torch.int64), "loss_mask": mask.to(torch.int64)}


def _save(path: Path, held: dict[str, Any]) -> None:
    with whole(path) as file:
        require_torch().save(held, file)  # To a file and not a name, which would stand inside.
